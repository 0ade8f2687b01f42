"""Tests of agreement between clients: sign flips of whole clients, and permutations of units within clients.

Rows are NumPy arrays or torch tensors; results are NumPy arrays, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils.streams import generator
from fedstat.stats.icc import fdr, slices
from fedstat.stats.resampling import LEAST_CLIENTS

Array = Any
Floats = NDArray[Any]  # float64 in results, float32 in products
Bools = NDArray[np.bool_]

MOST_ENUMERATED = 13
"""The sign patterns of so many clients are enumerated; those of more are drawn."""
# Permutations that are enumerated, sign patterns that are drawn, and drawn ones that units use at least.
_ALL, _DRAWN, _FEWEST = 4096, 9999, 99
# Pooled values of units, at least: of sign flips, or more where so many multiplications give them, and of permutations.
_POOLED, _WORK, _SHIFTED = 20_000, 1e8, 4000
_REFERENCE = 3  # units that the common profile is estimated from, at least
_FDR = 0.05  # at which units are left out of the common profile
_TIE = 1e-5  # statistics that differ by less of their size are equal but for the rounding of float32
_NUMBERS = 1 << 22  # pooled values in memory at once


class Rows(NamedTuple):
    """Centered weights of a layer's units; every client's layer has norm 1.

    Attributes
    ----------
    read : callable (slice) -> float32 array (unit, client, weight)
        Rows of some units. Those that do not vary are 0.
    varies : bool array (client, unit)
        True where a client's unit has more than one value.
    step : int
        Units that are read at once.
    """

    read: Callable[[slice], Array]
    varies: Bools
    step: int


class AgreementTest(NamedTuple):
    """Test of agreement on units and on the layer, and of the profile that all units have in common.

    Attributes
    ----------
    statistic, p_value : array (unit,)
        NaN where a unit is not tested.
    layer_statistic, layer_p_value : float
        Of the sum over units.
    n_patterns : int
        Sign patterns or permutations behind the layer's p value, besides the observed one.
    profile_proportion, profile_p_value : float
        Proportion of the squared weights that the common profile holds, and its p value; NaN for permutations.
    similarity : array (client, client)
        Cosines of the clients' layers; NaN for permutations.
    """

    statistic: Floats
    p_value: Floats
    layer_statistic: float
    layer_p_value: float
    n_patterns: int
    profile_proportion: float
    profile_p_value: float
    similarity: Floats


Test = Callable[[Rows], AgreementTest]


def sign_flips(rows: Rows, *, seed: int = 0) -> AgreementTest:
    """Test agreement by flipping the signs of whole clients.

    Parameters
    ----------
    rows : Rows
    seed : int
        Seed of the sign patterns where they are drawn: with more than 13 clients.

    Returns
    -------
    AgreementTest

    Notes
    -----
    For clients c and c', r_u = ⟨x_cu − m_c, x_c'u − m_c'⟩ is the product of a unit's rows less the profile that units
    have in common. It is estimated without bias, from pairs of different other units: so neither the unit itself nor
    another unit on which clients agree adds to it. The statistic is t_u = Σ r_u / √Σ r_u² over pairs of clients
    (studentized sign flips: Janssen 1997, Stat. Probab. Lett. 36, 9-21; Winkler et al. 2014, NeuroImage 92, 381-397).

    H0 of a unit: the clients' deviations from the profile are independent and symmetric about 0. All 2^(C − 1) sign
    patterns of C clients are taken if they are at most 4096; else 9999 are drawn. Statistics of all units under all
    patterns but the observed one are pooled, p_u = (1 + #{t ≥ t_u}) / (1 + #t), so that a few patterns give small p
    values. They are valid on average over units: units of low rank have longer tails than others. The layer's
    statistic is Σ_u t_u; its p value pools nothing and is at least 2^(1 − C).

    Units called at a false discovery rate of .05 leave the profile, and all units are tested again. Where fewer than 3
    units would remain in it, p is the larger one of the first value and that without a profile. The profile's p value
    is the larger of its p values before and after these units leave: in an output layer, whose rows sum to 0, the units
    that remain agree because the called units left. ``simulations/inference`` has level and power.
    """
    k, d = rows.varies.shape
    pair = np.triu_indices(k, 1)
    signs, exact = _patterns(k, seed)
    own = _own_products(rows, *pair)
    tested, alive, none = rows.varies.sum(axis=0) >= LEAST_CLIENTS, rows.varies.any(axis=0), np.zeros(d, dtype=bool)

    def look(reference: Bools) -> tuple[Floats, Floats, Floats]:
        products, profile = _less_profile(rows, own, reference, *pair)
        products = _standardized(products, own)
        return products, _pooled(products, tested, signs, *pair, exact=exact), profile

    reference: Any = alive if alive.sum() >= _REFERENCE else none
    products, p_value, profile = look(reference)
    layer, profile_p = products.sum(axis=0, dtype=float), _flipped(profile, signs, *pair)
    if (reference & (called := _called(p_value))).any():
        if (reference & ~called).sum() >= _REFERENCE:
            products, p_value, profile = look(reference & ~called)
            profile_p = max(profile_p, _flipped(profile, signs, *pair))
        else:
            p_value = np.maximum(p_value, look(none)[1])
    similarity = np.eye(k)
    similarity[pair] = similarity.T[pair] = np.clip(own.sum(axis=0, dtype=float), -1, 1)
    return AgreementTest(
        np.where(tested, products.sum(axis=1, dtype=float), np.nan),
        p_value,
        float(layer.sum()),
        _flipped(layer, signs, *pair),
        len(signs),
        float(profile.mean() * rows.varies.sum(axis=1).mean()) if reference.any() else math.nan,
        profile_p,
        similarity,
    )


def permutations(rows: Rows, *, seed: int = 0) -> AgreementTest:
    """Test agreement by permuting units within clients, which assumes that all units have equal covariances.

    Parameters
    ----------
    rows : Rows
        Those of all units are held in memory.
    seed : int
        Seed of the permutations where they are drawn.

    Returns
    -------
    AgreementTest

    Notes
    -----
    H0: every client could have named its units in any order. Rows less the client's mean over units are scaled to norm
    1, so that units may differ in size. The statistic is the mean product over pairs of the k clients in which the unit
    varies, (‖Σ_c x_cu‖² − k) / (k (k − 1)). Permutations are cyclic shifts of a client's units (Fisher 1935, The design
    of experiments): all d^(C − 1) of d units if they are at most 4096, else 99 or more. Statistics of all units are
    pooled, and units called at a false discovery rate of .05 leave the mean, as in :func:`sign_flips`.
    """
    units = np.flatnonzero(rows.varies.sum(axis=0) > 1)
    (k, d), n_units = rows.varies.shape, len(units)
    statistic, p_value, layer = np.full(d, np.nan), np.full(d, np.nan), (math.nan, math.nan)
    shifts = _shifts(k, n_units, seed)
    if n_units > 1:
        x = np.concatenate([_host(rows.read(part)) for part in slices(d, rows.step)])[units]
        varies = rows.varies[:, units].T
        everything = np.ones(n_units, dtype=bool)
        observed, p, layer = _permuted(_unit_rows(x, varies, everything), shifts)
        rest = ~_called(p)
        if _REFERENCE <= rest.sum() < n_units:
            observed, p, _ = _permuted(_unit_rows(x, varies, rest), shifts)
        statistic[units], p_value[units] = observed, p
    return AgreementTest(statistic, p_value, *layer, len(shifts), math.nan, math.nan, np.full((k, k), np.nan))


def _less_profile(rows: Rows, own: Floats, reference: Bools, i: Any, j: Any) -> tuple[Floats, Floats]:
    """Products of deviations from the profile of the reference units, (unit, pair), and of the profile, (pair,).

    With S the sum over the reference units but u, of which n vary in c, n' in c' and n'' in both, the first is
    ⟨x, x'⟩ − ⟨x, S'⟩/n' − ⟨S, x'⟩/n + (⟨S, S'⟩ − Σ_v ⟨x_v, x'_v⟩) / (n n' − n''), or 0 where a number is 0. Without any
    reference units, it is ⟨x, x'⟩.
    """
    if not reference.any():
        return own, np.zeros(len(i))
    k, d = rows.varies.shape
    total, pairs = _total(rows, reference), (i, j)
    rest = (_gram(total)[i, j] - own[reference].sum(axis=0, dtype=float)).astype(np.float32)
    if rows.varies.all():
        i, j = i[:1], j[:1]  # the numbers of units are those of all pairs
    counts = rows.varies @ reference.astype(np.float32)
    both = (rows.varies[i] & rows.varies[j]) @ reference.astype(np.float32)
    profile = rest / np.maximum(counts[i] * counts[j] - both, 1)
    found = np.empty_like(own)
    for units in slices(d, rows.step):
        x, inside = rows.read(units), reference[units, None].astype(np.float32)
        xp = array_namespace(x)
        cross = _host(xp.reshape(x, (-1, x.shape[-1])) @ xp.matrix_transpose(total)).reshape(-1, k, k)
        in_i, in_j = rows.varies[i, units].T, rows.varies[j, units].T
        n_i, n_j = counts[i] - inside * in_i, counts[j] - inside * in_j
        n_different = n_i * n_j - both + inside * (in_i & in_j)
        known = in_i & in_j & (n_i > 0) & (n_j > 0) & (n_different > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            a_i, a_j, a = 1 / n_i, 1 / n_j, 1 / n_different
            r = (1 + inside * (a_i + a_j + 2 * a)) * own[units] + a * rest
            r -= (a_j + inside * a) * cross[:, *pairs] + (a_i + inside * a) * cross[:, *pairs[::-1]]
        found[units] = np.where(known, r, np.float32(0))
    return found, profile.astype(float)


def _own_products(rows: Rows, i: Any, j: Any) -> Floats:
    """Products of the rows of two clients, float32 (unit, pair)."""
    found = np.empty((rows.varies.shape[1], len(i)), dtype=np.float32)
    for units in slices(len(found), rows.step):
        found[units] = _gram(rows.read(units))[:, i, j]
    return found


def _total(rows: Rows, reference: Bools) -> Array:
    """Sum of the rows of the reference units, (client, weight)."""
    found = 0.0
    for units in slices(len(reference), rows.step):
        x = rows.read(units)
        xp = array_namespace(x)
        inside = xp.asarray(reference[units].astype(np.float32), device=device_of(x))
        found = found + xp.tensordot(inside, x, axes=1)
    return found


def _gram(x: Array) -> Any:
    """Products of rows, (..., row, row), on the host."""
    return _host(x @ array_namespace(x).matrix_transpose(x))


def _standardized(products: Floats, own: Floats) -> Floats:
    """Products (unit, pair) over the root of their sum of squares; 0 where they are rounding beside the rows' own."""
    size, of_own = (np.sqrt(np.vecdot(x, x))[:, None] for x in (products, own))
    return np.divide(products, size, out=np.zeros_like(products), where=size > _TIE * of_own)


def _patterns(k: int, seed: int) -> tuple[Floats, bool]:
    """Signs (pattern, client) without the observed pattern, and True if they are all."""
    if k <= MOST_ENUMERATED:
        bits = np.arange(1, 2 ** (k - 1))[:, None] >> np.arange(k) & 1
        return (1 - 2 * bits).astype(np.float32), True
    bits = generator(seed, "icc sign flips").integers(2, size=(_DRAWN, k), dtype=np.int8)
    return (1 - 2 * bits).astype(np.float32), False


def _pooled(products: Floats, tested: Bools, signs: Floats, i: Any, j: Any, *, exact: bool) -> Floats:
    """P values (unit,) from the statistics of all tested units under all patterns."""
    p_value, d = np.full(len(tested), np.nan), int(tested.sum())
    if not d:
        return p_value
    products = products[tested]
    n = math.ceil(max(_FEWEST, _POOLED / d, _WORK / (d * len(i))))
    n = len(signs) if exact else min(len(signs), n)
    limit = _least(products.sum(axis=1, dtype=float))
    as_large = np.zeros(d, dtype=np.int64)
    for part in slices(n, max(1, _NUMBERS // max(d, len(i)))):
        pooled = np.sort(signs[part][:, i] * signs[part][:, j] @ products.T, axis=None)
        as_large += len(pooled) - np.searchsorted(pooled, limit)
    p_value[tested] = (1 + as_large) / (1 + n * d)
    return p_value


def _flipped(products: Floats, signs: Floats, i: Any, j: Any) -> float:
    """P value of a sum of products (pair,) over sign patterns; NaN for two clients, or without products."""
    if len(products) < 2 or not products.any():
        return math.nan
    matrix = np.zeros((signs.shape[1],) * 2, dtype=np.float32)
    matrix[i, j] = products / np.abs(products).max()
    limit = matrix.sum(dtype=float) - _TIE * np.abs(matrix).sum(dtype=float)
    return float((1 + (np.vecdot(signs @ matrix, signs) >= limit).sum()) / (1 + len(signs)))


def _shifts(k: int, d: int, seed: int) -> NDArray[np.int64]:
    """Shifts (permutation, client) without the observed order: all, or drawn."""
    if d ** (k - 1) <= _ALL:
        return np.stack([np.arange(1, d ** (k - 1)) // d**c % d for c in range(k)], axis=1)
    return generator(seed, "icc permutations").integers(d, size=(max(_FEWEST, math.ceil(_SHIFTED / d)), k))


def _unit_rows(x: Floats, varies: Bools, reference: Bools) -> Floats:
    """Rows (unit, client, weight) of norm 1, less the client's mean over reference units; 0 where nothing is left."""
    x = x / np.where(varies, np.linalg.norm(x, axis=2), 1)[..., None]
    if len(x) >= _REFERENCE:
        x -= x[reference].mean(axis=0)
    size = np.linalg.norm(x, axis=2)
    known = varies & (size > _TIE)
    return np.where(known[..., None], x / np.where(known, size, 1)[..., None], 0)


def _permuted(x: Floats, shifts: NDArray[np.int64]) -> tuple[Floats, Floats, tuple[float, float]]:
    """Statistics and p values of units, (unit,), and of the layer."""
    everything = np.concatenate([np.zeros((1, x.shape[1]), dtype=np.int64), shifts])
    known, found = x.any(axis=2), np.empty((len(everything), len(x)))
    for at, by in zip(found, everything.tolist(), strict=True):
        total, n = (sum(np.roll(a[:, c], -s, axis=0) for c, s in enumerate(by)) for a in (x, known.astype(float)))
        with np.errstate(divide="ignore", invalid="ignore"):
            at[:] = np.where(n > 1, (np.vecdot(total, total) - n) / (n * (n - 1)), np.nan)
    observed, pooled = found[0], np.sort(found[1:][np.isfinite(found[1:])])
    p_value = (1 + len(pooled) - np.searchsorted(pooled, _least(observed))) / (1 + len(pooled))
    sums = np.nansum(found, axis=1)
    layer = float(sums[0]), float((sums >= _least(sums[0])).mean())
    return observed, np.where(np.isfinite(observed), p_value, np.nan), layer


def _least(statistic: Any) -> Any:
    """Return what counts as large as a statistic."""
    return statistic - _TIE * (1 + np.abs(statistic))


def _called(p_value: Floats) -> Bools:
    return np.asarray(fdr(p_value[:, None])[:, 0] <= _FDR)


def _host(a: Array) -> Any:
    return np.asarray(a.cpu() if is_torch_array(a) else a)
