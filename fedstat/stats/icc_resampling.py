"""Intraclass correlations with clients as the sample: the jackknife and the bootstrap over clients.

F tests and intervals (:func:`fedstat.stats.icc.coefficients`) assume independent weights; weights of networks are not.
Here clients are independent, and weights are as they are. Weights may be NumPy arrays or torch tensors; the
coefficients are NumPy arrays, on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import numpy as np
import scipy
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats import moments
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
    six,
    slices,
    stepped_up,
)
from fedstat.stats.icc_tests import AgreementTest, Rows, Test
from fedstat.stats.resampling import LEAST_CLIENTS, jackknife

Array = Any
Floats = NDArray[np.float64]

# A client's weights are constant where their squares about the mean are below this proportion of the mean's.
_CONSTANT = 1e-26
# More clients than these are averaged in so many groups before they are tested: products of pairs stay few.
_MOST_CLIENTS = 128
# Numbers in rows that are held in memory; beyond, so many are read at once, again for every pass; numbers in the cache.
_HELD, _READ, _CACHED = 1 << 28, 1 << 26, 1 << 18


class Influence(NamedTuple):
    """What single clients contribute.

    Attributes
    ----------
    share : array (client,)
        Proportion of the squared deviations from the mean over clients, in the whole layer.
    layer_icc : array (client,)
        ICC2 of the layer without the client; NaN with 2 clients.
    """

    share: Floats
    layer_icc: Floats

    @property
    def n_effective(self) -> float:
        """Effective number of clients, 1 / Σ share² (Kish 1965, Survey sampling, section 11.2)."""
        return float(1 / np.square(self.share).sum())


class OverClients(NamedTuple):
    """Agreement of units and of the layer, with clients as the sample.

    Attributes
    ----------
    units, layer : Coefficients
        Arrays (unit, type) and (type,). ``statistic`` and P values are those of ``test`` for all types; there are no
        degrees of freedom. Intervals are NaN for two clients, and for a unit that varies in fewer than 5 of more
        clients, or not in all of 3 to 5.
    test : AgreementTest
    influence : Influence
    """

    units: Coefficients
    layer: Coefficients
    test: AgreementTest
    influence: Influence


class _Part(NamedTuple):
    """Contribution of each client, arrays (client, unit) in units of :attr:`TwoWay.exponent`.

    In the notation of :func:`_without`, with w̄_c for the mean of the client's weights.
    """

    own: Floats  # Σ_i r_ci²
    along: Floats  # Σ_i r_ci p_i
    mean: Floats  # d_c
    squares: Floats  # Σ_i (w_ci − w̄_c)²
    varies: NDArray[np.bool_]


def over_clients(
    blocks: Callable[[], Iterable[Array]],
    total: Sums,
    test: Test,
    start: Array | None = None,
    *,
    level: float = 0.95,
) -> OverClients:
    """Test agreement, and find intervals by leaving out one client at a time.

    Parameters
    ----------
    blocks : callable () -> iterable of array (client, unit, weight)
        The weights of all clients, some clients at a time.
    total : Sums
        Of the same weights, less the start.
    test : callable (Rows) -> AgreementTest
        As :func:`fedstat.stats.icc_tests.sign_flips`. Beyond 128 clients its rows are means over groups of clients.
    start : array (unit, weight), optional
        Subtracted from every client's weights.
    level : float in (0, 1)
        Confidence level of the intervals.

    Returns
    -------
    OverClients

    Notes
    -----
    Intervals are those of the jackknife on the scale of −log(1 − ICC), with the degrees of freedom of
    :func:`fedstat.stats.resampling.jackknife`. They refer to other clients that are drawn as these were.
    """
    t = TwoWay(*map(_on_host, total.units))
    (d, n), k = t.profile.shape, int(t.n)
    held, parts, kept = k * d * n <= _HELD, [], []
    for w in blocks():
        part, rows = _of_clients(w, start, total.units)
        parts.append(part)
        kept += [rows] * held
    part = _Part(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    by = moments.power(t.exponent - t.exponent.max())
    size = np.sqrt(part.squares) * by

    def read(units: slice) -> Array:
        return _joined([_of_clients(w, start, total.units, units)[1] for w in blocks()])

    found = test(_rows(_joined(kept).__getitem__ if held else read, size, part.varies, n, held=held))
    units, layer = (MeanSquares(*map(_on_host, ms)) for ms in (mean_squares(total), layer_mean_squares(total)))
    left = _left_out(t, part) if k > 2 else (None, None)
    n_varies = part.varies.sum(axis=0)
    few = (n_varies < min(k, LEAST_CLIENTS)) & (n_varies > 0)
    of_units = _coefficients(units, left[0], found.statistic, found.p_value, level, few)
    of_layer = _coefficients(layer, left[1], found.layer_statistic, found.layer_p_value, level)
    return OverClients(of_units, of_layer, found, _influence(part.own @ by**2, left[1]))


def _influence(own: Floats, left: MeanSquares | None) -> Influence:
    """Influence of clients whose weights have these squares (client,), with the layer's mean squares without each."""
    k = len(own)
    share = own / own.sum() if own.any() else np.full(k, 1 / k)
    return Influence(share, np.full(k, np.nan) if left is None else _six(left)[:, TYPES.index("ICC2")])


