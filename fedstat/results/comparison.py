"""Do methods differ: a paired comparison, as a table and in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstat._later import pd
from fedstat.results.base import Result, line
from fedstat.results.numbers import interval, p_value, plus_minus
from fedstat.stats.compare import LEAST_PAIRS


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult(Result):
    """Methods against a reference, within blocks, as :func:`fedstat.compare` returns it.

    Attributes
    ----------
    table : DataFrame
        One row per method; columns as in :class:`fedstat.stats.compare.Comparison`.
    reference : str
    level : float
        Confidence level of the intervals.
    notes : tuple of str
        What was left out or cannot be said, in words.
    """

    table: pd.DataFrame
    reference: str
    level: float
    notes: tuple[str, ...]
    _figure: ClassVar[str] = "forest"

    def tidy(self) -> pd.DataFrame:
        """One row per other method: term, n, estimate (difference), std_error, ..., p_holm, all_low, all_high, ..."""
        others = self.table[self.table["method"] != self.reference]
        columns = {"method": "term", "difference": "estimate"}
        others = others.drop(columns=["n_values", "mean", "std_error_mean"]).reset_index(drop=True)
        return others.rename(columns=columns)

    def augment(self) -> pd.DataFrame:
        """One row per method, the reference included: term, n, mean and std_error of its own values."""
        columns = {"method": "term", "n_values": "n", "std_error_mean": "std_error"}
        return self.table[["method", "n_values", "mean", "std_error_mean"]].rename(columns=columns)

    def glance(self) -> pd.DataFrame:
        """One row: reference, methods compared, blocks; those above and below it after Holm; level."""
        found = self.tidy()
        clear = found["p_holm"] <= 1 - self.level + 1e-12
        row = {
            "reference": self.reference,
            "n_methods": len(found),
            "n_blocks": int(found["n"].max()) if len(found) else 0,
            "n_above": int((clear & (found["estimate"] > 0)).sum()),
            "n_below": int((clear & (found["estimate"] < 0)).sum()),
            "level": self.level,
        }
        return pd.DataFrame([row])

    def __repr__(self) -> str:
        width = max(map(len, self.table["method"]))
        head = [
            f"{len(self.table) - 1} methods against {self.reference}, within blocks: mean ± standard error, difference",
            f"with simultaneous {100 * self.level:g} % intervals (Bonferroni), p by Holm",
        ]
        rows = []
        for x in self.table.to_dict("records"):
            shown = f"  {x['method']:<{width}}  {plus_minus(x['mean'], x['std_error_mean'])}"
            if x["method"] != self.reference:
                shown += f"  {difference(x, 'blocks')}  p {p_value(x['p_holm'])}, n {x['n']}"
            rows.append(shown)
        return "\n".join(map(line, [*head, *rows]))

    def summary(self) -> str:
        """Comparison, then what was left out or cannot be said."""
        return "\n".join([repr(self), *(line(f"  {note}") for note in self.notes)])


def difference(row: Mapping[Any, Any], pairs: str = "seeds") -> str:
    """A difference with the interval that holds for all methods of a table, or why there is none.

    Parameters
    ----------
    row : mapping
        A row of :attr:`ComparisonResult.table`.
    pairs : str
        What is paired, in words.

    Examples
    --------
    >>> difference({"difference": 0.01, "all_low": -0.02, "all_high": 0.04, "n": 4})
    '+0.0100 [-0.0200, +0.0400]'
    >>> difference({"difference": 0.01, "all_low": float("nan"), "all_high": float("nan"), "n": 2}, "blocks")
    '+0.0100 (too few blocks)'
    """
    limits = row["difference"], row["all_low"], row["all_high"]
    if 0 < row["n"] < LEAST_PAIRS:
        return f"{interval(*limits)} (too few {pairs})"
    return interval(*limits, equal=f"{row['n']} {pairs}" if row["n"] else "")
