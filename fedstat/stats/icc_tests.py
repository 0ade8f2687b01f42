"""Tests of the direction of clients: sign flips of clients, and permutations of units within clients.

Rows are NumPy arrays or torch tensors; results are NumPy arrays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils.check import numpy_of
from fedstat._utils.streams import generator
from fedstat.stats import LEAST_VARYING
from fedstat.stats.icc import fdr, slices

Array = Any
Floats = NDArray[Any]  # float64 in results, float32 in products
Bools = NDArray[np.bool_]

MOST_ENUMERATED = 13
"""Largest number of clients whose sign patterns are enumerated; with more clients, sign patterns are drawn."""
# Largest number of permutations that are enumerated; number of drawn sign patterns; smallest number of draws for units.
_ALL, _DRAWN, _MIN_DRAWN = 4096, 9999, 99
# Smallest number of pooled sign-flip statistics; multiplications for more of them; pooled permutation statistics.
_POOLED, _WORK, _POOLED_SHIFTS = 20_000, 1e8, 4000
_REFERENCE = 3  # smallest number of units for the common profile
_FDR = 0.05  # level at which units are excluded from the common profile
_TIE = 1e-5  # relative tolerance for ties of statistics: float32 rounding
_NUMBERS = 1 << 22  # largest number of pooled values in memory


class Rows(NamedTuple):
    """Centered weights of a layer's units; the layer of every client has norm 1.

    Attributes
    ----------
    read : callable (slice) -> float32 array (unit, client, weight)
        Returns the rows of a slice of units. Rows of units that do not vary are 0.
    varies : bool array (client, unit)
        True if the weights of a client's unit differ.
    step : int
        Number of units that are read at a time.
    """

    read: Callable[[slice], Array]
    varies: Bools
    step: int


class AgreementTest(NamedTuple):
    """Test of units and of the layer, and of the common profile of all units.

    Attributes
    ----------
    statistic, p_value : array (unit,)
        NaN for a unit that is not tested.
    layer_statistic, layer_p_value : float
        Statistic and p value of the sum over units.
    n_patterns : int
        Number of sign patterns or permutations of the layer's p value, without the observed pattern.
    profile_proportion, profile_p_value : float
        Proportion of the squared weights that the common profile explains, and its p value; NaN for permutations.
    similarity : array (client, client)
        Cosine similarity of the clients' layers; NaN for permutations, and for pairs that a test leaves out.
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


