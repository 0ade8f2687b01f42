"""Variance components of clients x replicates by restricted maximum likelihood, with noise proportional to 1 / samples.

The model is the model of :mod:`fedstat.stats.variance_components` with normal e_cri of variance ω / size_cr. Every
weight has separate fixed effects, and weights count as replicates of one likelihood. Sufficient statistics are
therefore the clients' Gram matrix and the sums within clients.

Weights may be NumPy arrays or torch tensors; the Gram matrix and all results are NumPy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, to_device
from array_api_compat import device as device_of

from fedstat import stats
from fedstat._utils import check
from fedstat.stats import resampling
from fedstat.stats import variance_components as moments
from fedstat.stats.icc import slices
from fedstat.stats.variance_components import Array, Components, Floats

_GOLDEN = (np.sqrt(5) - 1) / 2
# Steps that narrow the bracket to 1e-9 of the scale; grid points of the bracket, as there may be several maxima.
_STEPS, _GRID = 44, 41
_NUMBERS = 1 << 22  # numbers in one block of temporaries
_LEAST = 1e-12  # smallest proportion of noise in the differences between clients


class Gram(NamedTuple):
    """Sufficient statistics of the likelihood; ``+`` joins weights, :meth:`pooled` joins units. Arrays on the host.

    Attributes
    ----------
    means : array (unit, client, client)
        Inner products of clients' means, weighted by sizes, minus their unweighted fit on (1, covariate).
    within : array (client, unit)
        Σ_i Σ_r size_cr (w_cri − client's weighted mean)².
    design : array (client, p)
        As in :class:`fedstat.stats.variance_components.SumsOfSquares`.
    n_weights : int
        Number of weights per unit.
    sizes : array (client, replicate)
        Numbers of training samples divided by their harmonic mean.
    """

    means: Floats
    within: Floats
    design: Floats
    n_weights: int
    sizes: Floats

    def __add__(self, other: Gram) -> Gram:  # type: ignore[override]
        is_equal = np.array_equal(self.sizes, other.sizes) and np.array_equal(self.design, other.design)
        if self.means.shape != other.means.shape or not is_equal:
            raise ValueError(
                "sums to be added must have equal clients, units, sizes and covariate, but got (unit, client, client) "
                f"{self.means.shape} and {other.means.shape}"
            )
        n_weights = self.n_weights + other.n_weights
        return Gram(self.means + other.means, self.within + other.within, self.design, n_weights, self.sizes)

    @property
    def squares(self) -> Floats:
        """Sum of all squares of each unit, array (unit,)."""
        return np.asarray((_diagonal(self.means) + self.within).sum(axis=0))

    def rescaled(self, exponent: Floats) -> Gram:
        """Return the sums of weights whose units are multiplied by 2 to the power of ``exponent`` (unit,)."""
        scale = 4.0**exponent
        return self._replace(means=self.means * scale[:, None, None], within=self.within * scale)

    def pooled(self) -> Gram:
        """Pool all units."""
        differs = (_diagonal(self.means) > 0).any(axis=0)
        means, within = self.means.sum(axis=0, keepdims=True), (self.within * differs).sum(axis=1, keepdims=True)
        return Gram(means, within, self.design, self.n_weights * len(self.means), self.sizes)


def gram(w: Array, sizes: Any = None, covariate: Any = None) -> Gram:
    """Compute the sums that determine the likelihood.

    Parameters
    ----------
    w : array (client, replicate, unit, weight)
        As in :func:`fedstat.stats.variance_components.parts`, with equal checks.
    sizes : array (client,) or (client, replicate), optional
        Training samples of each client or of each replicate; by default equal.
    covariate : array (client,), optional
    """
    w, basis = moments.checked(w, covariate)
    c, r, d, n = w.shape
    s = _sizes(sizes, c, r)
    xp, device = array_namespace(w), device_of(w)
    size, q = (to_device(xp.asarray(a), device) for a in (s, basis))
    means = xp.zeros((d, c, c), dtype=xp.float64, device=device)
    within = xp.zeros((c, d), dtype=xp.float64, device=device)
    for units, weights in moments.blocks(w):
        with np.errstate(invalid="ignore", over="ignore"):  # values that are not finite are named below
            g, v = _products(xp.astype(w[:, :, units, weights], xp.float64, copy=True), size, q)
        means[units] += g
        within[:, units] += v
    means, within = moments.on_host(means), moments.on_host(within)
    moments.require_finite(_diagonal(means), within, w)
    return Gram(means, within, basis, n, s)


def components(g: Gram, *, level: float = 0.95) -> Components:
    """Estimate by restricted maximum likelihood (Patterson and Thompson 1971), with jackknife intervals and test.

    Returns
    -------
    Components
        ``between`` is at least 0; ``within`` is the noise of a replicate of average noise, ω · mean 1 / size_cr.
        Intervals and test come from leaving out clients, not from the likelihood, which assumes independent weights.
        They are computed as in :func:`fedstat.stats.variance_components.components`, from the likelihood's estimate of
        log ((σ_b² + noise) / noise). There σ_b² may be negative as long as all variances are positive. Bounds below 0
        are set to 0, as the estimate is.

    Notes
    -----
    Simulations with known sizes and noise proportional to 1 / size, 1000 runs per case: the coverage of 95% intervals
    was 0.93 to 0.995, and 0.87 with 10 clients of unequal sizes and one weight. The test at 0.05 rejected a true H0 in
    0.017 to 0.058. With size ratios up to 1 : 7, the root mean squared error of ``reliability`` was 0.5 to 0.96 times
    the error of the method of moments truncated at 0.

    References
    ----------
    Patterson, Thompson (1971). Recovery of inter-block information when block sizes are unequal. Biometrika 58.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(20, 1, 1, 50)) + rng.normal(size=(20, 2, 1, 50))
    >>> components(gram(w)).reliability.round(6) == moments.components(moments.parts(w)).reliability.round(6)
    array([ True])
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    moments.require_noise(_diagonal(g.means), g.within)
    c, k = g.design.shape
    df, inverse = c - k, 1 / g.sizes.sum(axis=1)
    mean_inverse = inverse.mean()
    identical = (_diagonal(g.means) == 0).all(axis=0)
    noiseless = (g.within == 0).all(axis=0) | identical
    estimates = np.full((5, g.within.shape[1]), np.nan)
    for units in slices(len(noiseless), max(1, _NUMBERS // ((c + 1) * c * k))):
        varying = np.arange(len(noiseless))[units][~noiseless[units]]
        estimates[:, varying] = _estimates(g, varying, inverse)
    ratio, noise, theta, std_error, df_interval = estimates
    std_error[(g.within > 0).sum(axis=0) < min(c, stats.LEAST_VARYING)] = np.nan
    noise[noiseless] = g.within[:, noiseless].sum(axis=0) / (g.n_weights * (g.sizes.size - k))
    between = np.where(noiseless, 0.0, ratio * noise)
    statistic = theta / std_error
    half = scipy.special.stdtrit(df_interval, 0.5 + level / 2) * std_error
    return Components(
        between=between,
        within=noise,
        reliability=ratio / (ratio + mean_inverse),
        reliability_replicate=ratio / (ratio + 1),
        conf_low=np.maximum(-np.expm1(half - theta), 0),
        conf_high=np.maximum(-np.expm1(-half - theta), 0),
        statistic=statistic,
        p_value=scipy.special.stdtr(df, -statistic),
        std_error=std_error,
        df=df,
        level=level,
        df_interval=df_interval,
        identical=identical,
    )


def _estimates(g: Gram, units: Any, inverse: Floats) -> Floats:
    """Return λ = σ_b² / ω >= 0, ω, log (1 + λ / mean inverse size) with unbounded λ, its SE and df; array (5, unit)."""
    c = len(inverse)
    mean_inverse = inverse.mean()
    data = (g.means[units], g.within[:, units].T, g.design, g.n_weights, g.sizes.shape[1])
    all_clients, without_client = np.ones((1, c)), 1 - np.eye(c)
    best = _maximise(data, inverse, np.concatenate([all_clients, without_client]))
    ratio = np.maximum(best[:, 0], 0)
    if (is_negative := best[:, 0] < 0).any():  # the maximum over λ >= 0, which need not be at 0
        subset = (data[0][is_negative], data[1][is_negative], *data[2:])
        ratio[is_negative] = _maximise(subset, inverse, all_clients, bounded=True)[:, 0]
    noise = _criterion(ratio[:, None], data, inverse, all_clients)[1][:, 0]
    theta = np.log1p(best / mean_inverse)
    std_error, df = resampling.jackknife(theta[:, 1:].T, c - g.design.shape[1])
    return np.stack([ratio, noise, theta[:, 0], std_error, df])


def _maximise(data: Any, inverse: Floats, keep: Floats, *, bounded: bool = False) -> Floats:
    """Maximize the likelihood over λ (unit, set of clients): a grid, then golden section around its best point."""
    mean_inverse = inverse.mean()
    least = 0.0 if bounded else -(1 - 1e-6) * inverse.min()

    def evaluate(t: Floats) -> Floats:
        return _criterion(mean_inverse * (1 / t - 1), data, inverse, keep)[0]

    # 1 / (1 + λ / mean_inverse) decreases to 0.
    t = minimize(evaluate, (len(data[0]), len(keep)), 1 / (1 + least / mean_inverse))
    return mean_inverse * (1 / t - 1)


def minimize(evaluate: Callable[[Floats], Floats], shape: tuple[int, ...], start: float) -> Floats:
    """Minimize a function of arrays of a shape, each number by itself, from ``start`` down to nearly 0.

    A grid, then golden section around its best point.
    """
    grid = np.geomspace(_LEAST, start, _GRID)
    values = np.stack([evaluate(np.full(shape, t)) for t in grid])
    best = values.argmin(axis=0)
    low, high = np.log(grid[np.maximum(best - 1, 0)]), np.log(grid[np.minimum(best + 1, _GRID - 1)])
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    fa, fb = evaluate(np.exp(a)), evaluate(np.exp(b))
    for _ in range(_STEPS):
        lower = fa < fb
        low, high = np.where(lower, low, a), np.where(lower, b, high)
        new = np.where(lower, high - _GOLDEN * (high - low), low + _GOLDEN * (high - low))
        value = evaluate(np.exp(new))
        a, b, fa, fb = (
            np.where(lower, new, b), np.where(lower, a, new), np.where(lower, value, fb), np.where(lower, fa, value)
        )  # fmt: skip
    t = np.exp((low + high) / 2)
    starts = np.full(shape, start)
    return np.where(evaluate(starts) <= evaluate(t), starts, t)


def _criterion(ratio: Floats, data: Any, inverse: Floats, keep: Floats) -> tuple[Floats, Floats]:
    """Return -2 log restricted likelihood / weights, up to a constant, and ω; arrays (unit, set of clients).

    ``data`` are the Gram matrices (unit, client, client), sums within (unit, client), the design, and the numbers of
    weights per unit and of replicates.
    """
    means, within, q, n, r = data
    variance = ratio[..., None] + inverse
    v = keep / variance
    vq = v[..., None] * q
    a = np.swapaxes(vq, -1, -2) @ q
    b = np.swapaxes(vq, -1, -2) @ (means[:, None] @ vq)
    between = (v * np.diagonal(means, axis1=1, axis2=2)[:, None]).sum(-1) - np.trace(np.linalg.solve(a, b), 0, -2, -1)
    df = r * keep.sum(axis=1) - q.shape[1]
    total = (within @ keep.T + between) / (n * df)
    return df * np.log(total) + (keep * np.log(variance)).sum(-1) + np.linalg.slogdet(a)[1], total


def _products(x: Array, size: Array, q: Array) -> tuple[Array, Array]:
    """Return the Gram matrices (unit, client, client) and sums within (client, unit) of a block; overwrite ``x``."""
    xp = array_namespace(x)
    c, r, d, n = x.shape
    proportion = (size / xp.sum(size, axis=1, keepdims=True))[:, None, :]
    mean = xp.asarray(x[:, 0], copy=True)
    x -= mean[:, None]  # equal replicates differ by exactly 0
    shift = xp.reshape(proportion @ xp.reshape(x, (c, r, d * n)), (c, d, n))
    x -= shift[:, None]
    within = xp.sum(xp.vecdot(x, x) * size[:, :, None], axis=1)
    mean -= xp.asarray(mean[:1], copy=True)  # centering on a client avoids cancellation
    mean += shift
    mean -= xp.asarray(shift[:1], copy=True)
    flat = xp.reshape(mean, (c, d * n))
    flat -= q @ (xp.matrix_transpose(q) @ flat)
    residual = xp.permute_dims(xp.reshape(flat, (c, d, n)), (1, 0, 2))
    return residual @ xp.matrix_transpose(residual), within


def _diagonal(means: Floats) -> Floats:
    """Return the diagonals of Gram matrices, (client, unit)."""
    return np.asarray(np.diagonal(means, axis1=1, axis2=2).T)


def _sizes(sizes: Any, clients: int, replicates: int) -> Floats:
    if sizes is None:
        return np.ones((clients, replicates))
    s = np.asarray(check.numbers("sizes", moments.on_host(sizes)), dtype=np.float64)
    if s.shape == (clients,):
        s = np.repeat(s[:, None] / replicates, replicates, axis=1)
    if s.shape != (clients, replicates):
        raise ValueError(
            f"sizes must be (client,) or (client, replicate), ({clients},) or ({clients}, {replicates}), "
            f"but got {s.shape}"
        )
    if not (np.isfinite(s).all() and (s > 0).all()):
        raise ValueError(f"sizes must be finite and above 0, but got {s[~(np.isfinite(s) & (s > 0))][0]:g}")
    return np.asarray(s * np.mean(1 / s))
