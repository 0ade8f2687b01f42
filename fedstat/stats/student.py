"""Student's interval and test of a mean over replicates, seeds or clients; none where all of them are equal."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike

from fedstat import _check

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
