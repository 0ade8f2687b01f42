"""Results of effective ranks of client weights, and of comparisons of methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy

from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Result, aligned, columns, wrapped
from fedstat.results.exports import Headings
from fedstat.results.tables import NONE, count, decimals, interval, number, p_cell
from fedstat.stats.ranking import LEAST_PAIRS

_ROUNDING = 1e-9
"""Ranks are equal if they differ by at most this proportion of their mean."""


@dataclass(frozen=True, eq=False, repr=False)
class EffectiveRankResult(Result):
    """Effective rank of each client's weights minus a baseline, as :func:`fedstat.effective_rank` returns it.

    Attributes
    ----------
    rank : Dataset
        ``rank`` (layer, client), with the dim checkpoint if there are several; NaN where the difference from the
        baseline is zero. ``largest`` (layer): the largest possible rank, which is the number of units or of weights per
        unit, whichever is smaller.
    baseline : str
        Baseline that was subtracted from the weights: "mean" (the mean over clients), the name of a shared factor, or
        "nothing".
    level : float
        Confidence level of the intervals of the mean over clients.
    """

    rank: xr.Dataset
    baseline: str
    level: float
    _figure: ClassVar[str] = "forest"
    _headings: ClassVar[Headings] = {
        "layer": "term", "round": "checkpoint", "effective rank": "estimate", "CI": ("conf_low", "conf_high"),
        "maximum": "largest",
    }  # fmt: skip

    def to_dataset(self) -> xr.Dataset:
        """Return ``rank`` and ``largest``."""
        return self.rank

    def tidy(self) -> pd.DataFrame:
        """Return one row per layer (and checkpoint).

        Returns
        -------
        DataFrame (layer)
            term (the layer); checkpoint, if there are several; estimate (mean rank over clients), with conf_low and
            conf_high (t interval); largest (the largest possible rank); std_error; n_clients (clients with a rank).
            std_error and interval are NaN if ranks of all clients are equal.
        """
        rank = self.rank["rank"]
        n, mean = rank.notnull().sum("client"), rank.mean("client")
        variance = ((rank - mean) ** 2).sum("client") / (n - 1).where(n > 1)
        spread = rank.max("client") - rank.min("client") > _ROUNDING * mean  # equal ranks have no SE
        data = xr.Dataset({"estimate": mean, "std_error": np.sqrt((variance / n).where(spread))})
        half = data["std_error"] * xr.apply_ufunc(scipy.special.stdtrit, (n - 1).where(n > 1), (1 + self.level) / 2)
        data = data.assign(conf_low=data["estimate"] - half, conf_high=data["estimate"] + half, n_clients=n)
        table = data.assign(largest=self.rank["largest"].broadcast_like(n)).to_dataframe().reset_index()
        order = [d for d in ("layer", "checkpoint") if d in n.dims]
        names = ["estimate", "conf_low", "conf_high", "largest", "std_error", "n_clients"]
        return table[[*order, *names]].rename(columns={"layer": "term"})

    def augment(self) -> pd.DataFrame:
        """Return one row per layer and client (and checkpoint): term (the layer), client, rank."""
        return self.rank["rank"].to_dataframe().reset_index().rename(columns={"layer": "term"})

    def glance(self) -> pd.DataFrame:
        """Return one row: n_layers, n_clients, n_undefined (ranks that are NaN), baseline, level."""
        rank = self.rank["rank"]
        row: dict[str, Any] = {"n_layers": rank.sizes["layer"], "n_clients": rank.sizes["client"]}
        row |= {"n_undefined": int(rank.isnull().sum()), "baseline": self.baseline, "level": self.level}
        return pd.DataFrame([row])

    def _lines(self) -> list[str]:
        minus = {"mean": " minus their mean", "nothing": ""}.get(self.baseline, f" minus {self.baseline!r}")
        row, table = self.glance().iloc[0], self.tidy()
        rounds = [f", round {number}" for number in table["checkpoint"]] if "checkpoint" in table else [""] * len(table)
        rows = [
            (f"{x['term']}{of_round}", self._format_estimate(x))
            for of_round, (_, x) in zip(rounds, table.iterrows(), strict=True)
        ]
        lines = [
            f"Effective rank of client weights{minus} (mean over {count(row['n_clients'], 'client')})",
            *columns(rows),
        ]
        if row["n_undefined"]:
            zero = "weights are zero" if self.baseline == "nothing" else "weights equal the baseline"
            lines.append(f"  {row['n_undefined']} undefined: {zero}")
        return lines

    def _caption(self) -> list[str]:
        return [self._lines()[0], f"{self._ci}: t interval over clients"]

    def _format_estimate(self, x: pd.Series[Any]) -> str:
        """Return the mean over clients with its interval, or the reason why there is none, and the largest rank."""
        if np.isfinite(x["conf_low"]):
            ends = f"[{number(x['conf_low'], 2)}, {number(x['conf_high'], 2)}]"
            interval = f", {100 * self.level:g}% CI {ends} (t)"
        elif x["n_clients"] > 1:
            interval = f" (no CI: equal in all {x['n_clients']} clients)"
        else:
            interval = f" (no CI: {count(x['n_clients'], 'client')} with a rank)"
        return f"{number(x['estimate'], 2)}{interval}; maximum {x['largest']}"


@dataclass(frozen=True, eq=False, repr=False)
class ComparisonResult(Result):
    """Comparison of methods with a reference within blocks, as :func:`fedstat.compare` returns it.

    Attributes
    ----------
    table : DataFrame (method)
        One row per method, in the order of appearance:

        - ``method``; ``n_values``, ``mean`` and ``std_error_mean`` of the values of the method;
        - ``n_pairs``: number of blocks in which both the method and the reference have a value;
        - ``n``: sample size, the number of values of the column ``sample``;
        - ``difference``: mean over the sample of value − reference within blocks, with ``std_error``, ``statistic``
          (t), ``df``, ``p_value`` (paired t test), ``conf_low`` and ``conf_high``;
        - ``p_holm``: p value adjusted over all methods by Holm's procedure;
        - ``sim_conf_low``, ``sim_conf_high``: simultaneous intervals over all methods (Bonferroni);
        - ``p_sign_flip``: p value of the sign-flip test; H0: differences are symmetric about 0.

        The reference has NaN from ``difference`` on. So do tests and intervals if ``n`` is less than 3.
    reference : str
        Method that the others are compared with.
    level : float
        Confidence level of the intervals.
    notes : tuple of str
        Sentences on values that were left out, and on missing tests and intervals.
    value : str
        Name of the compared column.
    block : tuple of str
        Columns within whose values methods are paired.
    sample : str
        Column of ``block`` whose values are the sample.
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
        """Return one row per method, without the reference.

        Returns
        -------
        DataFrame (method)
            term (the method); estimate (the difference), sim_conf_low, sim_conf_high, p_holm and n; then its other
            columns, as in :attr:`table`.
        """
        table = self.table[self.table["method"] != self.reference]
        table = table.drop(columns=["n_values", "mean", "std_error_mean"]).reset_index(drop=True)
        first = ["method", "difference", "sim_conf_low", "sim_conf_high", "p_holm", "n"]
        return table[[*dict.fromkeys([*first, *table])]].rename(columns={"method": "term", "difference": "estimate"})

    def augment(self) -> pd.DataFrame:
        """Return one row per method, with the reference: term (the method), n, mean and std_error of its values."""
        names = {"method": "term", "n_values": "n", "std_error_mean": "std_error"}
        return self.table[["method", "n_values", "mean", "std_error_mean"]].rename(columns=names)

    def glance(self) -> pd.DataFrame:
        """Return one row that summarizes the comparison.

        Returns
        -------
        DataFrame (1,)
            reference; n_methods (without the reference); n_blocks (the largest sample size ``n``); n_above and n_below
            (methods above and below the reference with p_holm of at most 1 − level); level.
        """
        table = self.tidy()
        is_rejected = table["p_holm"] <= 1 - self.level + 1e-12
        row = {
            "reference": self.reference,
            "n_methods": len(table),
            "n_blocks": int(table["n"].max()) if len(table) else 0,
            "n_above": int((is_rejected & (table["estimate"] > 0)).sum()),
            "n_below": int((is_rejected & (table["estimate"] < 0)).sum()),
            "level": self.level,
        }
        return pd.DataFrame([row])

    def _printed(self, digits: int | None = None) -> pd.DataFrame:
        """Return means, differences with intervals, p values, and n if it varies."""
        if digits is None:
            digits = decimals(self.table.loc[self.table["method"] != self.reference, "std_error"])
        rows = []
        for x in self.table.to_dict("records"):
            mean = f"{number(x['mean'], digits)} ({number(x['std_error_mean'], digits)})"
            compared = ("reference", "", "")
            if x["method"] != self.reference:
                compared = (difference(x, "pairs", digits), p_cell(x["p_holm"]), str(x["n"]))
            rows.append((x["method"], mean, *compared))
        n = "pairs" if len(self.block) == 1 else "n"
        head = ["method", "mean (SE)", f"difference [{100 * self.level:g}% CI]", "p (Holm)", n]
        return pd.DataFrame(rows, columns=head).iloc[:, : 4 if self._n_pairs() is not None else 5]

    def _n_pairs(self) -> int | None:
        """Return the number of pairs, if it is equal for all methods and one column defines the blocks."""
        n = self.table.loc[self.table["method"] != self.reference, "n"]
        return int(n.iloc[0]) if len(self.block) == 1 and n.nunique() == 1 else None

    def _caption(self) -> list[str]:
        n_comparisons = int((self.table["method"] != self.reference).sum())
        methods = f"{count(n_comparisons, 'method')} compared with {self.reference}"
        n_pairs = self._n_pairs()
        pairs = "" if n_pairs is None else f" ({count(n_pairs, 'pair')})"
        return [
            f"{self.value}: {methods}, paired by {' and '.join(self.block)}{pairs}",
            *self._describe_sample(),
            self._describe_tests(),
        ]

    def _describe_tests(self) -> str:
        """Return the line on tests and intervals, with the number of comparisons that have enough pairs."""
        compared = self.table[self.table["method"] != self.reference]
        n_all, n = len(compared), int(((compared["n"] >= LEAST_PAIRS) | compared["p_value"].notna()).sum())
        if not n:
            return f"No test and no CI: they need at least {LEAST_PAIRS} pairs"
        of = f"{n} of {n_all} comparisons" if n < n_all else count(n, "comparison")
        return f"Paired t tests; CIs simultaneous over {of} (Bonferroni)"

    def __repr__(self) -> str:
        *head, tests = self._caption()
        return "\n".join([*map(wrapped, head), aligned(self._printed(), n_left=3, indent="  "), f"{tests}."])

    def _describe_sample(self) -> list[str]:
        """Return the line on the sample, if several columns define the blocks."""
        if len(self.block) == 1:
            return []
        over = " and ".join(name for name in self.block if name != self.sample)
        pairs = count(int(self.table["n_pairs"].max()), "pair")
        averaged = f"n counts values of {self.sample}, each a mean over {over} ({pairs})"
        return [f"{averaged}; results are for these values of {over} and other values of {self.sample}"]

    def summary(self) -> str:
        """Return the comparison, then notes on values that were left out and on missing tests."""
        return "\n".join([repr(self), *(wrapped(f"  {note}") for note in self.notes)])


