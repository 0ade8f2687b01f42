"""Agreement with clients as the sample: tests by exchanging units within clients, intervals by leaving out a client.

F tests and intervals (:func:`fedstat.stats.icc.coefficients`) take the weights of a unit for independent. Those of
networks are not. Here clients are independent, and weights are as they are. Weights may be NumPy arrays or torch
tensors; results are NumPy arrays, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._random import generator
from fedstat.stats import scale
from fedstat.stats.icc import (
    TYPES,
    Coefficients,
    MeanSquares,
    Sums,
    TwoWay,
    at_once,
    block,
    fdr,
    layer_mean_squares,
    mean_squares,
    mean_squares_of,
    six,
    slices,
    stepped_up,
)

Array = Any
Floats = NDArray[np.float64]

# Exchanges of all units; units that are exchanged, at most; exchanged units, at least.
_EXCHANGES, _UNITS, _LEAST = 99, 50, 4000
# What units have in common is taken off where there are as many; it is the mean of at least as many in the second look.
_MANY, _SOME = 16, 4
# False discovery rate at which units are left out of the second look.
_FDR = 0.05
# Statistics that differ by less of their size are equal but for the rounding of float32, and so are rows.
_TIE = 1e-5
# A client's weights are constant where their squares about the mean are below this share of the mean's.
_CONSTANT = 1e-26
# Bytes of rows that are added up while they are in the cache; numbers in the sums of exchanged units.
_CACHED, _NUMBERS = 1 << 23, 1 << 27


class OverClients(NamedTuple):
    """Agreement of units and of the layer, with clients as the sample.

    Attributes
    ----------
    units, layer : Coefficients
        Arrays (unit, type) and (type,). ``statistic`` is the mean correlation of the weights of two clients; there are
        no degrees of freedom. P values are the same for all types, and NaN where fewer than two units vary; intervals
        are NaN for two clients.
    n_exchanges : int
        Exchanges behind the p value of the layer, and at least as many sums behind those of units.
    """

    units: Coefficients
    layer: Coefficients
    n_exchanges: int


class _Part(NamedTuple):
    """What leaving out a client takes away, arrays (client, unit) in units of :attr:`TwoWay.exponent`."""

    own: Floats  # squares of its weights, less its mean and the profile
    along: Floats  # products of the same with the profile
    mean: Floats  # its mean, less the mean of all
    varies: NDArray[np.bool_]


def over_clients(
    blocks: Callable[[], Iterable[Array]],
    total: Sums,
    start: Array | None = None,
    *,
    level: float = 0.95,
    seed: int = 0,
) -> OverClients:
    """Test agreement by exchanging units within clients, and find intervals by leaving out one client at a time.

    Parameters
    ----------
    blocks : callable () -> iterable of array (client, unit, weight)
        The weights of all clients, some clients at a time. Called up to three times.
    total : Sums
        Of the same weights, less the start.
    start : array (unit, weight), optional
        Subtracted from every client's weights.
    level : float in (0, 1)
        Confidence level of the intervals.
    seed : int
        Seed of the exchanges.

    Returns
    -------
    OverClients

    Notes
    -----
    **Test.** The hypothesis is that every client could have named its units in any order. A client's weights of a unit,
    less their mean, are brought to norm 1. With 16 units or more, what units have in common is taken off: the client's
    mean over units; and the norm is 1 again. So T_u = ‖Σ_c x_cu‖² counts directions and not sizes, and what
    distinguishes a unit. Units are exchanged by cyclic shifts, one drawn for every client (Fisher 1935, The design of
    experiments), and p_u = (1 + exchanged T ≥ T_u) / (1 + exchanged T). Of more than 50 units 50 are drawn and
    exchanged with one another. The statistic of the layer is the sum of theirs. Where only k clients' weights of a unit
    vary, its statistic is (T − k) / √(k (k − 1)), and so are those of exchanged ones. Of d units in C clients hardly
    any can be called where d^(C − 1) is below 20: exchanges often enough leave the clients' units together.

    Units on which clients agree disturb both, the mean over units and the exchanged T. So those that are called at a
    false discovery rate of .05 are left out of them, and all units are tested again. Where fewer than 4 units would be
    left, p is the larger one of the first look and of one in which nothing is taken off.

    **Intervals.** The jackknife (Miller 1974, Biometrika 61, 1-15) on the scale of −log(1 − ICC), with t of C − 1
    degrees of freedom. They are about clients whose weights spread around the common profile as those of the clients
    here do: unlike spreads are taken as they are.

    ``simulations/inference/agreement.py`` has level, power and coverage.
    """
    units, layer = (MeanSquares(*map(_on_host, ms)) for ms in (mean_squares(total), layer_mean_squares(total)))
    k, live = units.n_clients, np.flatnonzero((units.weights > 0) | (units.residual > 0))
    rng = generator(seed, "icc exchange")

    room = _NUMBERS // units.n_weights

    def look(*, common: NDArray[np.int_], chosen: NDArray[np.int_]) -> tuple[_Look, _Part]:
        chosen = np.sort(rng.permutation(chosen)[: max(2, min(_UNITS, room // _EXCHANGES))])
        n = max(_EXCHANGES, math.ceil(min(_LEAST, room) / max(1, len(chosen))))
        shifts = rng.integers(max(1, len(chosen)), size=(k, n))
        return _exchange(blocks(), start, total.units, common, chosen, shifts)

    nothing = live[:0]
    first, part = look(common=live if len(live) >= _MANY else nothing, chosen=live)
    p_value = first.p_value
    called = _called(p_value)
    rest = live[~called[live] & (part.varies.sum(axis=0)[live] > 1)]
    if called.any() and len(live) >= _MANY:
        if len(rest) >= _SOME:
            p_value = look(common=rest, chosen=rest)[0].p_value
        else:
            p_value = np.maximum(p_value, look(common=nothing, chosen=live)[0].p_value)
    left = _left_out(total, part) if k > 2 else (None, None)
    tests = ((first.correlation, p_value), (_mean(first.correlation), first.layer_p_value))
    of_units, of_layer = (
        _coefficients(ms, without, *test, level) for ms, without, test in zip((units, layer), left, tests, strict=True)
    )
    return OverClients(of_units, of_layer, first.n_exchanges)


class _Look(NamedTuple):
    """One round of exchanges: mean correlation of two clients and p value of every unit, (unit,), and the layer's."""

    correlation: Floats
    p_value: Floats
    layer_p_value: float
    n_exchanges: int


