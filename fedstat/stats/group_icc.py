"""Agreement of clients that form groups, such as the devices of one hospital: within groups, and between them.

Weight i of a unit, client c of group g:

    w_gci = μ + p_i + q_gi + d_gc + e_gci,

with a profile p of all clients, a profile q_g of the clients of a group, offsets d of clients and a remainder e.
Agreement is a correlation of two clients: (σ_p² + σ_q²)/σ² within groups and σ_p²/σ² between them, with
σ² = σ_p² + σ_q² + σ_d² + σ_e². Groups have equal weights, whatever their numbers of clients. Weights are NumPy arrays
or torch tensors; results are NumPy arrays on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace
from numpy.typing import NDArray

from fedstat.stats import LEAST_VARYING, moments
from fedstat.stats.icc import TYPES, ZERO, Sums, TwoWay, mean_squares_of, rescaled
from fedstat.stats.icc_resampling import (
    MOST_CLIENTS,
    Contributions,
    Influence,
    client_rows,
    jackknife_coefficients,
    mean_squares_without,
)
from fedstat.stats.icc_tests import AgreementTest, sign_flips
from fedstat.stats.resampling import jackknife

Array = Any
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_ROUNDING = 1e-10  # standard error of clients that are equal within groups


class Agreement(NamedTuple):
    """Agreement of pairs of clients, of units and of the layer: arrays (unit + 1,), the layer last.

    Attributes
    ----------
    icc, conf_low, conf_high : array (unit + 1,)
        NaN if nothing varies, or too few clients do.
    statistic, p_value : array (unit + 1,)
        One-sided test of no agreement. NaN without a test.
    least_p : float
        Smallest p value that the test of the layer can have; 0 if there is no such limit.
    """

    icc: Floats
    conf_low: Floats
    conf_high: Floats
    statistic: Floats
    p_value: Floats
    least_p: float


class GroupAgreement(NamedTuple):
    """Agreement within and between groups of clients.

    Attributes
    ----------
    within, between : Agreement
    variances : array (4, unit + 1)
        Proportions of the variance of a weight: common to all clients, common to a group's clients beyond this, offsets
        of clients, remainder. The first two may be negative.
    influence : Influence
        Contribution of each client to the squared deviations within groups; ``layer_icc`` is NaN.
    by_group : array (3, group)
        Layer's agreement within each group, with its interval: NaN for a single client, the interval also for two.
    """

    within: Agreement
    between: Agreement
    variances: Floats
    influence: Influence
    by_group: Floats


def over_groups(
    blocks: Callable[[], Iterable[Array]],
    group_sums: list[Sums],
    groups: Ints,
    baseline: Array | None = None,
    *,
    new_groups: bool,
    level: float = 0.95,
    seed: int = 0,
) -> GroupAgreement:
    """Estimate and test agreement within and between groups of clients.

    Parameters
    ----------
    blocks : callable () -> iterable of array (client, unit, weight)
        Returns the weights of all clients, in blocks of clients.
    group_sums : list of Sums
        Sums over the clients of each group, minus ``baseline``.
    groups : int array (client,)
        Number of each client's group: 0, 1, ...
    baseline : array (unit, weight), optional
        Baseline that is subtracted from every client's weights.
    new_groups : bool
        True if conclusions refer to further groups, of which these are a sample; False for further clients of these
        groups, each of which has at least 2 clients.
    level : float in (0, 1)
        Confidence level of the intervals.
    seed : int
        Seed of sign patterns.

    Notes
    -----
    Intervals are jackknife intervals on the scale of −log(1 − ICC): over whole groups for new groups, and over the
    clients of each group for these groups (Rao and Shao 1992, Biometrika 79, 811-822).

    Agreement within groups is tested by flipping the signs of clients, with products of clients of one group
    (:func:`fedstat.stats.icc_tests.sign_flips`). For new groups, agreement between groups is tested by flipping the
    signs of whole groups. For these groups, whose means are fixed, flips are no test; the test is the interval's t.
    """
    total = reduce(add, group_sums)
    xp, n_groups, k = array_namespace(total.units.profile), len(group_sums), len(groups)
    profiles = [rescaled(s.units, total.units.exponent).profile - total.units.profile for s in group_sums]
    t, contributions, rows = client_rows(blocks, total, baseline, xp.stack(profiles, axis=-1))
    of_clients, targets = _of_clients(t, contributions, groups, n_groups)
    of_groups = _of_groups(of_clients, groups)
    full = _quantities(_total(of_groups), targets)
    without = _without_groups(of_groups) if new_groups else _without_clients(of_groups, of_clients, groups)
    left_out = _quantities(without, targets)
    n_varies = contributions.varies.sum(axis=0)
    interval = partial(
        _interval,
        strata=None if new_groups else groups,
        most=n_groups - 1 if new_groups else k - n_groups,
        level=level,
        is_sparse=np.append((n_varies < min(k, LEAST_VARYING)) & (n_varies > 0), False),
    )
    members = _members(groups, n_groups)
    flips = sign_flips(rows(members), seed=seed, groups=groups[members.argmax(axis=1)])
    least = max(2.0 ** (n_groups - len(members)), 1 / (1 + flips.n_patterns))
    within = interval(full.within, left_out.within)._replace(**_tests(flips), least_p=least)
    between = interval(full.between, left_out.between)
    if new_groups:
        flips = sign_flips(rows(np.arange(n_groups)[:, None] == groups), seed=seed)
        between = between._replace(**_tests(flips), least_p=1 / (1 + flips.n_patterns))
    deviations = (of_clients.squares - 2 * of_clients.group + of_groups.norm[groups])[:, -1]
    deviations = np.where(deviations <= ZERO * (targets.profile + targets.n * targets.offset)[-1], 0, deviations)
    influence = Influence(deviations / deviations.sum() if deviations.any() else np.full(k, 1 / k), np.full(k, np.nan))
    by_group = _by_group(of_clients, targets, groups, n_groups, level)
    return GroupAgreement(within, between, full.variances, influence, by_group)


class _Targets(NamedTuple):
    """Weights of each unit, and of the layer as the last: arrays (unit + 1,)."""

    profile: Floats  # Σ_i p_i², with the sum of all units for the layer
    offset: Floats  # μ²
    n: Floats  # number of weights


class _Clients(NamedTuple):
    """Sums over the weights of each client: arrays (client, unit + 1); r_c = deviation from μ + p + d_c."""

    squares: Floats  # Σ_i r_ci²
    along: Floats  # Σ_i r_ci p_i
    group: Floats  # Σ_i r_ci r̄_gi of the client's group g
    all_groups: Floats  # Σ_i r_ci Σ_h r̄_hi
    mean: Floats  # d_c
    mean_squares: Floats  # d_c²


class _Groups(NamedTuple):
    """Means over the clients of each group, or their sum over groups: arrays (group, unit + 1)."""

    n: Floats  # number of clients, (group, 1)
    squares: Floats
    along: Floats
    norm: Floats  # Σ_i r̄_gi²
    cross: Floats  # Σ_i r̄_gi Σ_{h≠g} r̄_hi
    mean: Floats
    mean_squares: Floats


class _Sums(NamedTuple):
    """Sums over groups, or over the groups without a client or a group: arrays (..., unit + 1)."""

    n_groups: Any
    n_several: Any  # number of groups of several clients
    residual: Floats  # Σ_g of the variance within group g, of groups of several clients
    squares: Floats
    along: Floats
    cross: Floats
    spread: Floats  # Σ_g of the variance of d_c in group g
    mean: Floats
    mean_squared: Floats  # Σ_g of the squared mean of d_c


class _Quantities(NamedTuple):
    """One minus agreement within and between groups, (..., unit + 1); proportions of variance (4, ..., unit + 1)."""

    within: Floats
    between: Floats
    variances: Floats


def _of_clients(t: TwoWay, contributions: Contributions, groups: Ints, n_groups: int) -> tuple[_Clients, _Targets]:
    """Return the sums of units and of the layer, whose targets are the weights of all units.

    As in :mod:`fedstat.stats.icc_resampling`, a sum over the layer is the sum over units, plus n times the sum over the
    units' means.
    """
    (d, n), scale = t.profile.shape, moments.power(t.exponent - t.exponent.max())
    products = np.asarray(contributions.products)
    group_products = products[np.arange(len(groups)), :, groups]
    deviations, unit_means = scale * contributions.mean, scale * t.mean
    means = deviations.mean(axis=1)
    deviations, unit_means = deviations - means[:, None], unit_means - unit_means.mean()
    member = _averaging(groups, n_groups)
    group_deviations = member @ deviations
    of_units = (contributions.residuals, contributions.along, group_products, products.sum(axis=2))
    of_means = (
        np.vecdot(deviations, deviations),
        deviations @ unit_means,
        np.vecdot(deviations, group_deviations[groups]),
        deviations @ group_deviations.sum(axis=0),
    )
    squares, along, group, all_groups = (
        np.column_stack([x, x @ scale**2 + n * of_mean]) for x, of_mean in zip(of_units, of_means, strict=True)
    )
    offsets = np.column_stack([contributions.mean, means])
    profile = np.vecdot(t.profile, t.profile)
    targets = _Targets(
        np.append(profile, profile @ scale**2 + n * unit_means @ unit_means),
        np.append(t.mean, (scale * t.mean).mean()) ** 2,
        np.append(np.full(d, n), n * d),
    )
    return _Clients(squares, along, group, all_groups, offsets, offsets**2), targets


def _averaging(groups: Ints, n_groups: int) -> Floats:
    """Return the matrix (group, client) that averages clients of each group."""
    member = np.arange(n_groups)[:, None] == groups
    return np.asarray(member / member.sum(axis=1, keepdims=True))


def _of_groups(c: _Clients, groups: Ints) -> _Groups:
    n = np.bincount(groups)[:, None].astype(float)
    squares, along, norm, cross, mean, mean_squares = (_averaging(groups, len(n)) @ x for x in c)
    return _Groups(n, squares, along, norm, cross - norm, mean, mean_squares)


def _terms(g: _Groups) -> _Sums:
    """Return the term of each group in the sums over groups."""
    several = g.n > 1
    residual = np.where(several, g.n * (g.squares - g.norm) / np.maximum(g.n - 1, 1), 0)
    spread = np.maximum(g.mean_squares - g.mean**2, 0)
    return _Sums(
        np.ones_like(g.n), several.astype(float), residual, g.squares, g.along, g.cross, spread, g.mean, g.mean**2
    )


def _total(g: _Groups) -> _Sums:
    return _Sums(*(x.sum(axis=0) for x in _terms(g)))


def _without_groups(g: _Groups) -> _Sums:
    """Return the sums without each group, (group, unit + 1)."""
    terms, total = _terms(g), _total(g)
    rest = _Sums(*(all_groups - x for all_groups, x in zip(total, terms, strict=True)))
    return rest._replace(cross=rest.cross - terms.cross)  # both sides of its pairs


def _without_clients(g: _Groups, c: _Clients, groups: Ints) -> _Sums:
    """Return the sums without each client, (client, unit + 1).

    Without client c, group g has the mean r̄_g − (r_c − r̄_g)/(n_g − 1), and other means change likewise.
    """
    before = _Groups(*(x[groups] for x in g))
    n = before.n - 1
    squares, along, mean, mean_squares = (
        getattr(before, name) - (getattr(c, name) - getattr(before, name)) / n
        for name in ("squares", "along", "mean", "mean_squares")
    )
    shift = c.group - before.norm
    norm = before.norm - 2 * shift / n + (c.squares - 2 * c.group + before.norm) / n**2
    cross = before.cross - (c.all_groups - c.group - before.cross) / n
    changed = _Groups(n, squares, along, norm, cross, mean, mean_squares)
    total = _total(g)
    rest = _Sums(*(x - old + new for x, old, new in zip(total, _terms(before), _terms(changed), strict=True)))
    return rest._replace(cross=rest.cross + changed.cross - before.cross)  # both sides of its pairs


def _quantities(s: _Sums, t: _Targets) -> _Quantities:
    """Return agreement and variances by moments.

    Squared distances of clients of one group estimate the remainder, those of clients of two groups the remainder and
    the group's profile.
    """
    pairs = s.n_groups * (s.n_groups - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        remainder = s.residual / s.n_several / (t.n - 1)
        apart = (s.squares / s.n_groups - s.cross / pairs) / (t.n - 1)
        common = (t.profile + 2 * s.along / s.n_groups + s.cross / pairs) / (t.n - 1)
        between = (s.mean_squared - s.mean**2 / s.n_groups) / (s.n_groups - 1)
        offsets = s.spread / s.n_groups + between - apart / t.n
        rounding = ZERO * (t.profile / (t.n - 1) + s.squares / s.n_groups / (t.n - 1) + t.offset)
        remainder, apart, offsets = (np.where(np.abs(x) <= rounding, 0, x) for x in (remainder, apart, offsets))
        total = common + apart + offsets
        variances = np.stack([common, apart - remainder, offsets, remainder]) / total
        return _Quantities((remainder + offsets) / total, (apart + offsets) / total, variances)


def _interval(
    distance: Floats, without: Floats, *, strata: Ints | None, most: int, level: float, is_sparse: NDArray[np.bool_]
) -> Agreement:
    """Return agreement with jackknife intervals and t tests, from 1 − agreement, with and without each client."""
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, estimates_without = -np.log(distance), -np.log(without)
        std_error, df = jackknife(estimates_without, most, strata, None if strata is None else estimate)
        half = scipy.special.stdtrit(df, 0.5 + level / 2) * std_error
        statistic = estimate / std_error
        low, high = -np.expm1(half - estimate), -np.expm1(-half - estimate)
    is_equal = (distance == 0) & (without == 0).all(axis=0)
    low, high = (np.where(is_equal, 1.0, np.where(is_sparse, np.nan, bound)) for bound in (np.maximum(low, -1), high))
    p_value = np.where(is_sparse | (std_error < _ROUNDING), np.nan, scipy.special.stdtr(df, -statistic))
    return Agreement(1 - distance, low, high, statistic, p_value, 0.0)


def _tests(flips: AgreementTest) -> dict[str, Floats]:
    """Return statistics and p values of units and of the layer, the last."""
    return {
        "statistic": np.append(flips.statistic, flips.layer_statistic),
        "p_value": np.append(flips.p_value, flips.layer_p_value),
    }


def _members(groups: Ints, n_groups: int) -> NDArray[np.bool_]:
    """Return the clients (row, client) of each row of the test within groups: one, or some of one group if many."""
    k = len(groups)
    if k <= MOST_CLIENTS:
        return np.eye(k, dtype=bool)
    rows = []
    for group in range(n_groups):
        clients = np.flatnonzero(groups == group)
        n_rows = min(len(clients), max(2, MOST_CLIENTS * len(clients) // k))
        rows += [np.isin(np.arange(k), row) for row in np.array_split(clients, n_rows)]
    return np.array(rows)


def _by_group(c: _Clients, t: _Targets, groups: Ints, n_groups: int, level: float) -> Floats:
    """Return the layer's agreement within each group with its interval, (3, group)."""
    columns = np.full((3, n_groups), np.nan)
    layer, targets = _Clients(*(x[:, -1] for x in c)), _Targets(*(x[-1] for x in t))
    for group in range(n_groups):
        x = _Clients(*(values[groups == group] for values in layer))
        if (k := len(x.mean)) < 2:
            continue
        norm, along, mean = x.group.mean(), x.along.mean(), x.mean - x.mean.mean()
        residuals = np.maximum(x.squares - 2 * x.group + norm, 0)
        squares = targets.profile + 2 * along + norm
        n = int(targets.n)
        total = mean_squares_of(k * squares, n * (mean**2).sum(), residuals.sum(), targets.offset, np.zeros(()), k, n)
        along_group = x.along - along + x.group - norm
        without = None
        if k > 2:
            without = mean_squares_without(
                residuals, along_group, mean, squares, residuals.sum(), (mean**2).sum(), np.sqrt(targets.offset),
                np.zeros(()), k, n,
            )  # fmt: skip
        estimate = jackknife_coefficients(total, without, np.nan, np.nan, level)
        columns[:, group] = [x[TYPES.index("ICC2")] for x in (estimate.icc, estimate.conf_low, estimate.conf_high)]
    return columns
