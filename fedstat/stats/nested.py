"""Variance components of clients in groups, from replicates: groups, clients within groups, and training noise.

For group g, its client c, replicate r and weight i of a unit

    w_gcri = m_i + a_gi + b_gci + e_gcri,    Var a = σ_g², Var b = σ_b², mean of Var e = σ_e²,

as ``w ~ 0 + weight + (1 | weight:group) + (1 | weight:group:client)`` of R's lme4. Everything follows from inner
products of the clients' means over replicates, :func:`fedstat.stats.reml.gram`. NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat import stats
from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats import Claim, clustering, reml, resampling
from fedstat.stats import variance_components as moments
from fedstat.stats.icc import slices
from fedstat.stats.reml import Gram
from fedstat.stats.variance_components import Components, Floats

Method = Literal["moments", "reml"]
PERMUTATIONS = 999
"""Largest number of permutations of clients among groups; with more than 45 clients, fewer are drawn."""
_WORK, _FEWEST = 2_000_000, 199  # permutations times squared clients; smallest number of random permutations
_LEAST = 1e-3  # smallest 1 + n σ_g² / (σ_b² + σ_e²/R) on the scale of intervals
_ROUNDING = 1e-13  # squares that are 0, relative to those of clients
_TIE = 1e-5  # relative tolerance for ties of F: float32 rounding
_NUMBERS = 1 << 22  # numbers in one block of temporaries


class GroupComponents(NamedTuple):
    """Estimates of groups for every unit: arrays (unit,); NaN for a unit that is identical in all clients of a group.

    Attributes
    ----------
    between : array
        σ_g², variance of a weight between groups beyond that of their clients.
    proportion : array
        σ_g² / (σ_g² + σ_b² + σ_e²/R), proportion of the variance of clients that are trained on all their data.
    conf_low, conf_high : array
        Interval of ``proportion``.
    statistic, p_value : array
        F of the groups of several clients, and its permutation test of H0: σ_g² = 0.
    n_permutations : int
        Number of permutations of clients among groups.
    exact : bool
        True if these are all permutations.
    least : float
        Smallest possible p value.
    """

    between: Floats
    proportion: Floats
    conf_low: Floats
    conf_high: Floats
    statistic: Floats
    p_value: Floats
    n_permutations: int
    exact: bool
    least: float


class _Products(NamedTuple):
    """Inner products of the clients' means over replicates, and noise.

    Attributes
    ----------
    means : array (unit, group, group)
        Of the means of groups.
    cross : array (unit, client, group)
        Of the clients' deviations from the means of their groups with the means of groups.
    squares, noise : array (unit, client)
        Squared deviation from the group's mean; noise of the mean over replicates.
    codes : int array (client,)
    n_replicates : int
    """

    means: Floats
    cross: Floats
    squares: Floats
    noise: Floats
    codes: NDArray[np.int64]
    n_replicates: int


class _Sets(NamedTuple):
    """Sufficient statistics of sets of clients: all, or all but one client or group.

    Attributes
    ----------
    n : array (set, group)
        Number of clients.
    means : array (unit, set, group, group)
        Inner products of the means of groups.
    squares, noise : array (unit, set, group)
        Sums over the clients of a group: squared deviations from the group's mean; noise of the mean of replicates.
    """

    n: Floats
    means: Floats
    squares: Floats
    noise: Floats


class _Estimates(NamedTuple):
    """Estimates of sets of clients; arrays (unit, set).

    Attributes
    ----------
    client, noise : array
        Variance of clients' means within groups, σ_b² + σ_e²/R, and noise of a mean, σ_e²/R; sums over weights.
    ratio : array
        σ_g² / (σ_b² + σ_e²/R).
    """

    client: Floats
    noise: Floats
    ratio: Floats


def components(
    g: Gram,
    codes: NDArray[np.int64],
    *,
    method: Method = "moments",
    claim: Claim = "new groups",
    level: float = 0.95,
    seed: int = 0,
) -> tuple[Components, GroupComponents]:
    """Estimate the components of groups, clients within groups and noise, with intervals and tests.

    Parameters
    ----------
    g : Gram
        Sums of units, or of a layer (:meth:`Gram.pooled`), without sizes and covariate.
    codes : int array (client,)
        Number of each client's group, from 0.
    method : {"moments", "reml"}
    claim : {"these groups", "new groups"}
        Intervals leave out single clients, for further clients of these groups; or whole groups, for further groups.
    level : float in (0, 1)
        Confidence level of the intervals.
    seed : int
        Seed of random permutations.

    Returns
    -------
    Components
        Of clients within groups: ``reliability`` is σ_b² / (σ_b² + σ_e²/R).
    GroupComponents

    Raises
    ------
    ValueError
        As :func:`fedstat.stats.variance_components.components`.

    Notes
    -----
    With n_g of C clients in one of G groups, means y_g of groups and y of all, and V_g the variance in group g of the
    clients' means over replicates,

        E Σ_g n_g |y_g − y|² = σ_g² (C − Σ_g n_g² / C) + Σ_g (1 − n_g / C) V_g,

    which gives an unbiased σ_g², whatever the noise of clients and the variances of groups. F is the ratio of both
    sides under H0: σ_g² = 0 [1]_. Its p value is the proportion of permutations of clients among groups with an F at
    least as large. It is exact if all clients have one distribution, and approximate if the variances of groups differ.
    σ_b² and σ_e² are those of :func:`fedstat.stats.variance_components.components` with the means of groups as fit. A
    group of one client has no part in them and in F; for σ_g² it has the mean V_g of the others.

    "reml" is restricted maximum likelihood for normal weights of equal noise [2]_, as by lmer. Given the ratio of σ_g²
    to σ_b² + σ_e²/R, the maximum has a closed form; the ratio is found by a search.

    Intervals come from the jackknife [3]_ on the scales of log(1 / (1 − reliability)) and of log(1 + n σ_g² / (σ_b² +
    σ_e²/R)), n being the average size of groups. If single clients are left out, groups are strata. The one-sided test
    of H0: σ_b² = 0 then has C − G degrees of freedom; if groups are left out, it has those of its interval.

    References
    ----------
    .. [1] Anderson, Walsh, Clarke, Gorley, Guerra-Castro (2017). Some solutions to the multivariate Behrens-Fisher
       problem for dissimilarity-based analyses. Australian & New Zealand Journal of Statistics 59, 57-79.
    .. [2] Searle, Casella, McCulloch (1992). Variance Components. Wiley.
    .. [3] Wolter (2007). Introduction to Variance Estimation. Springer, chapter 4.

    Examples
    --------
    >>> rng, country = np.random.default_rng(0), np.repeat(np.arange(6), 5)
    >>> clients = rng.normal(size=(6, 1, 1, 200))[country] + rng.normal(size=(30, 1, 1, 200))
    >>> sums = reml.gram(clients + rng.normal(size=(30, 2, 1, 200)))
    >>> within, groups = components(sums, country)  # variances of 1, and a half of the noise: 2 / 3 and 1 / 2.5
    >>> within.reliability.round(2), groups.proportion.round(2), groups.p_value
    (array([0.67]), array([0.39]), array([0.001]))
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    c, size = len(codes), np.bincount(codes)
    step = max(1, _NUMBERS // (c * len(size) ** 2))
    products = [
        _products(g._replace(means=g.means[units], within=g.within[:, units]), codes)
        for units in slices(len(g.means), step)
    ]
    squares = np.concatenate([x.squares for x in products])
    moments.require_noise(squares.T, g.within)
    parts = [_of_units(x, g.n_weights, method, claim, level) for x in products]
    (*estimates, statistic, std_error, df_interval), of_groups = (
        [np.concatenate(field) for field in zip(*blocks, strict=True)] for blocks in zip(*parts, strict=True)
    )
    identical = (squares == 0).all(axis=1)
    df = c - len(size) if claim == "these groups" else int((size > 1).sum()) - 1
    # Groups of unlike sizes contribute unequally, so that their number gives too many degrees of freedom.
    p_value = scipy.special.stdtr(df if claim == "these groups" else df_interval, -statistic)
    return (
        Components._make((*estimates, statistic, p_value, std_error, df, level, df_interval, identical)),
        GroupComponents._make((*of_groups, *_permutation_test(g.means, codes, identical, seed))),
    )


def _products(g: Gram, codes: NDArray[np.int64]) -> _Products:
    """Return inner products of clients and groups."""
    r = g.sizes.shape[1]
    average = (codes[:, None] == np.arange(codes.max() + 1)) / np.bincount(codes)
    of_clients = g.means @ average
    means = average.T @ of_clients
    cross = of_clients - means[:, codes]
    clients, square = np.arange(len(codes)), np.diagonal(g.means, axis1=1, axis2=2)
    squares = square - of_clients[:, clients, codes] - cross[:, clients, codes]
    # Equal clients of a group, but for rounding.
    squares = np.where(squares > _ROUNDING * square.max(axis=1, keepdims=True), squares, 0)
    squares[:, np.bincount(codes)[codes] == 1] = 0
    return _Products(means, cross, squares, g.within.T / (r * (r - 1)), codes, r)


def _of_units(
    s: _Products, n_weights: int, method: Method, claim: Claim, level: float
) -> tuple[list[Floats], list[Floats]]:
    """Return arrays (unit,): fields of :class:`Components` but for p_value and df, and of :class:`GroupComponents`."""
    size, is_new = np.bincount(s.codes), claim == "new groups"
    c, full = len(s.codes), _all_clients(s)
    left = _without_groups(full) if is_new else _without_clients(s, full)
    n_average = (c - (size**2).sum() / c) / (len(size) - 1)
    strata, most = (None, len(size) - 1) if is_new else (s.codes, c - len(size))
    has_clients = size > 1 if is_new else np.ones(c, bool)  # others say nothing of clients within groups
    fit: Callable[[_Sets], _Estimates] = partial(_reml, r=s.n_replicates) if method == "reml" else _moments

    def scaled(x: _Estimates) -> tuple[Floats, Floats]:
        return np.log(x.client / x.noise), np.log(np.maximum(1 + n_average * x.ratio, _LEAST))

    with np.errstate(divide="ignore", invalid="ignore"):
        free, without = fit(full), scaled(fit(left))
        client, noise, ratio = (x[:, 0] for x in (_reml(full, r=s.n_replicates, least=0) if method == "reml" else free))
        identical = full.squares[:, 0].sum(axis=-1) == 0
        thetas = [np.where(identical, np.nan, x[:, 0]) for x in scaled(free)]
        most_client = int(has_clients.sum()) - 1 if is_new else most
        error, df = resampling.jackknife(without[0].T[has_clients], most_client, strata)
        error_group, df_group = resampling.jackknife(without[1].T, most, strata)
        error[(s.noise > 0).sum(axis=1) < min(c, stats.LEAST_VARYING)] = np.nan
        if is_new and has_clients.sum() < stats.LEAST_VARYING:
            error[:] = np.nan
        bounds = [
            theta + sign * scipy.special.stdtrit(f, 0.5 + level / 2) * e
            for theta, e, f in zip(thetas, (error, error_group), (df, df_group), strict=True)
            for sign in (-1, 1)
        ]
        if method == "reml":
            bounds = [np.maximum(x, 0) for x in bounds]
        low, high = (-np.expm1(-x) for x in bounds[:2])
        ratios = [np.where(identical, np.nan, x) for x in (ratio, *(np.expm1(x) / n_average for x in bounds[2:]))]
        sigma_b, sigma_e = (client - noise) / n_weights, noise * s.n_replicates / n_weights
        replicate = np.where(sigma_b + sigma_e > 0, sigma_b / (sigma_b + sigma_e), -np.inf)
        reliability, replicate = (np.where(identical, np.nan, x) for x in (1 - noise / client, replicate))
    of_clients = [sigma_b, sigma_e, reliability, replicate, low, high, thetas[0] / error, error, df]
    return of_clients, [ratios[0] * client / n_weights, *(x / (1 + x) for x in ratios)]


def _all_clients(s: _Products) -> _Sets:
    """Return the set of all clients."""
    of_group = (s.codes[:, None] == np.arange(s.codes.max() + 1)).astype(float)
    squares, noise = (x @ of_group for x in (s.squares, s.noise))
    return _Sets(of_group.sum(axis=0)[None], s.means[:, None], squares[:, None], noise[:, None])


def _without_groups(full: _Sets) -> _Sets:
    """Return a set without each group."""
    keep = 1 - np.eye(full.n.shape[1])
    return _Sets(full.n * keep, full.means, full.squares * keep, full.noise * keep)


def _without_clients(s: _Products, full: _Sets) -> _Sets:
    """Return a set without each client; groups have at least 2 clients."""
    c, group = len(s.codes), s.codes
    clients, left = np.arange(c), (group[:, None] == np.arange(full.n.shape[1])).astype(float)
    n, square = full.n - left, s.squares
    rest = n[clients, group]
    # Without client c, the mean of its group moves by its deviation divided by the number of the others.
    cross = s.cross / rest[:, None]
    means = np.repeat(full.means, c, axis=1)
    moved = means[:, clients, group] - cross
    means[:, clients, group] = moved
    means[:, clients, :, group] = np.swapaxes(moved, 0, 1)
    means[:, clients, group, group] = full.means[:, 0, group, group] - 2 * cross[:, clients, group] + square / rest**2
    squares = full.squares - (square * (rest + 1) / rest)[:, :, None] * left
    squares = np.where(n > 1, np.maximum(squares, 0), 0)  # rounding leaves a rest of a single client
    return _Sets(n, means, squares, full.noise - s.noise[:, :, None] * left)


def _moments(x: _Sets) -> _Estimates:
    """Estimate by the method of moments."""
    n, total, diagonal = x.n, x.n.sum(axis=-1), np.diagonal(x.means, axis1=2, axis2=3)
    df = total - (n > 0).sum(axis=-1)
    client = x.squares.sum(axis=-1) / df
    noise = ((1 - 1 / np.maximum(n, 1)) * x.noise).sum(axis=-1) / df
    between = (n * diagonal).sum(axis=-1) - np.einsum("usgh,sg,sh->us", x.means, n, n) / total
    of_group = np.where(n > 1, x.squares / np.maximum(n - 1, 1), client[..., None])
    expected = ((n > 0) * (1 - n / total[:, None]) * of_group).sum(axis=-1)
    return _Estimates(client, noise, (between - expected) / (total - (n**2).sum(axis=-1) / total) / client)


def _reml(x: _Sets, *, r: int, least: float | None = None) -> _Estimates:
    """Maximize the restricted likelihood, of all parameters with positive variances or of all components >= 0."""
    n, total, diagonal = x.n, x.n.sum(axis=-1), np.diagonal(x.means, axis1=2, axis2=3)
    df_noise, noise_squares, squares = total * (r - 1), x.noise.sum(axis=-1) * (r - 1), x.squares.sum(axis=-1)

    def fit(ratio: Floats) -> tuple[Floats, Floats, Floats]:
        v = n / (1 + n * ratio[..., None])
        sum_v = v.sum(axis=-1)
        all_squares = squares + (v * diagonal).sum(axis=-1) - np.einsum("usgh,usg,ush->us", x.means, v, v) / sum_v
        client, noise = all_squares / (total - 1), noise_squares / df_noise
        if least is not None:  # σ_b² is 0 where it would be negative
            both = (all_squares + noise_squares) / (total - 1 + df_noise)
            client, noise = (np.where(client < noise, both, y) for y in (client, noise))
        log_det = np.log1p(n * ratio[..., None]).sum(axis=-1) + np.log(sum_v)
        return df_noise * np.log(noise) + (total - 1) * np.log(client) + log_det, client, noise

    lowest = -(1 - 1e-6) / n.max() if least is None else least
    t = reml.minimize(lambda t: fit(1 / t - 1)[0], x.squares.shape[:2], 1 / (1 + lowest))
    ratio = 1 / t - 1
    return _Estimates(*fit(ratio)[1:], ratio)


def _permutation_test(
    gram: Floats, codes: NDArray[np.int64], identical: NDArray[np.bool_], seed: int
) -> tuple[Floats, Floats, int, bool, float]:
    """Return F and p value, arrays (unit,), the number of permutations, True if they are all, and the smallest p."""
    several = np.flatnonzero(np.bincount(codes)[codes] > 1)
    gram, codes = gram[:, several][:, :, several], np.unique(codes[several], return_inverse=True)[1]
    c, size = len(codes), np.bincount(codes)
    if len(size) < 2:
        nothing = np.full(len(gram), np.nan)
        return nothing, nothing, 0, True, 1.0
    flat, square = gram.reshape(len(gram), -1), np.diagonal(gram, axis1=1, axis2=2)
    constant = flat.sum(axis=1, keepdims=True) / c
    share = (1 - size / c) / (size - 1)  # of a client's squared deviation in the expected sum

    def statistic(codes: NDArray[np.int64], dtype: Any) -> Floats:
        of_group, products = np.eye(len(size), dtype=dtype)[codes], flat.astype(dtype)

        def squares_of_sums(factor: Floats) -> Floats:
            pairs = (of_group * factor.astype(dtype)) @ of_group.swapaxes(1, 2)
            return np.asarray(products @ pairs.reshape(len(codes), -1).T)

        expected = square @ share[codes].T - squares_of_sums(share / size)
        return np.asarray((squares_of_sums(1 / size) - constant) / expected)

    n_random = min(max(_WORK // c**2, _FEWEST), PERMUTATIONS)
    step, rng = max(1, _NUMBERS // c**2), generator(seed, "clients among groups")
    blocks, exact = clustering.rearranged(codes, n_random, step, rng)
    as_large, n = np.zeros(len(gram)), 0
    with np.errstate(divide="ignore", invalid="ignore"):
        observed = statistic(codes[None], np.float64)
        for block in blocks:
            as_large += (statistic(block, np.float64 if exact else np.float32) >= observed * (1 - _TIE)).sum(axis=1)
            n += len(block)
    # Groups of one size can trade places.
    n_equal = math.prod(math.factorial(int(k)) for k in np.unique(size, return_counts=True)[1])
    p_value, least = (as_large / n, n_equal / n) if exact else ((as_large + 1) / (n + 1), 1 / (n + 1))
    f, p_value = (np.where(identical, np.nan, x) for x in (observed[:, 0], p_value))
    return f, p_value, n, exact, least
