"""Intraclass correlations with clients as the sample: the jackknife and the bootstrap over clients.

F tests and intervals (:func:`fedstat.stats.icc.coefficients`) assume independent weights, which networks do not have.
This module assumes independent clients, and makes no assumption on weights. Weights may be NumPy arrays or torch
tensors; the coefficients are NumPy arrays on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import numpy_of
from fedstat._utils.streams import generator
from fedstat.stats import LEAST_VARYING, moments
from fedstat.stats.icc import (
    TYPES,
    Coefficients,
    MeanSquares,
    Sums,
    TwoWay,
    at_once,
    block,
    layer_mean_squares,
    mean_squares,
    mean_squares_of,
    point_estimates,
    slices,
    spearman_brown,
)
from fedstat.stats.icc_tests import AgreementTest, Bools, Rows, Test
from fedstat.stats.resampling import jackknife

Array = Any
Floats = NDArray[np.float64]

# A client's weights are constant if their squares about the mean are below this proportion of the squared mean.
_CONSTANT = 1e-26
MOST_CLIENTS = 128
"""Rows of a test: more clients are averaged within so many groups, to limit the products of pairs."""
# Largest rows in memory; numbers read at a time, in every pass, for larger rows; numbers in the cache.
_MEMORY, _READ, _CACHED = 1 << 28, 1 << 26, 1 << 18


class Influence(NamedTuple):
    """Contributions of single clients.

    Attributes
    ----------
    share : array (client,)
        Proportion of the squared deviations from the mean over clients, in the whole layer.
    layer_icc : array (client,)
        ICC2 of the layer without the client; NaN for 2 clients.
    """

    share: Floats
    layer_icc: Floats

    @property
    def n_effective(self) -> float:
        """Effective number of clients, 1 / Σ share² (Kish 1965, Survey sampling, section 11.2)."""
        return float(1 / np.square(self.share).sum())


class Errors(NamedTuple):
    """Jackknife standard errors of −log(1 − ICC2), and their degrees of freedom.

    Attributes
    ----------
    std_error, df : array (unit,)
        ``std_error`` is NaN for a unit without an interval.
    """

    std_error: Floats
    df: Floats


class OverClients(NamedTuple):
    """Agreement of units and of the layer, with clients as the sample.

    Attributes
    ----------
    units, layer : Coefficients
        Arrays (unit, type) and (type,). ``statistic`` and p values come from ``test`` and are equal for all types;
        there are no degrees of freedom. Intervals are NaN for two clients. With 3 to 5 clients they are NaN for a unit
        that does not vary in all clients; with more, for a unit that varies in fewer than 5.
    test : AgreementTest
    influence : Influence
    errors : Errors or None
        Standard errors of the units' intervals; None for two clients.
    """

    units: Coefficients
    layer: Coefficients
    test: AgreementTest
    influence: Influence
    errors: Errors | None = None


class Contributions(NamedTuple):
    """Contribution of each client: arrays (client, unit) in units of :attr:`TwoWay.exponent`.

    The notation is that of :func:`mean_squares_without`; w̄_c is the mean of the client's weights.
    """

    residuals: Floats  # Σ_i r_ci²
    along: Floats  # Σ_i r_ci p_i
    mean: Floats  # d_c
    squares: Floats  # Σ_i (w_ci − w̄_c)²
    varies: Bools
    products: Floats | None = None  # Σ_i r_ci v_gi for vectors v_g, such as means of groups: (client, unit, vector)


def over_clients(
    blocks: Callable[[], Iterable[Array]],
    total: Sums,
    test: Test,
    baseline: Array | None = None,
    *,
    level: float = 0.95,
) -> OverClients:
    """Test agreement, and compute intervals by leaving out one client at a time.

    Parameters
    ----------
    blocks : callable () -> iterable of array (client, unit, weight)
        Returns the weights of all clients, in blocks of clients.
    total : Sums
        Sums of these weights, minus ``baseline``.
    test : callable (Rows) -> AgreementTest
        Such as :func:`fedstat.stats.icc_tests.sign_flips`. With more than 128 clients, rows are means over groups of
        clients.
    baseline : array (unit, weight), optional
        Baseline that is subtracted from every client's weights.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    OverClients

    Notes
    -----
    Intervals are jackknife intervals on the scale of −log(1 − ICC), with the degrees of freedom of
    :func:`fedstat.stats.resampling.jackknife`. They refer to the population from which the clients were drawn.
    """
    t, contributions, rows = client_rows(blocks, total, baseline)
    result, k = test(rows(None)), int(t.n)
    units, layer = (MeanSquares(*map(numpy_of, ms)) for ms in (mean_squares(total), layer_mean_squares(total)))
    ms_loo = _leave_out_clients(t, contributions) if k > 2 else (None, None)
    n_varies = contributions.varies.sum(axis=0)
    sparse = (n_varies < min(k, LEAST_VARYING)) & (n_varies > 0)
    of_units = jackknife_coefficients(units, ms_loo[0], result.statistic, result.p_value, level, sparse)
    of_layer = jackknife_coefficients(layer, ms_loo[1], result.layer_statistic, result.layer_p_value, level)
    scale = 2.0 ** (t.exponent - t.exponent.max())
    influence = _influence(contributions.residuals @ scale**2, ms_loo[1])
    return OverClients(of_units, of_layer, result, influence, None if ms_loo[0] is None else _errors(ms_loo[0], sparse))


def client_rows(
    blocks: Callable[[], Iterable[Array]], total: Sums, baseline: Array | None = None, vectors: Array | None = None
) -> tuple[TwoWay, Contributions, Callable[[Bools | None], Rows]]:
    """Read the weights once; return sums on the host, contributions of clients, and their rows for tests.

    Parameters
    ----------
    blocks, total, start
        As in :func:`over_clients`.
    vectors : array (unit, weight, vector), optional
        Vectors of :attr:`Contributions.products`, in units of the sums' exponent.

    Returns
    -------
    TwoWay, Contributions
    callable (array (row, client) or None) -> Rows
        Makes rows that are means over groups of clients, of which the array has the members; without it, rows of
        clients, or of up to 128 groups of consecutive clients.
    """
    t = TwoWay(*map(numpy_of, total.units))
    (d, n), k = t.profile.shape, int(t.n)
    in_memory, by_block, all_rows = k * d * n <= _MEMORY, [], []
    for w in blocks():
        of_block, rows = _of_clients(w, baseline, total.units, vectors=vectors)
        by_block.append(of_block)
        all_rows += [rows] * in_memory
    joined = [np.concatenate(field) for field in zip(*by_block, strict=True)]
    contributions = Contributions(*joined)

    def read(units: slice) -> Array:
        return _join_rows([_of_clients(w, baseline, total.units, units)[1] for w in blocks()])

    read_rows = _join_rows(all_rows).__getitem__ if in_memory else read
    size = np.sqrt(contributions.squares) * 2.0 ** (t.exponent - t.exponent.max())
    return t, contributions, partial(_rows, read_rows, size, contributions.varies, n, in_memory=in_memory)


def _influence(squares: Floats, ms_loo: MeanSquares | None) -> Influence:
    """Return the influence of clients from their squares (client,) and the layer's mean squares without each client."""
    k = len(squares)
    share = squares / squares.sum() if squares.any() else np.full(k, 1 / k)
    return Influence(share, np.full(k, np.nan) if ms_loo is None else _point_estimates(ms_loo)[:, TYPES.index("ICC2")])