def sign_flips(rows: Rows, *, seed: int = 0, groups: NDArray[np.int64] | None = None) -> AgreementTest:
    """Test by flipping the signs of clients whether most clients deviate in one direction.

    Parameters
    ----------
    rows : Rows
    seed : int
        Seed of the sign patterns, which are drawn with more than 13 clients.
    groups : int array (client,), optional
        Group of each client: the statistics are sums over pairs of clients of one group, so that the test is one of
        agreement within groups. The p value of the layer is then at least 2 to the power of groups minus clients.

    Returns
    -------
    AgreementTest

    Notes
    -----
    For clients c and c', r_u = ⟨x_cu − m_c, x_c'u − m_c'⟩ is the product of a unit's rows minus the common profile of
    the units. It is estimated without bias from pairs of two different other units: neither the unit nor another unit
    on which clients agree contributes. The statistic is t_u = Σ r_u / √Σ r_u² over pairs of clients (studentized sign
    flips: Janssen 1997, Stat. Probab. Lett. 36, 9-21; Winkler et al. 2014, NeuroImage 92, 381-397).

    H0 of a unit: the clients' deviations from the profile are independent and symmetric about 0. If H0 is false, the
    mean deviation need not differ from 0: most clients can deviate a little in one direction, and few far in the other.
    Then units are called although clients do not agree on average: of trained networks with one or two classes, in the
    output layer above all. Few clients cannot tell the two apart: if 4 of 5 clients deviate in one direction, 6 drawn
    clients all do in a quarter of the draws. All 2^(C − 1) sign patterns of C clients are enumerated if they are at
    most 4096; otherwise 9999 are drawn. Statistics of all units under all patterns but the observed one are pooled, p_u
    = (1 + #{t ≥ t_u}) / (1 + #t), so that few patterns give small p values. These p values are valid on average over
    units: units of low rank have longer tails than others. The layer's statistic is Σ_u t_u; its p value uses no
    pooling and is at least 2^(1 − C).

    Units that are significant at a false discovery rate of .05 are excluded from the profile, and all units are tested
    again. If fewer than 3 units would remain in the profile, p is the larger of the first p value and the p value
    without a profile. The profile's p value is the larger of its p values before and after this exclusion: in an output
    layer, whose rows sum to 0, excluding significant units makes the remaining units agree. ``simulations/inference``
    contains level and power.
    """
    k, d = rows.varies.shape
    pair = np.triu_indices(k, 1)
    if groups is not None:
        pair = tuple(i[groups[pair[0]] == groups[pair[1]]] for i in pair)
    signs, exact = _patterns(k, seed)
    row_products = _row_products(rows, *pair)
    testable, varies, empty = rows.varies.sum(axis=0) >= LEAST_VARYING, rows.varies.any(axis=0), np.zeros(d, dtype=bool)

    def evaluate(reference: Bools) -> tuple[Floats, Floats, Floats]:
        products, profile = _subtract_profile(rows, row_products, reference, *pair)
        products = _standardize(products, row_products)
        return products, _pooled_p_values(products, testable, signs, *pair, exact=exact), profile

    reference: Any = varies if varies.sum() >= _REFERENCE else empty
    products, p_value, profile = evaluate(reference)
    layer_products, profile_p = products.sum(axis=0, dtype=float), _sum_p_value(profile, signs, *pair)
    if (reference & (is_significant := _is_significant(p_value))).any():
        if (reference & ~is_significant).sum() >= _REFERENCE:
            products, p_value, profile = evaluate(reference & ~is_significant)
            profile_p = max(profile_p, _sum_p_value(profile, signs, *pair))
        else:
            p_value = np.maximum(p_value, evaluate(empty)[1])
    similarity = np.eye(k) if groups is None else np.full((k, k), np.nan)
    similarity[pair] = similarity.T[pair] = np.clip(row_products.sum(axis=0, dtype=float), -1, 1)
    return AgreementTest(
        np.where(testable, products.sum(axis=1, dtype=float), np.nan),
        p_value,
        float(layer_products.sum()),
        _sum_p_value(layer_products, signs, *pair),
        len(signs),
        float(profile.mean() * rows.varies.sum(axis=1).mean()) if reference.any() else math.nan,
        profile_p,
        similarity,
    )


def permutations(rows: Rows, *, seed: int = 0) -> AgreementTest:
    """Test by permuting units within clients, which assumes that all units have equal covariances.

    Parameters
    ----------
    rows : Rows
        Rows of all units are read into memory.
    seed : int
        Seed of the permutations, if they are drawn.

    Returns
    -------
    AgreementTest

    Notes
    -----
    H0: units are exchangeable within clients. Common initial parameters make H0 false by construction. Rows minus the
    client's mean over units are scaled to norm 1, so that units may differ in size. The statistic is the mean product
    over pairs of the k clients in which the unit varies, (‖Σ_c x_cu‖² − k) / (k (k − 1)).

    Permutations are cyclic shifts of a client's units (Fisher 1935, The design of experiments): all d^(C − 1) of d
    units if they are at most 4096, otherwise at least 99. As in :func:`sign_flips`, statistics of all units are pooled,
    and units that are significant at a false discovery rate of .05 are excluded from the mean.
    """
    units = np.flatnonzero(rows.varies.sum(axis=0) > 1)
    (k, d), n_units = rows.varies.shape, len(units)
    statistic, p_value, layer = np.full(d, np.nan), np.full(d, np.nan), (math.nan, math.nan)
    shifts = _shifts(k, n_units, seed)
    if n_units > 1:
        x = np.concatenate([numpy_of(rows.read(part)) for part in slices(d, rows.step)])[units]
        varies = rows.varies[:, units].T
        all_units = np.ones(n_units, dtype=bool)
        observed, p_units, layer = _permute(_unit_rows(x, varies, all_units), shifts)
        in_mean = ~_is_significant(p_units)
        if _REFERENCE <= in_mean.sum() < n_units:
            observed, p_units, _ = _permute(_unit_rows(x, varies, in_mean), shifts)
        statistic[units], p_value[units] = observed, p_units
    return AgreementTest(statistic, p_value, *layer, len(shifts), math.nan, math.nan, np.full((k, k), np.nan))


