"""Comparison of methods: paired differences within blocks (seeds).

Methods that start from one seed see the same data, partition and initial weights, so accuracies of one seed go
together: the seed is a block, and only differences within seeds say how methods compare.

Tables in and out, no arrays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check

if TYPE_CHECKING:
    import pandas as pd


def told(data: pd.DataFrame, value: str, *labels: str) -> pd.DataFrame:
    """Return these columns; ValueError unless every row is labelled and its value is finite or NaN."""
    import pandas as pd

    for column in (value, *labels):
        if column not in data.columns:
            check.choice("a column of data", column, [str(c) for c in data.columns])
    data = data[[value, *labels]].reset_index(drop=True)
    for column in labels:
        if (hole := data[column].isna()).any():
            raise ValueError(
                f"every row must have its {column!r}, but it is missing in {hole.sum()} of {len(data)}, "
                f"first in the row with {_where(data[hole], labels)}. Fill in or leave out these rows."
            )
    for column in data.columns:
        if np.iscomplexobj(data[column]) and column == value:
            raise ValueError(f"{column!r} must hold numbers, but got dtype {data[column].dtype}")
        numeric = pd.api.types.is_numeric_dtype(data[column])
        if numeric and (out := np.isinf(data[column].astype(float))).any():
            raise ValueError(
                f"{column!r} must be finite or NaN, but got {data.loc[out, column].iloc[0]} in the row with "
                f"{_where(data[out], labels)}. Enter NaN for a diverged run."
            )
    return data


def require_one_each(data: pd.DataFrame, method: str, block: list[str]) -> None:
    """Raise ValueError if a method has two values in a block, naming it and where."""
    twice = data.duplicated([method, *block])
    if twice.any():
        raise ValueError(
            f"a method must have one value in a block, but got {data.loc[twice, method].iloc[0]!r} twice at "
            f"{_where(data[twice], block)}. Add what else varies to block, or select one value of it."
        )


def wide(data: pd.DataFrame, value: str, method: str, block: list[str]) -> pd.DataFrame:
    """Blocks by methods, both in order of appearance; NaN where there is no value."""
    by_method = data.set_index([*block, method])[value].astype(float)
    table = by_method.unstack()
    order = by_method.reset_index(level=-1)
    return table.reindex(index=list(dict.fromkeys(order.index)), columns=list(dict.fromkeys(order[method])))


def _where(rows: pd.DataFrame, labels: Sequence[str]) -> str:
    return ", ".join(f"{label} = {rows[label].iloc[0]}" for label in labels)


SIGN_FLIP_BLOCKS = 16
"""Up to this many blocks all 2ⁿ changes of sign are tried."""

LEAST_PAIRS = 3
"""Of a smaller sample nothing is claimed of a difference: of two, t has neither mean nor variance."""


class Comparison(NamedTuple):
    """Methods against a reference.

    Attributes
    ----------
    table : DataFrame
        One row per method, in the order of appearance: ``method``; ``n_values``, ``mean`` and ``std_error_mean`` of its
        own values; ``n_pairs``, blocks that it shares with the reference; ``n``, size of the sample: values of the
        column ``sample``; ``difference``, mean over the sample of value − reference within blocks, with ``std_error``,
        ``statistic`` (t), ``df``, ``p_value``, ``conf_low`` and ``conf_high``; ``p_holm``, adjusted over all methods;
        ``sim_conf_low`` and ``sim_conf_high``, simultaneous intervals for all methods; ``p_sign_flip``. NaN for the
        reference itself; without a test and intervals where ``n`` is less than ``LEAST_PAIRS``.
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


_ROUNDING = 2.0**-23  # of float32