def _exchange(
    blocks: Iterable[Array], start: Array | None, t: TwoWay, common: NDArray[np.int_], chosen: NDArray[np.int_],
    shifts: NDArray[np.int_],
) -> tuple[_Look, _Part]:  # fmt: skip
    """Exchange the chosen units, less the mean of the common ones."""
    parts: list[_Part] = []
    varies: list[NDArray[np.bool_]] = []
    as_they_are, named, exchanged, done = 0.0, 0.0, None, 0
    for w in blocks:
        for clients in slices(len(w), max(1, _CACHED // (8 * w.shape[2] * max(1, len(chosen))))):
            part, rows = _of_clients(w[clients], start, t)
            xp = array_namespace(rows)
            as_they_are = as_they_are + xp.sum(rows, axis=0, dtype=xp.float64)
            differs = part.varies
            if len(common):
                rows, differs = _without_common(rows, differs, common)
                named = named + xp.sum(rows, axis=0, dtype=xp.float64)
            exchanged = _added(exchanged, rows, chosen, shifts[done : done + len(rows)])
            parts.append(part)
            varies.append(differs)
            done += len(rows)
    whole = _Part(*(np.concatenate(field) for field in zip(*parts, strict=True)))
    plain = _squares(as_they_are)
    sums = (_squares(named) if len(common) else plain, _squares(exchanged))
    p_value, layer = _p_values(*sums, np.concatenate(varies), chosen, shifts)
    n = whole.varies.sum(axis=0)
    p_value[(n > 1) & np.isnan(p_value) & (len(chosen) > 1)] = 1.0  # nothing distinguishes the unit from others
    p_value[n < 2] = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(n > 1, (plain - n) / (n * (n - 1)), np.nan)
    return _Look(correlation, p_value, layer, shifts.shape[1]), whole


def _called(p_value: Floats) -> NDArray[np.bool_]:
    return np.asarray(fdr(p_value[:, None])[:, 0] <= _FDR)


def _mean(x: Floats) -> float:
    known = x[~np.isnan(x)]
    return float(known.mean()) if len(known) else math.nan


def _without_common(
    rows: Array, varies: NDArray[np.bool_], common: NDArray[np.int_]
) -> tuple[Array, NDArray[np.bool_]]:
    """Rows less each client's mean over units that are common, of norm 1 again; 0 where the row or what is left is."""
    xp, device = array_namespace(rows), device_of(rows)
    rows = rows - xp.mean(rows[:, xp.asarray(common, device=device)], axis=1)[:, None]
    norm = xp.vecdot(rows, rows) ** 0.5
    differs = (norm > _TIE) & xp.asarray(varies, device=device)
    rows *= xp.where(differs, 1 / xp.where(differs, norm, xp.ones_like(norm)), xp.zeros_like(norm))[..., None]
    return rows, _on_host(differs)


def _of_clients(w: Array, start: Array | None, t: TwoWay) -> tuple[_Part, Array]:
    """What some clients take away, and their weights as float32 rows (client, unit, weight) of norm 1, or 0."""
    xp, (k, d, n) = array_namespace(w), w.shape
    found, rows = [], []
    for units in slices(d, max(1, at_once(w) // (n * k))):
        e, x = block(w, start, units=units)
        x *= scale.power(e - t.exponent[units])[:, None]
        mean = xp.mean(x, axis=-1)
        x -= mean[..., None]
        squares = xp.vecdot(x, x)
        varies = squares > _CONSTANT * n * mean**2
        norm = xp.where(varies, squares, xp.ones_like(squares)) ** 0.5
        rows.append(xp.astype(x * (xp.astype(varies, xp.float64) / norm)[..., None], xp.float32))
        x -= t.profile[units]
        along = xp.vecdot(x, xp.broadcast_to(t.profile[units], x.shape))
        found.append([_on_host(a) for a in (xp.vecdot(x, x), along, mean - t.mean[units], varies)])
    return _Part(*(np.concatenate(field, axis=1) for field in zip(*found, strict=True))), xp.concat(rows, axis=1)


def _added(total: Array | None, rows: Array, chosen: NDArray[np.int_], shifts: NDArray[np.int_]) -> Array:
    """Sums (exchange, unit, weight) of clients' rows, each client's units shifted, added to earlier clients' sums."""
    xp = array_namespace(rows)
    some = rows[:, xp.asarray(chosen, device=device_of(rows))]
    twice = xp.concat([some, some], axis=1)
    if total is None:
        total = xp.zeros((shifts.shape[1], *some.shape[1:]), dtype=xp.float32, device=device_of(rows))
    for here, by in zip(total, shifts.T.tolist(), strict=True):
        for one, first in zip(twice, by, strict=True):
            here += one[first : first + len(chosen)]
    return total


def _p_values(
    named: Floats, exchanged: Floats, varies: NDArray[np.bool_], chosen: NDArray[np.int_], shifts: NDArray[np.int_]
) -> tuple[Floats, float]:
    """P values of units (unit,) and of the layer."""
    k = varies.sum(axis=0)
    if len(chosen) < 2 or not (k[chosen] > 1).any():
        return np.full(len(k), np.nan), math.nan
    at_random = _clients_of(varies[:, chosen], shifts)
    pairs, drawn = named - k, exchanged - at_random  # Σ over ordered pairs of clients
    tie = _TIE * named
    with np.errstate(divide="ignore", invalid="ignore"):
        by, by_drawn = np.sqrt(k * (k - 1.0)), np.sqrt(at_random * (at_random - 1.0))
        null = np.sort((drawn / by_drawn)[np.broadcast_to(by_drawn > 0, drawn.shape)])
        p_value = (1 + len(null) - np.searchsorted(null, (pairs - tie) / by)) / (1 + len(null))
    layer = (1 + (drawn.sum(axis=1) >= (pairs - tie)[chosen].sum()).sum()) / (1 + len(drawn))
    return np.where(k > 1, p_value, np.nan), float(layer)


def _clients_of(varies: NDArray[np.bool_], shifts: NDArray[np.int_]) -> Any:
    """Clients whose weights vary in the sums of exchanged units: (exchange, unit), or one number."""
    k, n_units = varies.shape
    if varies.all():
        return k
    at = (np.arange(n_units) + shifts[..., None]) % n_units  # (client, exchange, unit)
    return np.take_along_axis(varies[:, None], at, axis=2).sum(axis=0)


def _left_out(total: Sums, part: _Part) -> tuple[MeanSquares, MeanSquares]:
    """Mean squares of units and of the layer without each client: arrays (client, unit) and (client,)."""
    t = TwoWay(*map(_on_host, total.units))
    k, (d, n) = int(t.n), t.profile.shape
    squares = np.vecdot(t.profile, t.profile)
    units = _without(part.own, part.along, part.mean, squares, t.residual, t.clients, t.mean, t.exponent, k, n)
    top = t.exponent.max()
    by = scale.power(t.exponent - top)
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
    more = k / (k - 1)  # a client's deviation from the others, beside that from all
    between = (k - 1) * squares - 2 * along + own / (k - 1)
    rest = np.maximum(residual - more * own, 0)
    return mean_squares_of(between, n * np.maximum(clients - more * mean**2, 0), rest, offset**2, exponent, k - 1, n)


def _coefficients(
    whole: MeanSquares, left: MeanSquares | None, correlation: Any, p_value: Any, level: float
) -> Coefficients:
    """Coefficients with intervals by the jackknife; ``left`` has one more dim, of the client left out, in front."""
    icc, k = _six(whole), whole.n_clients
    low = high = np.full((*icc.shape[:-1], 3), np.nan)
    if left is not None:
        single = icc[..., :3]
        with np.errstate(divide="ignore", invalid="ignore"):
            at, others = -np.log1p(-single), -np.log1p(-_six(left)[..., :3])
            spread = np.sqrt((k - 1) / k * ((others - others.mean(axis=0)) ** 2).sum(axis=0))
            half = scipy.special.stdtrit(k - 1, 0.5 + level / 2) * spread
            low, high = -np.expm1(half - at), -np.expm1(-half - at)
        equal = (single == 1) & (others == np.inf).all(axis=0)  # whoever is left out
        unclear = np.isnan(half) & ~np.isnan(single) & ~equal  # without one client the others are equal
        low = np.where(equal, 1.0, np.where(unclear, -np.inf, low))
        high = np.where(equal | unclear, 1.0, high)
        low = np.minimum(np.maximum(low, -1 / (k - 1)), single)
    limits = [np.concatenate([bound, stepped_up(bound, k)], axis=-1) for bound in (low, high)]
    of_types = [np.repeat(np.asarray(x)[..., None], len(TYPES), axis=-1) for x in (correlation, p_value)]
    return Coefficients(icc, of_types[0], None, None, of_types[1], *limits)


def _six(ms: MeanSquares) -> Floats:
    b, j, e = (np.asarray(x, dtype=np.float64) for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        b, j, e = (x / (b + j + e) for x in (b, j, e))  # products of them are to come
        return six(b, j, e, ms.n_weights, ms.n_clients)


def _squares(sums: Array) -> Floats:
    xp = array_namespace(sums)
    return _on_host(xp.astype(xp.vecdot(sums, sums), xp.float64))


def _on_host(a: Array) -> Any:
    return np.asarray(a.cpu() if is_torch_array(a) else a)
