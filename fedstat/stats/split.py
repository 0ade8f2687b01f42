"""Splits of units into shared and personal by communality or agreement (FedFac §4.1), and checks of splits.

NumPy arrays or torch tensors in and out; :func:`contradicted` takes NumPy arrays and returns a bool.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.stats import LEAST_FOR_CONTRADICTION, factor

Array = Any

Method = Literal[factor.Method, "icc"]
METHODS: tuple[Method, ...] = (*factor.METHODS, "icc")
"""Methods of a split: estimators of the communality ν, or ``"icc"``, agreement between clients."""

# Tolerance for ties: equal units differ by rounding.
_TIE = 1e-12
# A split contradicts agreement if shared units have the higher ICC2 in less than this proportion of pairs, with this
# p value, and median ICC2s differ by at least this much.
_INVERTED, _P, _GROSS = 1 / 3, 0.01, 0.15


@dataclass(frozen=True)
class Absolute:
    """Threshold on the value of the communality or ICC; a bare number is a quantile.

    Attributes
    ----------
    value : float
        Units with at least this communality or ICC are shared.

    Examples
    --------
    >>> import numpy as np
    >>> shared(np.array([0.2, 0.5, 0.9]), tau=Absolute(0.5))
    array([False,  True,  True])
    """

    value: float

    def __post_init__(self) -> None:
        check.real("Absolute(value)", self.value)


Tau = float | Absolute
"""Threshold of a split: a quantile in (0, 1), ±inf, or a value (:class:`Absolute`)."""


def threshold(statistic: Array, tau: Tau) -> Array:
    """Return the smallest statistic with which a unit is shared.

    Parameters
    ----------
    statistic : array (..., unit)
        Communality ν, or agreement ICC; NaN (constant units) is excluded from the quantile.
    tau : float in (0, 1), inf, -inf or Absolute
        A quantile of the statistic, defined so that round((1 − τ) · n) of n distinct values are shared. ``inf`` makes
        every unit personal (FedPer, LG-FedAvg), ``-inf`` makes every unit shared (FedAvg).

    Returns
    -------
    array (...,)
    """
    xp = array_namespace(statistic)
    zero = xp.zeros(statistic.shape[:-1], dtype=xp.float64, device=device_of(statistic))
    if isinstance(tau, Absolute):
        return zero + tau.value
    if isinstance(tau, float) and math.isinf(tau):
        return zero + tau
    check.real(
        "tau", tau, low=0, high=1, open_low=True, open_high=True,
        hint="A bare tau is a quantile over units; write Absolute(x) for a value, inf or -inf for a limit.",
    )  # fmt: skip
    constant = xp.isnan(statistic)
    n_varying = xp.sum(xp.astype(~constant, xp.int64), axis=-1)
    n_shared = xp.astype(xp.round((1 - tau) * xp.astype(n_varying, xp.float64)), xp.int64)
    infinity = xp.asarray(math.inf, dtype=xp.float64, device=device_of(statistic))
    ascending = xp.sort(xp.where(constant, infinity, statistic), axis=-1)
    index = xp.clip(n_varying - n_shared, min=0, max=statistic.shape[-1] - 1)
    value = xp.take_along_axis(ascending, index[..., None], axis=-1)[..., 0]
    return xp.where(n_shared == 0, infinity, value)


def shared(statistic: Array, *, tau: Tau = 0.5) -> Array:
    """Return the mask of shared units: ζ_j = 1 if ν_j ≥ τ (FedFac §4.1), or if ICC_j ≥ τ.

    Parameters
    ----------
    statistic : array (..., unit)
        Communality (shared: other units explain the unit) or ICC (shared: clients agree on the unit).
    tau : float in (0, 1), inf, -inf or Absolute
        See :func:`threshold`. All units that tie with the threshold, up to rounding (1e-12), are shared.

    Returns
    -------
    bool array (..., unit)
        A constant unit (NaN) is never shared, unless ``tau`` is ``-inf``: then every unit is.

    Examples
    --------
    >>> import numpy as np
    >>> nu = np.array([0.9, 0.1, 0.5, 0.7])
    >>> shared(nu, tau=0.25)
    array([ True, False,  True,  True])
    """
    xp = array_namespace(statistic)
    if isinstance(tau, float) and tau == -math.inf:
        return xp.ones_like(statistic, dtype=xp.bool)
    return statistic >= threshold(statistic, tau)[..., None] - _TIE


def contradicted(labels: NDArray[np.bool_], icc: NDArray[np.float64], n_clients: int) -> bool:
    """Return True if clients agree less on shared than on personal units.

    The difference must be large: AUC < 1/3, so that the shared unit has the higher ICC in less than a third of the
    pairs, and median ICCs that differ by at least 0.15. It must be significant: two-sided p < .01 in the Mann-Whitney
    test, which assumes independent and identically distributed units. Units of trained networks do not satisfy this
    assumption, and a single client can invert the order: with fewer than 6 clients the result is False.

    Parameters
    ----------
    labels : bool array (unit,)
        True for shared units.
    icc : array (unit,)
        Units with NaN are excluded.
    n_clients : int

    Examples
    --------
    >>> icc = np.array([0.9, 0.8, 0.95, 0.85, 0.7, 0.1, 0.2, 0.15, 0.25, 0.3])
    >>> contradicted(icc > 0.5, icc, 10), contradicted(icc < 0.5, icc, 10), contradicted(icc < 0.5, icc, 5)
    (False, True, False)
    """
    has_icc = ~np.isnan(icc)
    labels, icc = labels[has_icc], icc[has_icc]
    n = int(labels.sum())
    pairs = n * (len(labels) - n)
    if n_clients < LEAST_FOR_CONTRADICTION or not pairs or np.median(icc[~labels]) - np.median(icc[labels]) < _GROSS:
        return False
    if scipy.stats.rankdata(icc)[labels].sum() - n * (n + 1) / 2 >= _INVERTED * pairs:
        return False
    return bool(scipy.stats.mannwhitneyu(icc[labels], icc[~labels]).pvalue < _P)


def auc(statistic: Array, truth: Array) -> Array:
    """Compute the AUC: the probability that a shared unit has the higher communality or ICC; ties count one half.

    Parameters
    ----------
    statistic : array (..., unit)
        A constant unit (NaN) ranks below all other units, as it is never shared.
    truth : bool array (unit,)
        True for units that are shared in the true split; both groups must occur.

    Returns
    -------
    array (...,)
        1 is perfect recovery, 0.5 chance, 0 an inverted split.
    """
    xp = array_namespace(statistic, truth)
    if bool(xp.all(truth)) or not bool(xp.any(truth)):
        raise ValueError("the AUC needs shared and personal units in the truth, but all units are in one group")
    lowest = xp.asarray(-math.inf, dtype=xp.float64, device=device_of(statistic))
    nu = xp.where(xp.isnan(statistic), lowest, statistic)
    a, b = nu[..., truth][..., :, None], nu[..., ~truth][..., None, :]
    return xp.mean(xp.astype(a > b, xp.float64) + 0.5 * xp.astype(a == b, xp.float64), axis=(-2, -1))


def prop_unchanged(a: Array, b: Array) -> Array:
    """Return the proportion (...,) of units in equal groups of two splits, bool arrays (..., unit) (FedFac Fig. 7)."""
    xp = array_namespace(a, b)
    return xp.mean(xp.astype(a == b, xp.float64), axis=-1)


def adjusted_rand(a: Array, b: Array) -> Array:
    """Compute the adjusted Rand index of two partitions (Hubert and Arabie 1985, J. Classification 2, 193-218).

    Parameters
    ----------
    a, b : bool or int array (..., unit)
        Groups of the units; integers start from 0.

    Returns
    -------
    array (...,)
        1 for identical partitions, whatever the names of the groups; expectation 0 for independent partitions. Counts
        of pairs are exact up to 9000 units, so that values equal the values of scikit-learn to the bit.

    Examples
    --------
    >>> import numpy as np
    >>> float(adjusted_rand(np.array([True, True, False, False]), np.array([True, True, False, True])))
    0.0
    """
    xp = array_namespace(a, b)
    n = a.shape[-1]

    def square(x: Array) -> Array:
        return xp.sum(xp.astype(x, xp.float64), axis=-1) ** 2

    if xp.isdtype(a.dtype, "bool"):
        cells = square(a & b) + square(a & ~b) + square(~a & b) + square(~a & ~b)
        in_a, in_b = square(a) + square(~a), square(b) + square(~b)
    else:
        of_a, of_b = _members(xp, a), _members(xp, b)
        cells = xp.sum((of_a @ xp.matrix_transpose(of_b)) ** 2, axis=(-2, -1))
        in_a, in_b = (xp.sum(square(of), axis=-1) for of in (of_a, of_b))
    # Ordered pairs of units that are in one group in both partitions, in one partition, in none.
    both, only_a, only_b, neither = cells - n, in_a - cells, in_b - cells, n * n - in_a - in_b + cells
    span = (both + only_a) * (only_a + neither) + (both + only_b) * (only_b + neither)
    equal = (only_a == 0) & (only_b == 0)
    gain = 2 * (both * neither - only_a * only_b)
    return xp.where(equal, xp.ones_like(span), gain / xp.where(equal, xp.ones_like(span), span))


def _members(xp: Any, labels: Array) -> Array:
    """Return indicators of the units of each group, 0 or 1: array (..., group, unit)."""
    groups = xp.arange(int(xp.max(labels)) + 1, device=device_of(labels))
    return xp.astype(labels[..., None, :] == groups[:, None], xp.float64)