def paired(
    data: pd.DataFrame,
    *,
    reference: str,
    value: str = "accuracy",
    method: str = "method",
    block: str | Sequence[str] = "seed",
    sample: str | None = None,
    level: float = 0.95,
) -> Comparison:
    """Compare methods with a reference within blocks.

    Parameters
    ----------
    data : DataFrame
        One row per method and block. Missing rows and NaN are left out of their method's pairs, and named.
    reference : str
        The method that the others are compared with.
    value, method : str
        Columns.
    block : str or sequence of str
        Columns that make a block, outer ones first: seeds, or data sets and seeds.
    sample : str, optional
        Of several columns, the one whose values are independent; differences are first averaged within each of them.
        With ``sample="seed"`` claims are of these data sets, and a seed must have a pair in all of them; with the data
        set, claims are of other data sets with these seeds.
    level : float in (0, 1)

    Returns
    -------
    Comparison

    Raises
    ------
    ValueError
        If a column or the reference is missing, a row lacks its method or block, a value is infinite, a method has two
        values in a block, or block has several columns and sample is none of them.

    Notes
    -----
    Pairs that share a seed or a data set are not independent of each other, so that their number is not the size of a
    sample. Tests and intervals are those of the paired t test. ``p_holm`` is Holm's step-down adjustment [1]_.
    ``sim_conf_low`` and ``sim_conf_high`` are Bonferroni's t intervals, at level 1 − (1 − level)/m for m comparisons:
    they hold simultaneously. Being as wide as Holm's first step, they never exclude 0 where Holm does not reject; Holm
    may reject where they contain 0. Each method has a variance of its own: one variance of all methods would be shorter
    with few blocks, but wrong where methods differ in spread. A method that differs by the same amount in every block
    has no standard error, but counts among the m.
    ``p_sign_flip`` is exact under the one assumption that differences are symmetric about 0 [2]_: the share of the 2ⁿ
    changes of sign whose mean is at least as far from 0. It cannot fall below 2¹⁻ⁿ: 0.25 with three blocks. Beyond 16
    blocks it is NaN. Differences that vary by less than the rounding of float32, in which accuracies are stored, count
    as the same.

    References
    ----------
    .. [1] Holm (1979), "A simple sequentially rejective multiple test procedure", Scand. J. Statist. 6, 65-70.
    .. [2] Fisher (1935), The design of experiments, §21.

    Examples
    --------
    >>> import pandas as pd
    >>> data = pd.DataFrame({"method": ["a", "b"] * 3, "seed": [0, 0, 1, 1, 2, 2], "accuracy": [5, 6, 7, 9, 5, 8.0]})
    >>> found = paired(data, reference="a").table.set_index("method")
    >>> found.loc["b", ["difference", "p_sign_flip"]].tolist()
    [2.0, 0.25]
    """
    import pandas as pd

    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    within = [block] if isinstance(block, str) else list(block)
    data = told(data, value, method, *within)
    data[method] = data[method].astype(str)
    check.choice("reference", reference, list(dict.fromkeys(data[method])))
    require_one_each(data, method, within)
    by_method = wide(data, value, method, within)
    sample = _sample(within, sample)
    rows, few = [], []
    notes: list[str] = []
    for name in map(str, by_method.columns):
        own = by_method[name].dropna()
        row = {"method": name, "n_values": len(own), "mean": own.mean() if len(own) else math.nan}
        row["std_error_mean"] = _std_error(np.asarray(_means(own, [sample]), np.float64))
        if name != reference:
            pairs = by_method[[reference, name]].dropna()
            if lacking := [_name(i) for i in by_method.index if i not in pairs.index]:
                notes.append(f"{name}: no pair with {reference} in {', '.join(lacking)}; left out")
            differences, partial = _averaged(pairs[name] - pairs[reference], within, sample)
            if partial:
                others = " and ".join(within[: within.index(sample)])
                notes.append(f"{name}: {', '.join(partial)} has pairs in some values of {others} only; left out")
            rounding = _ROUNDING * float(pairs.abs().to_numpy().max()) if len(pairs) else 0.0
            found = _difference(differences, level, rounding)
            row |= found | {"n_pairs": len(pairs)}
            if len(differences) > 1 and not math.isfinite(found["std_error"]):
                rest = "interval" if found["difference"] == 0 else "interval or test"
                notes.append(f"{name}: the same difference in every pair, so no standard error and no {rest}")
            elif 0 < len(differences) < LEAST_PAIRS:
                few.append(name)
        rows.append(row)
    if few:
        notes.append(f"fewer than {LEAST_PAIRS} pairs, so no interval and no test: {', '.join(few)}")
    table = pd.DataFrame(rows).reindex(columns=_COLUMNS)
    counts = ["n", "n_pairs"]
    table[counts] = table[counts].fillna(0).astype(int)
    return Comparison(_adjusted(table, level), reference, level, tuple(notes), value, tuple(within), sample)


