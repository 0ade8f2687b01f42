"""Results of comparisons of methods, and of effective ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy

from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Result, columns, line, wrapped
from fedstat.results.tables import count, decimals, interval, number, p_equals
from fedstat.stats.compare import LEAST_PAIRS

_ROUNDING = 1e-9
"""Ranks that differ by less than this share of their mean are equal."""


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveRankResult(Result):
    """Effective rank of clients' personal parts, as :func:`fedstat.effective_rank` returns it.

    Attributes
    ----------
    rank : Dataset
        ``rank`` (layer, client), and checkpoint where there are several; NaN where the personal part is zero.
        ``largest`` (layer): the largest possible, the smaller of units and weights of a unit.
    baseline : str
        What was taken off the weights: "mean", the mean over clients, or the name of a shared factor.
    level : float
        Confidence level of the intervals of the mean over clients.
    """

    rank: xr.Dataset
    baseline: str
    level: float
    _figure: ClassVar[str] = "forest"

    def to_dataset(self) -> xr.Dataset:
        """``rank`` and ``largest``."""
        return self.rank

    def tidy(self) -> pd.DataFrame:
        """One row per layer (and checkpoint): term, estimate (mean over clients), error, interval (t), n, largest."""
        rank = self.rank["rank"]
        n, mean = rank.notnull().sum("client"), rank.mean("client")
        variance = ((rank - mean) ** 2).sum("client") / (n - 1).where(n > 1)
        spread = rank.max("client") - rank.min("client") > _ROUNDING * mean  # equal ranks have none to go by
        data = xr.Dataset({"estimate": mean, "std_error": np.sqrt((variance / n).where(spread))})
        half = data["std_error"] * xr.apply_ufunc(scipy.special.stdtrit, (n - 1).where(n > 1), (1 + self.level) / 2)
        data = data.assign(conf_low=data["estimate"] - half, conf_high=data["estimate"] + half, n_clients=n)
        table = data.assign(largest=self.rank["largest"].broadcast_like(n)).to_dataframe().reset_index()
        order = [d for d in ("layer", "checkpoint") if d in n.dims]
        return table[[*order, *map(str, data.data_vars), "largest"]].rename(columns={"layer": "term"})

    def augment(self) -> pd.DataFrame:
        """One row per layer, client (and checkpoint): rank."""
        return self.rank["rank"].to_dataframe().reset_index().rename(columns={"layer": "term"})

    def glance(self) -> pd.DataFrame:
        """One row: layers, clients, personal parts that are zero, what was taken off, level."""
        rank = self.rank["rank"]
        row: dict[str, Any] = {"n_layers": rank.sizes["layer"], "n_clients": rank.sizes["client"]}
        row |= {"n_undefined": int(rank.isnull().sum()), "baseline": self.baseline, "level": self.level}
        return pd.DataFrame([row])

    def _lines(self) -> list[str]:
        off = {"mean": " minus their mean", "nothing": ""}.get(self.baseline, f" minus {self.baseline!r}")
        row, table = self.glance().iloc[0], self.tidy()
        when = [f", round {number}" for number in table["checkpoint"]] if "checkpoint" in table else [""] * len(table)
        rows = [(f"{x['term']}{at}", self._estimate(x)) for at, (_, x) in zip(when, table.iterrows(), strict=True)]
        lines = [
            f"Effective rank of client weights{off} (mean over {count(row['n_clients'], 'client')})",
            *columns(rows),
        ]
        if row["n_undefined"]:
            lines.append(f"  {row['n_undefined']} undefined: nothing of the weights is personal")
        return lines

    def _estimate(self, x: pd.Series[Any]) -> str:
        """Mean over clients with its interval, or the reason why there is none, and the largest possible rank."""
        if np.isfinite(x["conf_low"]):
            ends = f"[{number(x['conf_low'], 2)}, {number(x['conf_high'], 2)}]"
            certain = f", {100 * self.level:g}% CI {ends} (t)"
        elif x["n_clients"] > 1:
            certain = f" (no CI: equal in all {x['n_clients']} clients)"
        else:
            certain = f" (no CI: {count(x['n_clients'], 'client')} with a rank)"
        return f"{number(x['estimate'], 2)}{certain}; maximum {x['largest']}"


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult(Result):
    """Methods against a reference, within blocks, as :func:`fedstat.compare` returns it.

    Attributes
    ----------
    table : DataFrame
        One row per method, in the order of appearance: ``method``; ``n_values``, ``mean`` and ``std_error_mean`` of its
        own values; ``n_pairs``, blocks that it shares with the reference; ``n``, size of the sample: values of the
        column ``sample``; ``difference``, mean over the sample of value − reference within blocks, with ``std_error``,
        ``statistic`` (t), ``df``, ``p_value``, ``conf_low`` and ``conf_high``; ``p_holm``, adjusted over all methods;
        ``sim_conf_low`` and ``sim_conf_high``, simultaneous intervals for all methods; ``p_sign_flip``. NaN for the
        reference itself; without a test and intervals where ``n`` is less than 3.
    reference : str
    level : float
        Confidence level of the intervals.
    notes : tuple of str
        What was left out or cannot be said, in words.
    value : str
        What is compared.
    block : tuple of str
        Columns within whose values methods are paired.
    sample : str
        The one of them whose values are the sample.
    """

    table: pd.DataFrame
    reference: str
    level: float
    notes: tuple[str, ...]
    value: str
    block: tuple[str, ...]
    sample: str
    _figure: ClassVar[str] = "forest"

    def tidy(self) -> pd.DataFrame:
        """One row per other method: term, n, estimate (difference), std_error, ..., sim_conf_low, sim_conf_high, ..."""
        others = self.table[self.table["method"] != self.reference]
        others = others.drop(columns=["n_values", "mean", "std_error_mean"]).reset_index(drop=True)
        return others.rename(columns={"method": "term", "difference": "estimate"})

    def augment(self) -> pd.DataFrame:
        """One row per method, the reference included: term, n, mean and std_error of its own values."""
        names = {"method": "term", "n_values": "n", "std_error_mean": "std_error"}
        return self.table[["method", "n_values", "mean", "std_error_mean"]].rename(columns=names)

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
        others = self.table[self.table["method"] != self.reference]
        digits = decimals(others["std_error"])
        n = "pairs" if len(self.block) == 1 else "n"
        rows = [("method", "mean (SE)", f"difference [{100 * self.level:g}% CI]", "p (Holm)", n)]
        for x in self.table.to_dict("records"):
            mean = f"{number(x['mean'], digits)} ({number(x['std_error_mean'], digits)})"
            compared = ("reference", "", "")
            if x["method"] != self.reference:
                compared = (
                    difference(x, "pairs", digits),
                    p_equals(x["p_holm"]).removeprefix("p ").lstrip("= "),
                    str(x["n"]),
                )
            rows.append((x["method"], mean, *compared))
        return "\n".join(
            [
                wrapped(f"{self.value}: {self._methods()} {self.reference}, paired by {' and '.join(self.block)}"),
                *self._about_sample(),
                *columns(rows, n_right=2),
                f"Paired t tests; CIs simultaneous over {count(len(others), 'comparison')} (Bonferroni).",
            ]
        )

    def _methods(self) -> str:
        return f"{count(len(self.table) - 1, 'method')} compared with"

    def _about_sample(self) -> list[str]:
        """What the sample is, where it is not the pairs."""
        if len(self.block) == 1:
            return []
        over = " and ".join(name for name in self.block if name != self.sample)
        averaged = f"n counts values of {self.sample}, each a mean over {over} ({self.table['n_pairs'].max()} pairs)"
        return [wrapped(f"{averaged}; results are for these values of {over} and other values of {self.sample}")]

    def summary(self) -> str:
        """Comparison, then what was left out or cannot be said."""
        return "\n".join([repr(self), *(line(f"  {note}") for note in self.notes)])


def difference(row: Mapping[Any, Any], pairs: str = "seeds", digits: int = 4) -> str:
    """A difference with the interval that holds for all methods of a table, or why there is none.

    Parameters
    ----------
    row : mapping
        A row of :attr:`ComparisonResult.table`.
    pairs : str
        What is paired, in words.
    digits : int
        Decimal places.

    Examples
    --------
    >>> difference({"difference": 0.01, "sim_conf_low": -0.02, "sim_conf_high": 0.04, "n": 4})
    '+0.0100 [-0.0200, +0.0400]'
    >>> difference({"difference": 0.01, "sim_conf_low": float("nan"), "sim_conf_high": float("nan"), "n": 2}, "blocks")
    '+0.0100 (too few blocks)'
    """
    limits = row["difference"], row["sim_conf_low"], row["sim_conf_high"]
    if 0 < row["n"] < LEAST_PAIRS:
        return f"{interval(*limits, digits)} (too few {pairs})"
    return interval(*limits, digits, equal=f"{row['n']} {pairs}" if row["n"] else "")