def difference(row: Mapping[Any, Any], pairs: str = "seeds", digits: int = 4) -> str:
    """Return a difference with its simultaneous interval, or the reason why there is none.

    Parameters
    ----------
    row : mapping
        A row of :attr:`ComparisonResult.table`.
    pairs : str
        Word for the paired values, in the plural.
    digits : int
        Decimal places.

    Returns
    -------
    str

    Examples
    --------
    >>> difference({"difference": 0.01, "sim_conf_low": -0.02, "sim_conf_high": 0.04, "n": 4})
    '+0.0100 [-0.0200, +0.0400]'
    >>> difference({"difference": 0.01, "sim_conf_low": float("nan"), "sim_conf_high": float("nan"), "n": 2}, "blocks")
    '+0.0100 (too few blocks)'
    >>> nothing = float("nan")
    >>> difference({"difference": nothing, "sim_conf_low": nothing, "sim_conf_high": nothing, "n": 0, "n_pairs": 0})
    '– (no pairs)'
    """
    limits = row["difference"], row["sim_conf_low"], row["sim_conf_high"]
    if not row["n"]:
        return f"{NONE} (no complete pairs)" if row.get("n_pairs") else f"{NONE} (no pairs)"
    if row["n"] < LEAST_PAIRS:
        return f"{interval(*limits, digits)} (too few {pairs})"
    return interval(*limits, digits, equal=f"{row['n']} {pairs}")