def _sample(block: list[str], sample: str | None) -> str:
    """Column whose values are the sample."""
    if sample is None and len(block) == 1:
        return block[0]
    if sample not in block:
        raise ValueError(
            f"sample must be one of the columns of block, {', '.join(map(repr, block))}, but got {sample!r}. Pairs "
            "that share a value are not independent: name the column whose values are, such as sample='seed'."
        )
    return sample


def _averaged(differences: pd.Series[float], block: list[str], sample: str) -> tuple[NDArray[np.float64], list[str]]:
    """Mean difference of each value of the sample, and the names of values that lack a pair.

    Of columns before the sample each value is to be there, since differences depend on it; of those after it as many as
    there are.
    """
    outer = block[: block.index(sample)]
    found = _means(differences, [*outer, sample])
    if not outer:
        return np.asarray(found, np.float64), []
    table = found.unstack(outer)
    whole = table.notna().all(axis=1)
    return np.asarray(table[whole].mean(axis=1), np.float64), [f"{sample} {name}" for name in table.index[~whole]]


def _means(values: pd.Series[float], by: list[str]) -> pd.Series[float]:
    """Means by some of the columns of a block; the values themselves where a block has one column."""
    return values if values.index.nlevels == 1 else values.groupby(level=by, sort=False).mean()


_COLUMNS = [
    "method", "n_values", "mean", "std_error_mean", "n", "n_pairs", "difference", "std_error", "statistic", "df",
    "p_value", "conf_low", "conf_high", "p_holm", "sim_conf_low", "sim_conf_high", "p_sign_flip",
]  # fmt: skip


def sign_flip(x: NDArray[np.float64]) -> float:
    """Exact two-sided p-value of the mean under changes of sign; NaN for no or for more than 16 values.

    Examples
    --------
    >>> sign_flip(np.array([1.0, 2.0, 4.0, -0.5]))
    0.25
    """
    if not np.isfinite(x).all():
        raise ValueError("the sign flip needs finite differences, but got NaN or infinite ones. Leave them out.")
    if not 0 < len(x) <= SIGN_FLIP_BLOCKS:
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(x))))
    sums = np.abs(signs @ x)
    return float((sums >= sums[0] - 1e-12 * np.abs(x).sum()).mean())


def _difference(d: NDArray[np.float64], level: float, rounding: float) -> dict[str, float]:
    """Mean difference, its t test and interval; one that varies by rounding alone has none, but p = 1 if it is 0."""
    row: dict[str, float] = {"n": len(d), "difference": float(d.mean()) if len(d) else math.nan}
    row |= {"std_error": _std_error(d), "df": len(d) - 1 if len(d) > 1 else math.nan, "p_sign_flip": sign_flip(d)}
    if len(d) < 2:
        return row
    if row["std_error"] <= rounding:
        # Their spread is unknown, not 0: there is no interval.
        unknown = {"std_error": math.nan, "df": math.nan}
        return row | unknown | ({"difference": 0.0, "p_value": 1.0} if abs(row["difference"]) <= rounding else {})
    if len(d) < LEAST_PAIRS:
        return row
    from statsmodels.stats.weightstats import DescrStatsW

    described = DescrStatsW(d)
    statistic, p_value, _ = described.ttest_mean()
    low, high = described.tconfint_mean(alpha=1 - level)
    return row | {
        "statistic": float(statistic), "p_value": float(p_value), "conf_low": float(low), "conf_high": float(high)
    }  # fmt: skip


def _adjusted(table: pd.DataFrame, level: float) -> pd.DataFrame:
    """Add Holm's p values and Bonferroni's intervals; methods that have too few pairs are no part of the family."""
    from statsmodels.stats.multitest import multipletests

    tested = table["p_value"].notna()
    family = tested | (table["n"] >= LEAST_PAIRS)
    if m := int(family.sum()):
        p_holm = multipletests(table.loc[family, "p_value"].fillna(1.0), method="holm")[1]
        table.loc[family, "p_holm"] = p_holm
        table.loc[~tested, "p_holm"] = np.nan
        half = scipy.stats.t.ppf(1 - (1 - level) / (2 * m), table["df"]) * table["std_error"]
        table["sim_conf_low"], table["sim_conf_high"] = table["difference"] - half, table["difference"] + half
    return table


def _std_error(x: NDArray[np.float64]) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan


def _name(block: Hashable) -> str:
    return ", ".join(map(str, block)) if isinstance(block, tuple) else f"block {block}"
