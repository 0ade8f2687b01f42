"""Student's interval of a mean over replicates, seeds or clients, and the jackknife's standard errors over clients."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from fedstat import _check

LEAST_CLIENTS = 5
"""So many clients must vary in a unit for a statement on it: by chance, 3 or 4 line up in 1 of 4 or 8 cases."""
_ROUNDING = 1e-12


class Mean(NamedTuple):
    """A mean and what its values say of it.

    Attributes
    ----------
    n : int
    mean, std_error : float
    statistic, p_value : float
        t, and its two-sided p value for a mean of 0.
    low, high : float
        Student's interval.
    equal : bool
        Whether two or more values are all equal: their spread is unknown, not 0. Then, and for a single value,
        ``std_error`` and what rests on it are NaN.
    """

    n: int
    mean: float
    std_error: float
    statistic: float
    p_value: float
    low: float
    high: float
    equal: bool


def mean(values: ArrayLike, *, level: float = 0.95, rounding: float = 0.0) -> Mean:
    """Mean of independent values with Student's interval (Student 1908, Biometrika 6, 1-25).

    Parameters
    ----------
    values : array (n,)
        A NaN among them makes everything NaN.
    level : float in (0, 1)
    rounding : float >= 0
        Values that differ by up to this are equal, as are those that differ by 1e-12 of the largest.

    Returns
    -------
    Mean

    Examples
    --------
    >>> found = mean([1.0, 2.0, 3.0])
    >>> found.mean, round(found.low, 3), round(found.high, 3)
    (2.0, -0.484, 4.484)
    >>> mean([0.0, 0.0, 0.0]).equal, mean([0.0, 0.0, 0.0]).low
    (True, nan)
    """
    _check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    x = np.asarray(values, dtype=np.float64)
    n, none = len(x), math.nan
    centre = float(x.mean()) if n else none
    finite = math.isfinite(centre)
    equal = bool(n > 1 and finite and np.ptp(x) <= max(rounding, _ROUNDING * np.abs(x).max()))
    if n < 2 or equal or not finite:
        return Mean(n, centre, none, none, none, none, none, equal)
    error = float(x.std(ddof=1)) / math.sqrt(n)
    half = float(scipy.stats.t.ppf((1 + level) / 2, n - 1)) * error
    p_value = float(2 * scipy.stats.t.sf(abs(centre / error), n - 1))
    return Mean(n, centre, error, centre / error, p_value, centre - half, centre + half, False)


def jackknife(left_out: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Standard error and degrees of freedom of estimates, from those without one client at a time.

    Parameters
    ----------
    left_out : array (client, ...)
        Estimates without each client.
    most : int
        Degrees of freedom, at most.

    Returns
    -------
    std_error : array (...)
        Of the jackknife (Miller 1974, Biometrika 61, 1-15).
    df : array (...)
        (Σ v)² / Σ v² for squared deviations v of the estimates from their mean: where few clients carry the variance,
        it is known less well than their number says. For clients that vary alike it is near a third of their number.

    Examples
    --------
    >>> std_error, df = jackknife(np.array([0.0, 0.0, 0.0, 4.0]), 3)
    >>> float(std_error), round(float(df), 2)
    (3.0, 1.71)
    """
    n = len(left_out)
    with np.errstate(invalid="ignore", divide="ignore"):
        v = (left_out - left_out.mean(axis=0)) ** 2
        total = v.sum(axis=0)
        df = np.clip(np.nan_to_num(total**2 / (v**2).sum(axis=0), nan=most), 1, most)
        return np.sqrt((n - 1) / n * total), df
