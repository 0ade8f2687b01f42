"""From communalities or agreement to shared and client-specific units (FedFac §4.1), and how far to trust the split.

NumPy or torch, the same out; :func:`contradicted` takes NumPy arrays and gives a bool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat.stats import factor

Array = Any

Method = Literal[factor.Method, "icc"]
METHODS: tuple[Method, ...] = (*factor.METHODS, "icc")
"""What units are split by: an estimator of the communality ν, or ``"icc"``, agreement between clients."""

# Values closer than this tie: equal units differ by rounding.
_TIE = 1e-12
# Labels contradict agreement where a shared unit is the more alike one in fewer than this proportion of the pairs,
# median ICC2s differ by so much, and clients are as many as a test of them needs.
_INVERTED, _P, _GROSS, _LEAST_CLIENTS = 1 / 3, 0.01, 0.15, 6


@dataclass(frozen=True)
class Absolute:
    """A threshold on the communality or ICC itself, where a bare number would be a quantile.

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
    """Value that a unit's statistic must reach for the unit to be shared.

    Parameters
    ----------
    statistic : array (..., unit)
        Communality ν, or agreement ICC; NaN (dead units) is left out of the quantile.
    tau : float in (0, 1), inf, -inf or Absolute
        A quantile of the statistic, taken so that round((1 − τ)·live units) of distinct values are shared; ``inf``
        makes every unit personal (FedPer, LG-FedAvg), ``-inf`` every unit shared (FedAvg).

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
    dead = xp.isnan(statistic)
    n_live = xp.sum(xp.astype(~dead, xp.int64), axis=-1)
    n_shared = xp.astype(xp.round((1 - tau) * xp.astype(n_live, xp.float64)), xp.int64)
    infinity = xp.asarray(math.inf, dtype=xp.float64, device=device_of(statistic))
    ascending = xp.sort(xp.where(dead, infinity, statistic), axis=-1)
    index = xp.clip(n_live - n_shared, min=0, max=statistic.shape[-1] - 1)
    value = xp.take_along_axis(ascending, index[..., None], axis=-1)[..., 0]
    return xp.where(n_shared == 0, infinity, value)


def shared(statistic: Array, *, tau: Tau = 0.5) -> Array:
    """Which units are shared: ζ_j = 1 if ν_j ≥ τ (FedFac §4.1), or if ICC_j ≥ τ.

    Parameters
    ----------
    statistic : array (..., unit)
        Communality (shared means explained by the other units) or ICC (shared means that clients agree).
    tau : float in (0, 1), inf, -inf or Absolute
        See :func:`threshold`. Units that tie with the threshold, up to rounding (1e-12), are all shared.

    Returns
    -------
    bool array (..., unit)
        A dead unit (NaN) is never shared, unless ``tau`` is ``-inf``: then everything is.

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
    """Return True if units labelled shared are less alike over clients than those labelled personal.

    The contradiction must be gross: of a shared and a personal unit, drawn at random, the shared one has the higher ICC
    in fewer than a third of the pairs (AUC < 1/3), and the median ICCs differ by 0.15 at least. It must not be due to
    chance: two-sided p < .01 in the test of Mann and Whitney, which takes units for independent and alike. Units of
    trained networks are neither, so that single clients can invert the order: fewer than 6 clients contradict nothing.

    Parameters
    ----------
    labels : bool array (unit,)
        True: shared.
    icc : array (unit,)
        Units without one (NaN) are left out.
    n_clients : int

    Examples
    --------
    >>> icc = np.array([0.9, 0.8, 0.95, 0.85, 0.7, 0.1, 0.2, 0.15, 0.25, 0.3])
    >>> contradicted(icc > 0.5, icc, 10), contradicted(icc < 0.5, icc, 10), contradicted(icc < 0.5, icc, 5)
    (False, True, False)
    """
    known = ~np.isnan(icc)
    labels, icc = labels[known], icc[known]
    n = int(labels.sum())
    pairs = n * (len(labels) - n)
    if n_clients < _LEAST_CLIENTS or not pairs or np.median(icc[~labels]) - np.median(icc[labels]) < _GROSS:
        return False
    if scipy.stats.rankdata(icc)[labels].sum() - n * (n + 1) / 2 >= _INVERTED * pairs:
        return False
    return bool(scipy.stats.mannwhitneyu(icc[labels], icc[~labels]).pvalue < _P)