def _of_clients(w: Array, start: Array | None, t: TwoWay, units: slice = slice(None)) -> tuple[_Part, Array]:
    """Contributions of some clients, and their rows, float32 (unit, client, weight) of norm 1, or 0."""
    xp, k, (d, n) = array_namespace(w), len(w), t.profile[units].shape
    found, rows = [], []
    for part in slices(d, max(1, at_once(w) // (n * k))):
        here = slice((units.start or 0) + part.start, (units.start or 0) + part.stop)
        e, x = block(w, start, units=here)
        x *= moments.power(e - t.exponent[here])[:, None]
        mean = xp.mean(x, axis=-1)
        x -= mean[..., None]
        squares = xp.vecdot(x, x)
        varies = squares > _CONSTANT * n * mean**2
        by = xp.astype(varies, xp.float64) / xp.where(varies, squares, xp.ones_like(squares)) ** 0.5
        rows.append(xp.astype(xp.permute_dims(x * by[..., None], (1, 0, 2)), xp.float32))
        x -= t.profile[here]
        along = xp.vecdot(x, xp.broadcast_to(t.profile[here], x.shape))
        found.append([_on_host(a) for a in (xp.vecdot(x, x), along, mean - t.mean[here], squares, varies)])
    return _Part(*(np.concatenate(field, axis=1) for field in zip(*found, strict=True))), xp.concat(rows)


def _joined(rows: list[Array]) -> Array:
    """Rows of all clients, from those of some."""
    return rows[0] if len(rows) == 1 else array_namespace(rows[0]).concat(rows, axis=1)


def _rows(read: Callable[[slice], Array], size: Floats, varies: NDArray[np.bool_], n: int, *, held: bool) -> Rows:
    """Scale rows of norm 1 to sizes (client, unit) whose squares add up to 1 in every client; average many clients."""
    norm = np.sqrt(np.vecdot(size, size))
    by = (size / np.where(norm > 0, norm, 1)[:, None]).T.astype(np.float32)
    k = len(size)
    n_groups = min(k, _MOST_CLIENTS)
    member = (np.arange(k) * n_groups // k == np.arange(n_groups)[:, None]).astype(np.float32)
    n_varies = member @ varies

    def scaled(units: slice) -> Array:
        x = read(units)
        xp, device = array_namespace(x), device_of(x)
        x = x * xp.asarray(by[units], device=device)[..., None]
        if n_groups == k:
            return x
        x = xp.asarray(member, device=device) @ x
        return x / xp.asarray(np.maximum(n_varies[:, units].T, 1), device=device)[..., None]

    if not held:
        return Rows(scaled, n_varies > 0, max(1, _READ // (k * n)))
    whole = functools.cache(lambda: scaled(slice(None)))
    return Rows(lambda units: whole()[units], n_varies > 0, max(1, _CACHED // (max(n, n_groups) * n_groups)))


def _left_out(t: TwoWay, part: _Part) -> tuple[MeanSquares, MeanSquares]:
    """Mean squares of units and of the layer without each client: arrays (client, unit) and (client,).

    The layer's targets are the weights of all units u: its profile is p_ui + m_u − m, a client's deviation d_c the mean
    of its d_cu over units, and the rest r_cui + d_cu − d_c, so that sums over the layer are those over units, and n
    times those over the units' means.
    """
    k, (d, n) = int(t.n), t.profile.shape
    squares = np.vecdot(t.profile, t.profile)
    units = _without(part.own, part.along, part.mean, squares, t.residual, t.clients, t.mean, t.exponent, k, n)
    top = t.exponent.max()
    by = moments.power(t.exponent - top)
    apart, of_units = by * part.mean, by * t.mean
    means = apart.mean(axis=1)
    apart, of_units = apart - means[:, None], of_units - of_units.mean()
    own = part.own @ by**2 + n * np.vecdot(apart, apart)
    along = part.along @ by**2 + n * apart @ of_units
    squares = squares @ by**2 + n * of_units @ of_units
    offset = np.asarray((by * t.mean).mean())
    return units, _without(own, along, means, squares, own.sum(), (means**2).sum(), offset, top, k, n * d)


def _without(
    own: Floats, along: Floats, mean: Floats, squares: Any, residual: Any, clients: Any, offset: Any, exponent: Any,
    k: int, n: int,
) -> MeanSquares:  # fmt: skip
    """Mean squares of a layout clients x weights without each client, from its sums and the client's contribution.

    Weight i of client c is w_ci = m + d_c + p_i + r_ci: mean of all, deviation of the client's mean, profile, rest,
    with Σ_c d_c = Σ_i p_i = 0, Σ_c r_ci = 0 for each i and Σ_i r_ci = 0 for each c. Without client c the k − 1 others
    have the profile p − r_c/(k − 1), and each of them the deviation d_j + d_c/(k − 1) and the rest r_j + r_c/(k − 1).
    Their sums of squares therefore need no other pass over the weights.

    Parameters
    ----------
    own, along, mean : array (client, ...)
        Σ_i r_ci², Σ_i r_ci p_i and d_c.
    squares, residual, clients : array (...)
        Σ_i p_i², Σ_c Σ_i r_ci² and Σ_c d_c².
    offset : array (...)
        m.
    exponent : array (...)
        Of the unit in which all are given, as in :class:`TwoWay`.
    k, n : int
        Clients, the one that is left out included, and weights.
    """
    between = _weights_without(squares, along, own, k)
    clients = n * _deviations_without(clients, mean**2, k)
    residual = _deviations_without(residual, own, k)
    return mean_squares_of(between, clients, residual, offset**2, exponent, k - 1, n)


def _weights_without(squares: Any, along: Floats, own: Floats, k: int) -> Floats:
    """(k − 1) Σ_i (p_i − r_ci/(k − 1))² = (k − 1) Σ_i p_i² − 2 Σ_i r_ci p_i + Σ_i r_ci²/(k − 1)."""
    return (k - 1) * squares - 2 * along + own / (k - 1)


def _deviations_without(total: Any, own: Floats, k: int) -> Floats:
    """Σ_{j≠c} (x_j + x_c/(k − 1))² = Σ_j x_j² − k/(k − 1) x_c², for deviations x_j that add up to 0."""
    more = k / (k - 1)
    return np.maximum(total - more * own, 0)


def _coefficients(
    whole: MeanSquares, left: MeanSquares | None, statistic: Any, p_value: Any, level: float, few: Any = False
) -> Coefficients:
    """Coefficients with intervals by the jackknife; ``left`` has one more dim, of the client left out, in front.

    Where ``few`` clients vary there is no interval.
    """
    icc, k = _six(whole), whole.n_clients
    low = high = np.full((*icc.shape[:-1], 3), np.nan)
    if left is not None:
        single = icc[..., :3]
        with np.errstate(divide="ignore", invalid="ignore"):
            at, others = -np.log1p(-single), -np.log1p(-_six(left)[..., :3])
            std_error, df = jackknife(others, k - 1)
            half = scipy.special.stdtrit(df, 0.5 + level / 2) * std_error
            low, high = -np.expm1(half - at), -np.expm1(-half - at)
        equal = (single == 1) & (others == np.inf).all(axis=0)  # whoever is left out
        unclear = np.isnan(half) & ~np.isnan(single) & ~equal  # without one client the others are equal
        low = np.where(equal, 1.0, np.where(unclear, -np.inf, low))
        high = np.where(equal | unclear, 1.0, high)
        low = np.minimum(np.maximum(low, -1 / (k - 1)), single)
        low, high = (np.where(np.asarray(few)[..., None], np.nan, bound) for bound in (low, high))
    limits = [np.concatenate([bound, stepped_up(bound, k)], axis=-1) for bound in (low, high)]
    of_types = [np.repeat(np.asarray(x)[..., None], len(TYPES), axis=-1) for x in (statistic, p_value)]
    return Coefficients(icc, of_types[0], None, None, of_types[1], *limits)


def _six(ms: MeanSquares) -> Floats:
    b, j, e = (np.asarray(x, dtype=np.float64) for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        b, j, e = (x / (b + j + e) for x in (b, j, e))  # products of them are to come
        return six(b, j, e, ms.n_weights, ms.n_clients)


def _on_host(a: Array) -> Any:
    return np.asarray(a.cpu() if is_torch_array(a) else a)


def bootstrap(
    w: Array, start: Array | None = None, *, replicates: int = 200, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients of clients drawn with replacement (Efron and Tibshirani 1993, An introduction to the bootstrap).

    The mean squares are means over pairs of clients. A client drawn twice agrees with itself, which says nothing about
    how clients agree: these pairs are left out, or every coefficient would be about (1 - ICC) / clients too high.

    Parameters
    ----------
    w : array (client, unit, weight)
        At least 3 clients.
    start : array (unit, weight), optional
        Subtracted from every client's weights.
    replicates : int
    seed : int

    Returns
    -------
    units : array (replicate, unit, type)
        NaN where nothing varies.
    layer : array (replicate, type)
        Both are NaN in a replicate that drew one client alone.

    Raises
    ------
    ValueError
        If there are fewer than 3 clients: with two, a replicate is the sample itself or has no pair.
    """
    xp = array_namespace(w)
    k, d, n = w.shape
    if k < 3:
        raise ValueError(f"resampling clients needs at least 3 of them, but got {k}. Use replicates=0.")
    rng = generator(seed, "icc bootstrap")
    drawn = rng.multinomial(k, np.full(k, 1 / k), size=check.integer("replicates", replicates)).astype(float)
    counts = xp.asarray(drawn, device=device_of(w))
    units, means, total = [], [], None
    for part in slices(d, max(1, at_once(w) // (k * max(n, k, len(drawn))))):
        pairs, each = _pairs(*block(w, start, slice(None), part))
        means.append(each)
        units.append(_resampled(pairs, counts, n))
        total = _as_one(pairs) if total is None else _as_one(_joined_pairs(total, _as_one(pairs)))
    between, _ = _pairs(*block(xp.concat(means, axis=1)[:, None, :]))
    weighed = between._replace(cross=n * between.cross, apart=n * between.apart)
    layer = _as_one(_joined_pairs(cast(_Pairs, total), weighed))
    by = moments.power(2 * (between.exponent - layer.exponent))
    layer = layer._replace(offset=by * between.offset, gap=by[:, None, None] * between.gap)
    return np.concatenate(units, axis=1), _resampled(layer, counts, n * d)[:, 0]


class _Pairs(NamedTuple):
    """What pairs of clients have in common and apart: (unit,), and (unit, client, client) with zero diagonals."""

    exponent: Array
    offset: Array  # square of the mean
    cross: Array  # products of the weights, each client's less their mean
    apart: Array  # squared distances of the same
    gap: Array  # squared differences of the means


def _pairs(e: Array, x: Array) -> tuple[_Pairs, Array]:
    """Pairs of clients of a block, which is used up, and the clients' means (client, unit), not divided."""
    xp = array_namespace(x)
    k, _, n = x.shape
    each = xp.sum(x, axis=-1) / n
    x -= each[..., None]
    profile = xp.sum(x, axis=0) / k
    x -= profile
    both = xp.matmul(xp.permute_dims(x, (1, 0, 2)), xp.permute_dims(x, (1, 2, 0)))
    own = xp.linalg.diagonal(both)
    along = xp.permute_dims(xp.vecdot(x, profile[None]), (1, 0))
    off = 1 - xp.eye(k, dtype=xp.float64, device=device_of(x))
    cross = (xp.vecdot(profile, profile)[:, None, None] + along[:, :, None] + along[:, None, :] + both) * off
    apart = (own[:, :, None] + own[:, None, :] - 2 * both) * off
    means = xp.permute_dims(each, (1, 0))
    gap = (means[:, :, None] - means[:, None, :]) ** 2
    return _Pairs(e, xp.mean(means, axis=-1) ** 2, cross, apart, gap), each * moments.power(e)


def _joined_pairs(a: _Pairs, b: _Pairs) -> _Pairs:
    return _Pairs(*map(array_namespace(a.cross).concat, zip(a, b, strict=True)))


def _as_one(p: _Pairs) -> _Pairs:
    """All units as one, except their means."""
    xp = array_namespace(p.cross)
    top = xp.max(p.exponent)
    by = moments.power(2 * (p.exponent - top))[:, None, None]
    cross, apart = xp.sum(by * p.cross, axis=0)[None], xp.sum(by * p.apart, axis=0)[None]
    return _Pairs(top[None], xp.zeros_like(top)[None], cross, apart, xp.zeros_like(cross))


def _resampled(p: _Pairs, counts: Array, n: int) -> NDArray[np.float64]:
    """Coefficients (replicate, unit, type) of samples that hold client c ``counts[b, c]`` times."""
    xp = array_namespace(p.cross)
    k = counts.shape[-1]
    pairs = k**2 - xp.sum(counts**2, axis=-1)
    none = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(pairs))
    pairs = xp.where(pairs > 0, pairs, none)

    def mean(x: Array) -> Array:
        return xp.vecdot(xp.matmul(counts, x), counts[None]) / pairs  # (unit, replicate)

    e, j = mean(p.apart) / (2 * (n - 1)), n * mean(p.gap) / 2
    b = k * mean(p.cross) / (n - 1) + e
    squares = ((n - 1) * b, (k - 1) * j, (n - 1) * (k - 1) * e)
    ms = mean_squares_of(*squares, p.offset[:, None], p.exponent, k, n)
    b, j, e = (np.asarray(x.detach().cpu() if is_torch_array(x) else x).T for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        return six(b, j, e, n, k)
