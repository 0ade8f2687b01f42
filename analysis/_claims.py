"""What a difference and its interval justify saying, and whether two rankings agree: rules, in words.

Numbers and sequences of them in, numbers and words out.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from fedstat._utils import check

Claim = Literal["better", "worse", "the same", "below the noise floor", "inconclusive"]

_ORDERS = 99_999


def claim(difference: float, low: float, high: float, *, floor: float, margin: float) -> Claim:
    """What an interval of a difference says.

    Parameters
    ----------
    difference, low, high : float
        Estimate and limits of its interval; NaN limits where there is none.
    floor : float >= 0
        Difference that computation alone can produce; no difference up to it is claimed.
    margin : float > 0
        Differences within ± ``margin`` do not matter.

    Returns
    -------
    str
        "better" ("worse"): the interval lies above (below) 0, and the difference exceeds the floor. "the same": if
        neither, and the interval lies within the margin. "below the noise floor": if not that either, and the interval
        excludes 0. Otherwise "inconclusive".

    Examples
    --------
    >>> rule = {"floor": 0.003, "margin": 0.005}
    >>> claim(0.02, 0.01, 0.03, **rule), claim(0.001, -0.002, 0.004, **rule), claim(0.01, -0.01, 0.03, **rule)
    ('better', 'the same', 'inconclusive')
    >>> claim(0.0025, 0.0005, 0.006, **rule)
    'below the noise floor'
    """
    check.real("floor", floor, low=0)
    check.real("margin", margin, low=0, open_low=True)
    if low > 0 or high < 0:
        if abs(difference) > floor:
            return "better" if difference > 0 else "worse"
        return "the same" if -margin < low and high < margin else "below the noise floor"
    return "the same" if -margin < low and high < margin else "inconclusive"


class Ranks(NamedTuple):
    """Spearman's correlation ``r`` of ``n`` pairs, and its permutation p value (two-sided)."""

    r: float
    p_value: float
    n: int


def rank_correlation(x: ArrayLike, y: ArrayLike) -> Ranks:
    """Spearman's rank correlation with the p value of a permutation test.

    Parameters
    ----------
    x, y : array (n,)
        Ties get mean ranks.

    Returns
    -------
    Ranks
        NaN for fewer than 3 pairs, or where all values of x or of y are equal. The p value is the share of orders of y
        whose correlation is at least as far from 0: of all n! orders up to n = 8 (exact), beyond that of the observed
        order and 99999 random ones drawn from seed 0.

    Raises
    ------
    ValueError
        If the arrays differ in length or a value is not finite.

    Examples
    --------
    >>> rank_correlation([1, 2, 3, 4], [10, 20, 30, 25])
    Ranks(r=0.8, p_value=0.3333333333333333, n=4)
    """
    a, b = (np.asarray(v, dtype=np.float64) for v in (x, y))
    if a.ndim != 1 or a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError(
            f"x and y must hold equally many finite numbers, but got shapes {a.shape} and {b.shape}: {a}, {b}"
        )
    n = len(a)
    if n < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return Ranks(math.nan, math.nan, n)
    of_x, of_y = (_standardised(scipy.stats.rankdata(v)) for v in (a, b))

    def far(order: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
        return np.asarray(np.abs((order * of_x).sum(axis=axis)))

    found = scipy.stats.permutation_test(
        (of_y,), far, permutation_type="pairings", vectorized=True, n_resamples=_ORDERS, alternative="greater",
        random_state=0,
    )  # fmt: skip
    return Ranks(round(float(of_x @ of_y), 12), float(found.pvalue), n)


def _standardised(ranks: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = ranks - ranks.mean()
    return np.asarray(centred / np.linalg.norm(centred))