def _of_clients(
    w: Array, baseline: Array | None, t: TwoWay, units: slice = slice(None), vectors: Array | None = None
) -> tuple[Sequence[Any], Array]:
    """Return contributions of a block of clients, and their rows: float32 (unit, client, weight) of norm 1, or 0."""
    xp, k, (d, n) = array_namespace(w), len(w), t.profile[units].shape
    fields, rows = [], []
    for span in slices(d, max(1, at_once(w) // (n * k))):
        index = slice((units.start or 0) + span.start, (units.start or 0) + span.stop)
        e, x = block(w, baseline, units=index)
        x *= (2.0 ** (e - t.exponent[index]))[:, None]
        mean = xp.mean(x, axis=-1)
        x -= mean[..., None]
        squares = xp.vecdot(x, x)
        varies = squares > _CONSTANT * n * mean**2
        scale = xp.astype(varies, xp.float64) / xp.where(varies, squares, xp.ones_like(squares)) ** 0.5
        rows.append(xp.astype(xp.permute_dims(x * scale[..., None], (1, 0, 2)), xp.float32))
        x -= t.profile[index]
        along = xp.vecdot(x, xp.broadcast_to(t.profile[index], x.shape))
        products = (
            () if vectors is None else (xp.permute_dims(xp.permute_dims(x, (1, 0, 2)) @ vectors[index], (1, 0, 2)),)
        )
        of_span = (xp.vecdot(x, x), along, mean - t.mean[index], squares, varies, *products)
        fields.append([numpy_of(a) for a in of_span])
    return [np.concatenate(field, axis=1) for field in zip(*fields, strict=True)], xp.concat(rows)


def _join_rows(rows: list[Array]) -> Array:
    """Join rows of blocks of clients."""
    return rows[0] if len(rows) == 1 else array_namespace(rows[0]).concat(rows, axis=1)


def _rows(
    read: Callable[[slice], Array],
    size: Floats,
    varies: Bools,
    n: int,
    members: Bools | None,
    *,
    in_memory: bool,
) -> Rows:
    """Scale rows of norm 1 to sizes (client, unit) so that squares sum to 1 for each client; average groups."""
    norm = np.sqrt(np.vecdot(size, size))
    scale = (size / np.where(norm > 0, norm, 1)[:, None]).T.astype(np.float32)
    k = len(size)
    if members is None:
        n_groups = min(k, MOST_CLIENTS)
        members = np.arange(k) * n_groups // k == np.arange(n_groups)[:, None]
    member, n_groups = members.astype(np.float32), len(members)
    n_varies = member @ varies

    def scaled(units: slice) -> Array:
        x = read(units)
        xp, device = array_namespace(x), device_of(x)
        x = x * xp.asarray(scale[units], device=device)[..., None]
        if n_groups == k:
            return x
        x = xp.asarray(member, device=device) @ x
        return x / xp.asarray(np.maximum(n_varies[:, units].T, 1), device=device)[..., None]

    if not in_memory:
        return Rows(scaled, n_varies > 0, max(1, _READ // (k * n)))
    all_rows = functools.cache(lambda: scaled(slice(None)))
    return Rows(lambda units: all_rows()[units], n_varies > 0, max(1, _CACHED // (max(n, n_groups) * n_groups)))


def _leave_out_clients(t: TwoWay, contributions: Contributions) -> tuple[MeanSquares, MeanSquares]:
    """Return mean squares of units and of the layer without each client: arrays (client, unit) and (client,).

    The layer's targets are the weights of all units u. The layer's profile is p_ui + m_u − m. A client's deviation d_c
    is the mean of its d_cu over units, and its residual r_cui + d_cu − d_c. A sum over the layer is therefore the sum
    over units, plus n times the sum over the units' means.
    """
    k, (d, n) = int(t.n), t.profile.shape
    squares = np.vecdot(t.profile, t.profile)
    units = mean_squares_without(
        contributions.residuals, contributions.along, contributions.mean, squares, t.residual, t.clients, t.mean,
        t.exponent, k, n,
    )  # fmt: skip
    top = t.exponent.max()
    scale = moments.power(t.exponent - top)
    deviations, unit_means = scale * contributions.mean, scale * t.mean
    means = deviations.mean(axis=1)
    deviations, unit_means = deviations - means[:, None], unit_means - unit_means.mean()
    residuals = contributions.residuals @ scale**2 + n * np.vecdot(deviations, deviations)
    along = contributions.along @ scale**2 + n * deviations @ unit_means
    squares = squares @ scale**2 + n * unit_means @ unit_means
    offset = np.asarray((scale * t.mean).mean())
    return units, mean_squares_without(
        residuals, along, means, squares, residuals.sum(), (means**2).sum(), offset, top, k, n * d
    )


def mean_squares_without(
    residuals: Floats, along: Floats, mean: Floats, squares: Any, residual: Any, clients: Any, offset: Any,
    exponent: Any, k: int, n: int,
) -> MeanSquares:  # fmt: skip
    """Return mean squares of a layout clients x weights without each client, from sums and contributions.

    Weight i of client c is w_ci = m + d_c + p_i + r_ci: grand mean, deviation of the client's mean, profile, residual.
    Σ_c d_c = Σ_i p_i = 0, Σ_c r_ci = 0 for each i, and Σ_i r_ci = 0 for each c. Without client c, the k − 1 other
    clients have the profile p − r_c/(k − 1); client j has the deviation d_j + d_c/(k − 1) and the residual
    r_j + r_c/(k − 1). Their sums of squares therefore need no further pass over the weights.

    Parameters
    ----------
    residuals, along, mean : array (client, ...)
        Σ_i r_ci², Σ_i r_ci p_i and d_c.
    squares, residual, clients : array (...)
        Σ_i p_i², Σ_c Σ_i r_ci² and Σ_c d_c².
    offset : array (...)
        m.
    exponent : array (...)
        Exponent of all these sums, as in :class:`TwoWay`.
    k, n : int
        Number of clients, including the client that is left out, and of weights.
    """
    between = _weights_without(squares, along, residuals, k)
    clients = n * _deviations_without(clients, mean**2, k)
    residual = _deviations_without(residual, residuals, k)
    return mean_squares_of(between, clients, residual, offset**2, exponent, k - 1, n)


def _weights_without(squares: Any, along: Floats, residuals: Floats, k: int) -> Floats:
    """Return (k − 1) Σ_i (p_i − r_ci/(k − 1))² = (k − 1) Σ_i p_i² − 2 Σ_i r_ci p_i + Σ_i r_ci²/(k − 1)."""
    return (k - 1) * squares - 2 * along + residuals / (k - 1)


def _deviations_without(total: Any, deviations: Floats, k: int) -> Floats:
    """Return Σ_{j≠c} (x_j + x_c/(k − 1))² = Σ_j x_j² − k/(k − 1) x_c², for deviations x_j that sum to 0."""
    factor = k / (k - 1)
    return np.maximum(total - factor * deviations, 0)


def jackknife_coefficients(
    ms: MeanSquares, ms_loo: MeanSquares | None, statistic: Any, p_value: Any, level: float, sparse: Any = False
) -> Coefficients:
    """Return coefficients with jackknife intervals; ``ms_loo`` has mean squares (client, ...) without each client.

    The interval is NaN where ``sparse``, as too few clients vary.
    """
    icc, k = _point_estimates(ms), ms.n_clients
    low = high = np.full((*icc.shape[:-1], 3), np.nan)
    if ms_loo is not None:
        single = icc[..., :3]
        with np.errstate(divide="ignore", invalid="ignore"):
            estimate, estimates_without = -np.log1p(-single), -np.log1p(-_point_estimates(ms_loo)[..., :3])
            std_error, df = jackknife(estimates_without, k - 1)
            half = scipy.special.stdtrit(df, 0.5 + level / 2) * std_error
            low, high = -np.expm1(half - estimate), -np.expm1(-half - estimate)
        is_equal = (single == 1) & (estimates_without == np.inf).all(axis=0)  # without any client
        is_undefined = np.isnan(half) & ~np.isnan(single) & ~is_equal  # the other clients are equal without one client
        low = np.where(is_equal, 1.0, np.where(is_undefined, -np.inf, low))
        high = np.where(is_equal | is_undefined, 1.0, high)
        low = np.minimum(np.maximum(low, -1 / (k - 1)), single)
        low, high = (np.where(np.asarray(sparse)[..., None], np.nan, bound) for bound in (low, high))
    limits = [np.concatenate([bound, spearman_brown(bound, k)], axis=-1) for bound in (low, high)]
    repeated = [np.repeat(np.asarray(x)[..., None], len(TYPES), axis=-1) for x in (statistic, p_value)]
    return Coefficients(icc, repeated[0], None, None, repeated[1], *limits)


def _errors(ms_loo: MeanSquares, sparse: NDArray[np.bool_]) -> Errors:
    """Return the standard errors behind the intervals of ICC2, from mean squares (client, unit) without each client."""
    with np.errstate(divide="ignore", invalid="ignore"):
        std_error, df = jackknife(-np.log1p(-_point_estimates(ms_loo)[..., TYPES.index("ICC2")]), ms_loo.n_clients)
    return Errors(np.where(sparse, np.nan, std_error), df)


def _point_estimates(ms: MeanSquares) -> Floats:
    b, j, e = (np.asarray(x, dtype=np.float64) for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        b, j, e = (x / (b + j + e) for x in (b, j, e))  # avoids overflow of products
        return point_estimates(b, j, e, ms.n_weights, ms.n_clients)


def bootstrap(
    w: Array, baseline: Array | None = None, *, replicates: int = 200, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute coefficients of bootstrap samples of clients (Efron and Tibshirani 1993).

    The mean squares are means over pairs of clients. Pairs of a client that is drawn twice are left out, because a
    client always agrees with itself. Otherwise every coefficient would be about (1 - ICC) / clients too high.

    Parameters
    ----------
    w : array (client, unit, weight)
        At least 3 clients.
    baseline : array (unit, weight), optional
        Baseline that is subtracted from every client's weights.
    replicates : int
        Number of bootstrap samples.
    seed : int

    Returns
    -------
    units : array (replicate, unit, type)
        NaN if nothing varies.
    layer : array (replicate, type)
        Both are NaN for a bootstrap sample of a single client.

    Raises
    ------
    ValueError
        If there are fewer than 3 clients: a bootstrap sample of two is the sample itself or has no pair.
    """
    xp = array_namespace(w)
    k, d, n = w.shape
    if k < 3:
        raise ValueError(f"resampling clients needs at least 3 of them, but got {k}. Use more clients or no bootstrap.")
    rng = generator(seed, "icc bootstrap")
    n_drawn = rng.multinomial(k, np.full(k, 1 / k), size=check.integer("replicates", replicates)).astype(float)
    counts = xp.asarray(n_drawn, device=device_of(w))
    estimates, means, total = [], [], None
    for units in slices(d, max(1, at_once(w) // (k * max(n, k, len(n_drawn))))):
        pairs, client_means = _pairs(*block(w, baseline, slice(None), units))
        means.append(client_means)
        estimates.append(_resample(pairs, counts, n))
        total = _pool_units(pairs) if total is None else _pool_units(_join_pairs(total, _pool_units(pairs)))
    between, _ = _pairs(*block(xp.concat(means, axis=1)[:, None, :]))
    weighted = between._replace(cross=n * between.cross, distance=n * between.distance)
    layer = _pool_units(_join_pairs(cast(_Pairs, total), weighted))
    by = 4.0 ** (between.exponent - layer.exponent)
    layer = layer._replace(offset=by * between.offset, gap=by[:, None, None] * between.gap)
    return np.concatenate(estimates, axis=1), _resample(layer, counts, n * d)[:, 0]


class _Pairs(NamedTuple):
    """Products and distances of pairs of clients: (unit,), and (unit, client, client) with zero diagonals."""

    exponent: Array
    offset: Array  # square of the mean
    cross: Array  # products of weights, minus the client's mean
    distance: Array  # squared distances of these weights
    gap: Array  # squared differences of the means


def _pairs(e: Array, x: Array) -> tuple[_Pairs, Array]:
    """Return pairs of clients of a block, and clients' means (client, unit) without the exponent; overwrite ``x``."""
    xp = array_namespace(x)
    k, _, n = x.shape
    client_means = xp.sum(x, axis=-1) / n
    x -= client_means[..., None]
    profile = xp.sum(x, axis=0) / k
    x -= profile
    products = xp.matmul(xp.permute_dims(x, (1, 0, 2)), xp.permute_dims(x, (1, 2, 0)))
    squares = xp.linalg.diagonal(products)
    along = xp.permute_dims(xp.vecdot(x, profile[None]), (1, 0))
    off = 1 - xp.eye(k, dtype=xp.float64, device=device_of(x))
    cross = (xp.vecdot(profile, profile)[:, None, None] + along[:, :, None] + along[:, None, :] + products) * off
    apart = (squares[:, :, None] + squares[:, None, :] - 2 * products) * off
    means = xp.permute_dims(client_means, (1, 0))
    gap = (means[:, :, None] - means[:, None, :]) ** 2
    return _Pairs(e, xp.mean(means, axis=-1) ** 2, cross, apart, gap), client_means * 2.0**e


def _join_pairs(a: _Pairs, b: _Pairs) -> _Pairs:
    return _Pairs(*map(array_namespace(a.cross).concat, zip(a, b, strict=True)))


def _pool_units(p: _Pairs) -> _Pairs:
    """Pool all units, except their means."""
    xp = array_namespace(p.cross)
    top = xp.max(p.exponent)
    scale = (4.0 ** (p.exponent - top))[:, None, None]
    cross, apart = xp.sum(scale * p.cross, axis=0)[None], xp.sum(scale * p.distance, axis=0)[None]
    return _Pairs(top[None], xp.zeros_like(top)[None], cross, apart, xp.zeros_like(cross))


def _resample(p: _Pairs, counts: Array, n: int) -> NDArray[np.float64]:
    """Return coefficients (replicate, unit, type) of samples that contain client c ``counts[b, c]`` times."""
    xp = array_namespace(p.cross)
    k = counts.shape[-1]
    pairs = k**2 - xp.sum(counts**2, axis=-1)
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(pairs))
    pairs = xp.where(pairs > 0, pairs, nan)

    def mean(x: Array) -> Array:
        return xp.vecdot(xp.matmul(counts, x), counts[None]) / pairs  # (unit, replicate)

    e, j = mean(p.distance) / (2 * (n - 1)), n * mean(p.gap) / 2
    b = k * mean(p.cross) / (n - 1) + e
    squares = ((n - 1) * b, (k - 1) * j, (n - 1) * (k - 1) * e)
    ms = mean_squares_of(*squares, p.offset[:, None], p.exponent, k, n)
    b, j, e = (numpy_of(x).T for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        return point_estimates(b, j, e, n, k)


def describe_samples(replicates: Floats, level: float) -> dict[str, Floats]:
    """Return standard deviation and percentiles over the bootstrap samples with at least two different clients."""
    samples = replicates[~np.isnan(replicates).all(axis=tuple(range(1, replicates.ndim)))]
    is_undefined = np.isnan(samples).any(axis=0)
    filled = np.where(is_undefined, 0, samples)
    tails = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(filled, tails, axis=0, method="inverted_cdf")  # coefficients may be minus infinity
    with np.errstate(invalid="ignore"):
        spread = filled.std(axis=0, ddof=1)
    columns = {"std_error": spread, "boot_low": low, "boot_high": high}
    return {name: np.where(is_undefined, np.nan, value) for name, value in columns.items()}
