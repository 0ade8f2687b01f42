"""Paired differences of two methods: Student's t test and the sign-flip test. NumPy arrays."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

SIGN_FLIP_BLOCKS = 16
"""Largest number of blocks whose 2ⁿ sign patterns are enumerated."""

LEAST_PAIRS = 3
"""Smallest number of pairs with a test and an interval: the t distribution of two pairs has no mean and variance."""


def sign_flip(x: NDArray[np.float64]) -> float:
    """Return the exact two-sided p value of the mean under sign flips; NaN for 0 values or more than 16.

    Examples
    --------
    >>> sign_flip(np.array([1.0, 2.0, 4.0, -0.5]))
    0.25
    """
    if not np.isfinite(x).all():
        raise ValueError("the sign flip needs finite differences, but got NaN or infinite values. Leave them out.")
    if not 0 < len(x) <= SIGN_FLIP_BLOCKS:
        return math.nan
    signs = np.array(list(itertools.product((1.0, -1.0), repeat=len(x))))
    sums = np.abs(signs @ x)
    return float((sums >= sums[0] - 1e-12 * np.abs(x).sum()).mean())


def paired_test(d: NDArray[np.float64], level: float, rounding: float) -> dict[str, float]:
    """Return the mean difference of pairs, its paired t test and its interval.

    Differences that vary by rounding alone have no interval, and p = 1 if their mean is 0.

    Parameters
    ----------
    d : array (pair,)
        Finite differences.
    level : float in (0, 1)
    rounding : float
        Rounding error of the values: differences with a standard error up to this are equal.

    Returns
    -------
    dict
        ``n``, ``difference``, ``std_error``, ``df``, ``p_sign_flip``; for at least :data:`LEAST_PAIRS` pairs also
        ``statistic``, ``p_value``, ``conf_low`` and ``conf_high``.

    Examples
    --------
    >>> row = paired_test(np.array([1.0, 2.0, 3.0]), 0.95, 0.0)
    >>> row["difference"], round(row["p_value"], 3), row["p_sign_flip"]
    (2.0, 0.074, 0.25)
    """
    row: dict[str, float] = {"n": len(d), "difference": float(d.mean()) if len(d) else math.nan}
    row |= {"std_error": _std_error(d), "df": len(d) - 1 if len(d) > 1 else math.nan, "p_sign_flip": sign_flip(d)}
    if len(d) < 2:
        return row
    if row["std_error"] <= rounding:
        # Their spread is unknown, not 0, so that there is no interval.
        unknown = {"std_error": math.nan, "df": math.nan}
        return row | unknown | ({"difference": 0.0, "p_value": 1.0} if abs(row["difference"]) <= rounding else {})
    if len(d) < LEAST_PAIRS:
        return row
    from statsmodels.stats.weightstats import DescrStatsW

    sample = DescrStatsW(d)
    statistic, p_value, _ = sample.ttest_mean()
    low, high = sample.tconfint_mean(alpha=1 - level)
    return row | {
        "statistic": float(statistic), "p_value": float(p_value), "conf_low": float(low), "conf_high": float(high)
    }  # fmt: skip


def _std_error(x: NDArray[np.float64]) -> float:
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.nan
