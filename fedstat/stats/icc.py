"""Agreement of clients on a unit's weights: intraclass correlations from sums over clients.

Targets are a unit's weights, raters the clients: a two-way layout with one value per cell, complete by construction.
Weights are NumPy arrays or torch tensors; sums and mean squares have the type of the weights, in float64.
Coefficients, agreement and adjusted p values are NumPy arrays on the host, because SciPy computes the F distributions.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils.check import numpy_of
from fedstat.stats import moments

Array = Any
Type = Literal["ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"]
TYPES: tuple[Type, ...] = ("ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k")

ZERO = 1e-26
"""A sum of squares below this proportion of all squares is rounding of float64 means."""
# Numbers in one block of temporaries: on the CPU few enough for its cache, elsewhere to fit beside the data.
_CACHED, _BLOCK = 1 << 19, 1 << 24
_ALL = slice(None)
# Sums of squares between this number and its reciprocal are far from the limits of float64.
_ORDINARY = 2.0**500
# If squares exceed the residual by this factor, the profile is subtracted before summing, to avoid cancellation.
_LOSES = 1e3


class TwoWay(NamedTuple):
    """Sums of a layout clients x weights; ``+`` joins disjoint sets of clients without loss of digits.

    Equivalent to Σ_c w and Σ_c w², but centered and joined pairwise (Chan, Golub and LeVeque 1983, The American
    Statistician 37, 242-247).

    Attributes
    ----------
    n : array ()
        Number of clients.
    exponent : array (unit,)
        All other fields are divided by ``2 ** exponent``, squares by its square.
    mean : array (unit,)
        Mean over clients and weights.
    profile : array (unit, weight)
        Mean over clients, minus ``mean``.
    clients : array (unit,)
        Σ_c (client's mean over weights − mean)².
    residual : array (unit,)
        Σ_c Σ_i (weight − client's mean − profile)².
    """

    n: Array
    exponent: Array
    mean: Array
    profile: Array
    clients: Array
    residual: Array

    @property
    def is_finite(self) -> bool:
        """True if all weights are finite."""
        xp = array_namespace(self.residual)
        return bool(xp.all(xp.isfinite(self.residual)))

    def __add__(self, other: TwoWay) -> TwoWay:  # type: ignore[override]
        xp = array_namespace(self.mean)
        top = xp.maximum(self.exponent, other.exponent)
        a, b = rescaled(self, top), rescaled(other, top)
        n = a.n + b.n
        share, pair = b.n / n, a.n * b.n / n
        shift, turn = b.mean - a.mean, b.profile - a.profile
        return TwoWay(
            n,
            top,
            a.mean + share * shift,
            a.profile + share * turn,
            a.clients + b.clients + pair * shift**2,
            a.residual + b.residual + pair * xp.vecdot(turn, turn),
        )


class Sums(NamedTuple):
    """Sums that determine the intraclass correlations of a layer and of each of its units; ``+`` joins clients.

    Attributes
    ----------
    units : TwoWay
        Sums over the weights of every unit.
    layer : TwoWay
        Sums over the units' means, as if these were the weights of one unit.
    """

    units: TwoWay
    layer: TwoWay

    def __add__(self, other: Sums) -> Sums:  # type: ignore[override]
        return Sums(self.units + other.units, self.layer + other.layer)


class MeanSquares(NamedTuple):
    """Two-way analysis of variance without replicates; mean squares are divided by ``4 ** exponent``.

    Attributes
    ----------
    weights, clients, residual : array (...,)
        MSB (between targets), MSJ (between raters) and MSE.
    n_weights, n_clients : int
        Numbers of targets and raters.
    exponent : array (...,)
    """

    weights: Array
    clients: Array
    residual: Array
    n_weights: int
    n_clients: int
    exponent: Array


class Coefficients(NamedTuple):
    """Intraclass correlations with tests, as arrays (..., type) in the order of :data:`TYPES`.

    Attributes
    ----------
    icc, conf_low, conf_high : array (..., type)
    statistic : array (..., type)
        F, or the statistic of a test over clients.
    df1, df2 : array (type,) or None
        Degrees of freedom of F.
    p_value : array (..., type)
    """

    icc: NDArray[np.float64]
    statistic: NDArray[np.float64]
    df1: NDArray[np.float64] | None
    df2: NDArray[np.float64] | None
    p_value: NDArray[np.float64]
    conf_low: NDArray[np.float64]
    conf_high: NDArray[np.float64]


def sums(w: Array, baseline: Array | None = None) -> Sums:
    """Compute the sums over a block of clients.

    Parameters
    ----------
    w : array (client, unit, weight)
        Any real type.
    baseline : array (unit, weight), optional
        Values that are subtracted from every client's weights.

    Examples
    --------
    >>> w = np.random.default_rng(0).normal(size=(10, 3, 20))
    >>> joined, total = sums(w[:4]) + sums(w[4:]), sums(w)
    >>> np.allclose(joined.units.residual, total.units.residual)
    True
    """
    xp = array_namespace(w)
    k, d, n = w.shape
    clients = min(k, max(1, at_once(w) // n))
    totals, means = [], []
    with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite show in the sums
        for units in slices(d, max(1, at_once(w) // (n * clients))):
            blocks = [_two_way(*block(w, baseline, c, units)) for c in slices(k, clients)]
            totals.append(reduce(add, (t for t, _ in blocks)))
            means.append(xp.concat([client_means for _, client_means in blocks]))
        units_total = TwoWay(totals[0].n, *(xp.concat(field) for field in list(zip(*totals, strict=True))[1:]))
        return Sums(units_total, _two_way(*block(xp.concat(means, axis=1)[:, None, :]))[0])


def mean_squares(s: Sums) -> MeanSquares:
    """Return the mean squares of every unit; arrays (unit,)."""
    t = s.units
    xp = array_namespace(t.mean)
    k, n = int(t.n), t.profile.shape[-1]
    return mean_squares_of(k * xp.vecdot(t.profile, t.profile), n * t.clients, t.residual, t.mean**2, t.exponent, k, n)


def layer_mean_squares(s: Sums) -> MeanSquares:
    """Return the mean squares of the layer; its targets are the weights of all units, also constant; arrays ()."""
    t, m = s.units, s.layer
    xp = array_namespace(t.mean)
    k, (d, n) = int(t.n), t.profile.shape
    top = xp.max(xp.concat([t.exponent, m.exponent]))
    t, m = rescaled(t, top), rescaled(m, top)
    within = k * xp.sum(xp.vecdot(t.profile, t.profile))
    between = k * xp.vecdot(m.profile, m.profile)[0]
    residual = xp.sum(t.residual) + n * m.residual[0]
    return mean_squares_of(within + n * between, n * d * m.clients[0], residual, m.mean[0] ** 2, top, k, n * d)


def coefficients(ms: MeanSquares, *, level: float = 0.95) -> Coefficients:
    """Compute the coefficients of Shrout and Fleiss with F tests of zero and intervals, as in R's ``psych::ICC``.

    Parameters
    ----------
    ms : MeanSquares
        Arrays on the host.
    level : float in (0, 1)
        Confidence level of the two-sided intervals.

    Returns
    -------
    Coefficients
        NaN if nothing varies; 1 with F = ∞ and an interval of length 0 if clients are equal. The types with k are
        minus infinity if the estimated variance of a mean over clients is 0 or less.

    References
    ----------
    Shrout, Fleiss (1979). Intraclass correlations: uses in assessing rater reliability. Psychol. Bull. 86, 420-428.
    McGraw, Wong (1996). Forming inferences about some intraclass correlation coefficients. Psychol. Methods 1, 30-46.
    """
    b, j, e = (np.asarray(x, dtype=np.float64) for x in ms[:3])
    n, k = ms.n_weights, ms.n_clients
    with np.errstate(divide="ignore", invalid="ignore"):
        b, j, e = (x / (b + j + e) for x in (b, j, e))  # avoids overflow of squares
        w = (j + (n - 1) * e) / n
        df1, df2 = float(n - 1), np.array([n * (k - 1), (n - 1) * (k - 1), (n - 1) * (k - 1)], dtype=float)
        statistic = np.stack([b / w, b / e, b / e], axis=-1)
        icc = point_estimates(b, j, e, n, k)
        low, high = _limits(statistic, df1, df2, 0.5 + level / 2)
        single = [_of_ratio(low, k), _of_ratio(high, k)]
        for bound, value in zip(single, _limits_agreement(b, j, e, icc[..., 1], n, k, 0.5 + level / 2), strict=True):
            bound[..., 1] = value
        limits = [np.concatenate([bound, spearman_brown(bound, k)], axis=-1) for bound in single]
        statistic, df2 = np.concatenate([statistic, statistic], axis=-1), np.tile(df2, 2)
        p_value = scipy.special.fdtrc(df1, df2, statistic)
    return Coefficients(icc, statistic, np.full(6, df1), df2, p_value, *limits)


def agreement(s: Sums) -> NDArray[np.float64]:
    """Return the ICC2 of every unit, on the host: array (unit,), NaN for a unit with a single value.

    Examples
    --------
    >>> unit = np.random.default_rng(0).normal(size=(1, 1, 20))
    >>> w = np.concatenate([unit.repeat(5, axis=0), np.random.default_rng(1).normal(size=(5, 1, 20))], axis=1)
    >>> agreement(sums(w)).round(2)
    array([1.  , 0.02])
    """
    ms = mean_squares(s)
    b, j, e = map(numpy_of, ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        return point_estimates(b, j, e, ms.n_weights, ms.n_clients)[..., TYPES.index("ICC2")]


def fdr(p_value: NDArray[np.float64]) -> NDArray[np.float64]:
    """Adjust p values (unit, type) over units to control the false discovery rate (Benjamini and Hochberg 1995)."""
    from statsmodels.stats.multitest import multipletests

    adjusted = np.full(p_value.shape, np.nan)
    for t in range(p_value.shape[1]):
        is_tested = ~np.isnan(p_value[:, t])
        if is_tested.any():
            adjusted[is_tested, t] = multipletests(p_value[is_tested, t], method="fdr_bh")[1]
    return adjusted


def block(w: Array, baseline: Array | None = None, clients: slice = _ALL, units: slice = _ALL) -> tuple[Array, Array]:
    """Return exponents (unit,) and weights (client, unit, weight) divided by the powers of 2.

    Weights are a copy, minus ``baseline``, of the clients and units in the slices.
    """
    xp = array_namespace(w)
    x = xp.astype(w[clients, units], xp.float64, copy=True)
    if baseline is not None:
        x -= baseline[units][None]
    e = xp.zeros(x.shape[1], dtype=xp.float64, device=device_of(x))
    if w.dtype != xp.float64 and (baseline is None or baseline.dtype != xp.float64):
        return e, x  # squares of other types do not overflow float64
    with np.errstate(over="ignore", invalid="ignore"):
        squares = xp.sum(xp.vecdot(x, x), axis=0)
    if bool(xp.all((squares > 1 / _ORDINARY) & (squares < _ORDINARY))):
        return e, x
    e = moments.exponent(moments.largest(x, (0, 2)))
    x *= (2.0**-e)[:, None]
    return e, x


def _two_way(e: Array, x: Array) -> tuple[TwoWay, Array]:
    """Return the sums of a block, and its clients' means (client, unit) without the exponent; overwrite ``x``."""
    xp = array_namespace(x)
    k, _, n = x.shape
    low, shift, weight_mean, client_mean = 0.0, 0.0, _over_clients(x), _over_weights(x)
    mean = xp.mean(weight_mean, axis=-1)
    squares = xp.sum(xp.vecdot(x, x), axis=0)
    residual = squares - k * xp.vecdot(weight_mean, weight_mean) - n * xp.sum(client_mean**2, axis=0) + n * k * mean**2
    if bool(xp.any(squares > _LOSES * residual)):
        low, shift = mean, weight_mean
        x -= shift  # avoids cancellation
        client_mean = _over_weights(x)
        x -= client_mean[..., None]
        residual = xp.sum(xp.vecdot(x, x), axis=0)
        weight_mean = _over_clients(x) + xp.mean(client_mean, axis=0)[:, None]
        mean = xp.mean(weight_mean, axis=-1)
        shift = shift - low[:, None]
    clients = xp.sum((client_mean - mean) ** 2, axis=0)
    profile = shift + (weight_mean - mean[:, None])
    n_clients = xp.asarray(float(k), dtype=xp.float64, device=device_of(x))
    return TwoWay(n_clients, e, low + mean, profile, clients, residual), (low + client_mean) * 2.0**e


def _over_clients(x: Array) -> Array:
    xp = array_namespace(x)
    k, d, n = x.shape
    return xp.reshape(_ones(x, k) @ xp.reshape(x, (k, d * n)), (d, n)) / k


def _over_weights(x: Array) -> Array:
    return x @ _ones(x, x.shape[-1]) / x.shape[-1]


def _ones(x: Array, n: int) -> Array:
    return array_namespace(x).ones(n, dtype=x.dtype, device=device_of(x))


def mean_squares_of(b: Array, j: Array, e: Array, offset: Array, exponent: Array, k: int, n: int) -> MeanSquares:
    """Return mean squares from sums of squares; sums within rounding of all squares become 0."""
    if k < 2:
        raise ValueError(f"agreement between clients needs at least 2 clients, but got {k}. Pass more clients.")
    if n < 2:
        raise ValueError(
            f"an intraclass correlation needs at least 2 weights in a unit, but got {n}. "
            "Biases are one number per unit: append them to the weights, or leave them out."
        )
    xp = array_namespace(b)
    rounding = ZERO * (xp.abs(b) + j + e + k * n * offset)
    b, j, e = (xp.where(xp.abs(x) <= rounding, xp.zeros_like(x), x) for x in (b, j, e))
    return MeanSquares(b / (n - 1), j / (k - 1), e / ((n - 1) * (k - 1)), n, k, exponent)


def point_estimates(b: Any, j: Any, e: Any, n: int, k: int) -> NDArray[np.float64]:
    """Return the coefficients (..., type) from mean squares."""
    w = (j + (n - 1) * e) / n
    agreement = (b - e) / (b + (k - 1) * e + k * (j - e) / n)
    single = np.stack([(b - w) / (b + (k - 1) * w), agreement, (b - e) / (b + (k - 1) * e)], axis=-1)
    return np.concatenate([single, spearman_brown(single, k)], axis=-1)


def spearman_brown(single: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Return the coefficients of means over k clients (Spearman-Brown); minus infinity up to -1 / (k - 1)."""
    denominator = 1 + (k - 1) * single
    with np.errstate(divide="ignore"):
        return np.where(denominator <= 0, -np.inf, k * single / denominator)


def _of_ratio(f: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    return np.where(np.isinf(f), 1.0, (f - 1) / (f + k - 1))


def _limits(f: Any, df1: Any, df2: Any, q: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the interval of a ratio of mean squares."""
    return f / scipy.special.fdtri(df1, df2, q), f * scipy.special.fdtri(df2, df1, q)


def _limits_agreement(b: Any, j: Any, e: Any, icc: Any, n: int, k: int, q: float) -> tuple[Any, Any]:
    """Return the interval of ICC2 by Satterthwaite's degrees of freedom (McGraw and Wong 1996, table 7)."""
    weight_of_error = n * (1 + (k - 1) * icc) - k * icc
    numerator = (n - 1) * (k - 1) * (k * icc * j + weight_of_error * e) ** 2
    denominator = (n - 1) * (k * icc * j) ** 2 + (weight_of_error * e) ** 2
    df = np.where(denominator == 0, 1.0, numerator / denominator)  # any value suffices for equal clients
    f1, f2 = scipy.special.fdtri(n - 1, df, q), scipy.special.fdtri(df, n - 1, q)
    spread = k * j + (k * n - k - n) * e
    return n * (b - f1 * e) / (f1 * spread + n * b), n * (f2 * b - e) / (spread + n * f2 * b)


def rescaled(t: TwoWay, top: Array) -> TwoWay:
    """Return the sums with another exponent."""
    xp = array_namespace(t.mean)
    if not bool(xp.any(t.exponent != top)):
        return t
    f = 2.0 ** (t.exponent - top)
    return TwoWay(
        t.n, xp.maximum(t.exponent, top), f * t.mean, f[:, None] * t.profile, f**2 * t.clients, f**2 * t.residual
    )


def slices(total: int, step: int) -> list[slice]:
    """Divide a range into slices of length ``step``."""
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


def at_once(w: Array) -> int:
    """Return the numbers in one block of temporaries."""
    return _CACHED if "cpu" in str(device_of(w)) else _BLOCK