def auc(statistic: Array, truth: Array) -> Array:
    """Area under the ROC curve: chance that a shared unit has the higher communality or ICC, ties counting one half.

    Parameters
    ----------
    statistic : array (..., unit)
        A dead unit (NaN) ranks below all others, as it is never shared.
    truth : bool array (unit,)
        Units that truly are shared; both kinds must occur.

    Returns
    -------
    array (...,)
        1 is perfect recovery, 0.5 chance, 0 a split that is exactly inverted.
    """
    xp = array_namespace(statistic, truth)
    if bool(xp.all(truth)) or not bool(xp.any(truth)):
        raise ValueError("the AUC needs shared and personal units in the truth, but all units are of one kind")
    lowest = xp.asarray(-math.inf, dtype=xp.float64, device=device_of(statistic))
    nu = xp.where(xp.isnan(statistic), lowest, statistic)
    a, b = nu[..., truth][..., :, None], nu[..., ~truth][..., None, :]
    return xp.mean(xp.astype(a > b, xp.float64) + 0.5 * xp.astype(a == b, xp.float64), axis=(-2, -1))


def same_state(a: Array, b: Array) -> Array:
    """Share of units with the same label in two splits (FedFac Fig. 7): bool arrays (..., unit) to (...,)."""
    xp = array_namespace(a, b)
    return xp.mean(xp.astype(a == b, xp.float64), axis=-1)


def adjusted_rand(a: Array, b: Array) -> Array:
    """Adjusted Rand index of two splits or clusterings (Hubert and Arabie 1985, J. Classification 2, 193-218).

    Parameters
    ----------
    a, b : bool or int array (..., unit)
        Integers number groups from 0.

    Returns
    -------
    array (...,)
        1 for equal splits, whatever the groups are called; 0 is expected from independent ones. Counts of pairs are
        exact up to 9000 units, so that values are scikit-learn's to the bit.

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
    # Ordered pairs of units that go together in both splits, in one of them, in none.
    both, only_a, only_b, neither = cells - n, in_a - cells, in_b - cells, n * n - in_a - in_b + cells
    span = (both + only_a) * (only_a + neither) + (both + only_b) * (only_b + neither)
    equal = (only_a == 0) & (only_b == 0)
    gain = 2 * (both * neither - only_a * only_b)
    return xp.where(equal, xp.ones_like(span), gain / xp.where(equal, xp.ones_like(span), span))


def _members(xp: Any, labels: Array) -> Array:
    """Which units are of each group: 0 or 1, (..., group, unit)."""
    groups = xp.arange(int(xp.max(labels)) + 1, device=device_of(labels))
    return xp.astype(labels[..., None, :] == groups[:, None], xp.float64)


def iteration_stability(
    r: Array, *, kappa: float = 0.85, tau: Tau = 0.5, max_iter: Sequence[int] = (50, 200, 1000), tol: float = 1e-3
) -> tuple[Array, Array]:
    """Does the split change if principal axis is iterated further?

    Parameters
    ----------
    r : array (..., unit, unit)
        Correlations.
    kappa, tau
        As in :func:`fedstat.stats.factor.fit` and :func:`shared`.
    max_iter : sequence of int
        Numbers of iterations to compare with the default stop; these runs ignore the tolerance.
    tol : float
        Tolerance of the default stop.

    Returns
    -------
    same : array (len(max_iter), ...)
        Share of units whose label equals the one at the default stop.
    change : array (len(max_iter), ...)
        Largest difference of a communality from the default stop.
    """
    xp = array_namespace(r)
    default = factor.fit(r, kappa=kappa, tol=tol).communality
    same, change = [], []
    for steps in max_iter:
        nu = factor.fit(r, kappa=kappa, max_iter=steps, tol=0).communality
        same.append(same_state(shared(nu, tau=tau), shared(default, tau=tau)))
        gap = xp.abs(nu - default)
        change.append(xp.max(xp.where(xp.isnan(gap), xp.zeros_like(gap), gap), axis=-1))
    return xp.stack(same), xp.stack(change)