def _subtract_profile(rows: Rows, row_products: Floats, reference: Bools, i: Any, j: Any) -> tuple[Floats, Floats]:
    """Return products of deviations from the profile of the reference units, (unit, pair), and of the profile, (pair,).

    S is the sum over the reference units without u; n of these units vary in c, n' in c', and n'' in both. The product
    is ⟨x, x'⟩ − ⟨x, S'⟩/n' − ⟨S, x'⟩/n + (⟨S, S'⟩ − Σ_v ⟨x_v, x'_v⟩) / (n n' − n''), or 0 if a denominator is 0.
    Without reference units, it is ⟨x, x'⟩.
    """
    if not reference.any():
        return row_products, np.zeros(len(i))
    k, d = rows.varies.shape
    total, pairs = _total(rows, reference), (i, j)
    other_products = (_gram(total)[i, j] - row_products[reference].sum(axis=0, dtype=float)).astype(np.float32)
    if rows.varies.all():
        i, j = i[:1], j[:1]  # the numbers of units are equal for all pairs
    counts = rows.varies @ reference.astype(np.float32)
    n_both = (rows.varies[i] & rows.varies[j]) @ reference.astype(np.float32)
    profile = other_products / np.maximum(counts[i] * counts[j] - n_both, 1)
    result = np.empty_like(row_products)
    for units in slices(d, rows.step):
        x, in_reference = rows.read(units), reference[units, None].astype(np.float32)
        xp = array_namespace(x)
        cross = numpy_of(xp.reshape(x, (-1, x.shape[-1])) @ xp.matrix_transpose(total)).reshape(-1, k, k)
        in_i, in_j = rows.varies[i, units].T, rows.varies[j, units].T
        n_i, n_j = counts[i] - in_reference * in_i, counts[j] - in_reference * in_j
        n_different = n_i * n_j - n_both + in_reference * (in_i & in_j)
        is_defined = in_i & in_j & (n_i > 0) & (n_j > 0) & (n_different > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            a_i, a_j, a = 1 / n_i, 1 / n_j, 1 / n_different
            r = (1 + in_reference * (a_i + a_j + 2 * a)) * row_products[units] + a * other_products
            r -= (a_j + in_reference * a) * cross[:, *pairs] + (a_i + in_reference * a) * cross[:, *pairs[::-1]]
        result[units] = np.where(is_defined, r, np.float32(0))
    return result, profile.astype(float)


def _row_products(rows: Rows, i: Any, j: Any) -> Floats:
    """Return products of the rows of two clients, float32 (unit, pair)."""
    products = np.empty((rows.varies.shape[1], len(i)), dtype=np.float32)
    for units in slices(len(products), rows.step):
        products[units] = _gram(rows.read(units))[:, i, j]
    return products


def _total(rows: Rows, reference: Bools) -> Array:
    """Return the sum of the rows of the reference units, (client, weight)."""
    total = 0.0
    for units in slices(len(reference), rows.step):
        x = rows.read(units)
        xp = array_namespace(x)
        in_reference = xp.asarray(reference[units].astype(np.float32), device=device_of(x))
        total = total + xp.tensordot(in_reference, x, axes=1)
    return total


def _gram(x: Array) -> Any:
    """Return products of rows, (..., row, row), on the host."""
    return numpy_of(x @ array_namespace(x).matrix_transpose(x))


def _standardize(products: Floats, row_products: Floats) -> Floats:
    """Divide products (unit, pair) by the root of their sum of squares; 0 if they are rounding errors."""
    size, row_size = (np.sqrt(np.vecdot(x, x))[:, None] for x in (products, row_products))
    return np.divide(products, size, out=np.zeros_like(products), where=size > _TIE * row_size)


def _patterns(k: int, seed: int) -> tuple[Floats, bool]:
    """Return signs (pattern, client) without the observed pattern, and True if they are enumerated."""
    if k <= MOST_ENUMERATED:
        bits = np.arange(1, 2 ** (k - 1))[:, None] >> np.arange(k) & 1
        return (1 - 2 * bits).astype(np.float32), True
    bits = generator(seed, "icc sign flips").integers(2, size=(_DRAWN, k), dtype=np.int8)
    return (1 - 2 * bits).astype(np.float32), False


def _pooled_p_values(products: Floats, is_tested: Bools, signs: Floats, i: Any, j: Any, *, exact: bool) -> Floats:
    """Return p values (unit,) from the pooled statistics of all tested units under all patterns."""
    p_value, d = np.full(len(is_tested), np.nan), int(is_tested.sum())
    if not d:
        return p_value
    products = products[is_tested]
    n = math.ceil(max(_MIN_DRAWN, _POOLED / d, _WORK / (d * len(i))))
    n = len(signs) if exact else min(len(signs), n)
    limit = _tie_limit(products.sum(axis=1, dtype=float))
    as_large = np.zeros(d, dtype=np.int64)
    for part in slices(n, max(1, _NUMBERS // max(d, len(i)))):
        pooled = np.sort(signs[part][:, i] * signs[part][:, j] @ products.T, axis=None)
        as_large += len(pooled) - np.searchsorted(pooled, limit)
    p_value[is_tested] = (1 + as_large) / (1 + n * d)
    return p_value


def _sum_p_value(products: Floats, signs: Floats, i: Any, j: Any) -> float:
    """Return the p value of a sum of products (pair,) over sign patterns; NaN for two clients, or without products."""
    if len(products) < 2 or not products.any():
        return math.nan
    matrix = np.zeros((signs.shape[1],) * 2, dtype=np.float32)
    matrix[i, j] = products / np.abs(products).max()
    limit = matrix.sum(dtype=float) - _TIE * np.abs(matrix).sum(dtype=float)
    return float((1 + (np.vecdot(signs @ matrix, signs) >= limit).sum()) / (1 + len(signs)))


def _shifts(k: int, d: int, seed: int) -> NDArray[np.int64]:
    """Return shifts (permutation, client) without the observed order, enumerated or drawn."""
    if d ** (k - 1) <= _ALL:
        return np.stack([np.arange(1, d ** (k - 1)) // d**c % d for c in range(k)], axis=1)
    return generator(seed, "icc permutations").integers(d, size=(max(_MIN_DRAWN, math.ceil(_POOLED_SHIFTS / d)), k))


def _unit_rows(x: Floats, varies: Bools, reference: Bools) -> Floats:
    """Subtract the client's mean over reference units from rows (unit, client, weight); scale to norm 1, or 0."""
    x = x / np.where(varies, np.linalg.norm(x, axis=2), 1)[..., None]
    if len(x) >= _REFERENCE:
        x -= x[reference].mean(axis=0)
    size = np.linalg.norm(x, axis=2)
    is_nonzero = varies & (size > _TIE)
    return np.where(is_nonzero[..., None], x / np.where(is_nonzero, size, 1)[..., None], 0)


def _permute(x: Floats, shifts: NDArray[np.int64]) -> tuple[Floats, Floats, tuple[float, float]]:
    """Return statistics and p values of units, (unit,), and of the layer."""
    all_shifts = np.concatenate([np.zeros((1, x.shape[1]), dtype=np.int64), shifts])
    varies, statistics = x.any(axis=2), np.empty((len(all_shifts), len(x)))
    for row, lags in zip(statistics, all_shifts.tolist(), strict=True):
        total, n = (sum(np.roll(a[:, c], -s, axis=0) for c, s in enumerate(lags)) for a in (x, varies.astype(float)))
        with np.errstate(divide="ignore", invalid="ignore"):
            row[:] = np.where(n > 1, (np.vecdot(total, total) - n) / (n * (n - 1)), np.nan)
    observed, pooled = statistics[0], np.sort(statistics[1:][np.isfinite(statistics[1:])])
    p_value = (1 + len(pooled) - np.searchsorted(pooled, _tie_limit(observed))) / (1 + len(pooled))
    sums = np.nansum(statistics, axis=1)
    layer = float(sums[0]), float((sums >= _tie_limit(sums[0])).mean())
    if not np.isfinite(observed).any():  # units equal the profile: nothing is left to test
        layer = math.nan, math.nan
    return observed, np.where(np.isfinite(observed), p_value, np.nan), layer


def _tie_limit(statistic: Any) -> Any:
    """Return the smallest value that counts as at least as large as a statistic, ties included."""
    return statistic - _TIE * (1 + np.abs(statistic))


def _is_significant(p_value: Floats) -> Bools:
    return np.asarray(fdr(p_value[:, None])[:, 0] <= _FDR)
