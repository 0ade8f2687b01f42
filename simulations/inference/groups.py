"""Agreement within and between groups of clients: tests and intervals of ``fedstat.icc(weights, groups=...)``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import fedstat
from fedstat.results import GroupIccResult
from simulations.inference.jackknife import LOADINGS, communality, two_factors
from simulations.inference.layers import NULLS
from simulations.inference.pools import Kind, pool
from simulations.inference.table import Case, Claim
from simulations.inference.weights import UNITS, WEIGHTS, Noise, noise, smooth

Sizes = tuple[int, ...]
"""Number of clients of each group."""


class Layer(NamedTuple):
    """Clients of groups, and what agreement within and between groups is, of the units and of the layer, the last.

    Attributes
    ----------
    weights : array (client, unit, weight)
    groups : int array (client,)
    within, between : array (unit + 1,)
    """

    weights: np.ndarray
    groups: np.ndarray
    within: np.ndarray
    between: np.ndarray


Draw = Callable[[np.random.Generator], Layer]
LAYERS: dict[str, Sizes] = {
    "2 groups of 2": (2, 2), "2 groups of 5": (5, 5), "3 groups of 3": (3,) * 3, "3 groups of 3, 5, 12": (3, 5, 12),
    "2 groups of 20": (20, 20), "6 groups of 2": (2,) * 6, "5 groups of 2 to 10": (2, 4, 6, 8, 10),
    "10 groups of 5": (5,) * 10,
}  # fmt: skip


def of(sizes: Sizes) -> np.ndarray:
    """Group of each client."""
    return np.repeat(np.arange(len(sizes)), sizes)


@cache
def _noise_factors(kind: Noise) -> tuple[np.ndarray, np.ndarray]:
    """Variance within a unit about its mean, and variance of the mean, of weights of variance 1; units and layer."""
    unit = smooth(np.eye(WEIGHTS)) if kind == "smooth" else np.eye(WEIGHTS)
    covariance = unit.T @ unit
    of_mean = covariance.mean()
    about = np.array([1 - of_mean, 1 - of_mean / UNITS]) * np.array([WEIGHTS, WEIGHTS * UNITS])
    n = np.array([WEIGHTS, WEIGHTS * UNITS])
    variance, means = about / (n - 1), np.array([of_mean, of_mean / UNITS])
    return np.append(np.full(UNITS, variance[0]), variance[1]), np.append(np.full(UNITS, means[0]), means[1])


def synthetic(
    kind: Noise, sizes: Sizes, common: float, group: float, claim: str, rng: np.random.Generator, *, apart: bool = False
) -> Layer:
    """Profiles of variance ``common`` and, of each group, ``group``, and noise of the rest.

    ``apart`` makes the profiles of these groups orthogonal on every unit, so that they do not agree.
    """
    draw = (
        (lambda shape: smooth(rng.normal(size=shape))) if kind == "smooth" else (lambda shape: rng.normal(size=shape))
    )
    shared = np.sqrt(common) * draw((1, UNITS, WEIGHTS))
    profiles = shared + np.sqrt(group) * draw((len(sizes), UNITS, WEIGHTS))
    if apart:
        profiles = orthogonal(profiles)
    groups = of(sizes)
    w = profiles[groups] + np.sqrt(1 - common - group) * noise(kind, len(groups), rng)[:, 0]
    rest = 1 - common - group
    if claim == "these groups":
        return Layer(w, groups, *_agreement(kind, _targets(profiles), rest))
    return Layer(w, groups, *_agreement(kind, _targets(shared), rest, group))


def _targets(profiles: np.ndarray) -> list[np.ndarray]:
    """Profiles (group, weight) of the units and of the layer."""
    return [*profiles.swapaxes(0, 1), profiles.reshape(len(profiles), -1)]


def _agreement(
    kind: Noise, targets: list[np.ndarray], rest: float, group: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Agreement within and between groups with these profiles; of new groups, ``group`` is their own variance."""
    about, of_mean = _noise_factors(kind)
    within, between = [], []
    for x, a, m in zip(targets, about, of_mean, strict=True):
        n, k, centered = x.shape[1], len(x), x - x.mean(axis=1, keepdims=True)
        products = centered @ centered.T / (n - 1)
        own = np.trace(products) / k + group * a
        common = (products.sum() - np.trace(products)) / (k * (k - 1)) if k > 1 else products[0, 0]
        offsets = (x.mean(axis=1).var(ddof=1) if k > 1 else 0) + (rest + group) * m - (own + rest * a - common) / n
        total = own + rest * a + offsets
        within.append(own / total)
        between.append(common / total)
    return np.array(within), np.array(between)


def orthogonal(profiles: np.ndarray) -> np.ndarray:
    """Centered profiles (group, unit, weight) of each unit that are orthogonal; 0 if a group has none."""
    x = (profiles - profiles.mean(axis=2, keepdims=True)).swapaxes(0, 1)
    left, sizes, right = np.linalg.svd(x, full_matrices=False)
    scale = np.where(sizes[:, -1] > 1e-6 * sizes[:, 0], sizes.mean(axis=1), 0)
    return np.asarray((scale[:, None, None] * (left @ right)).swapaxes(0, 1))


class Pool(NamedTuple):
    """Changes of a pool of trained clients in groups, and their agreement as in :class:`Layer`."""

    changes: np.ndarray
    groups: np.ndarray
    within: np.ndarray
    between: np.ndarray


@cache
def trained(kind: Kind, layer: int) -> Pool:
    """Changes over 60 steps from common initial parameters."""
    found = pool(kind, 60, layer)
    w = (found.weights - found.initial).astype(float)
    result = fedstat.icc(w, groups=found.group, claim="these groups").agreement
    return Pool(w, found.group, result.within.icc, result.between.icc)


def domains(kind: Kind, layer: int, sizes: Sizes, rng: np.random.Generator) -> Layer:
    """Clients of some groups of a pool, whose agreement is that of the pool."""
    whole = trained(kind, layer)
    chosen = rng.choice(whole.groups.max() + 1, len(sizes), replace=False)
    clients = [
        rng.choice(np.flatnonzero(whole.groups == g), n, replace=False) for g, n in zip(chosen, sizes, strict=True)
    ]
    return Layer(whole.changes[np.concatenate(clients)], of(sizes), whole.within, whole.between)


def domains_apart(kind: Kind, layer: int, sizes: Sizes, rng: np.random.Generator) -> Layer:
    """Trained clients about means of groups that are orthogonal on every unit: these groups do not agree."""
    whole = trained(kind, layer)
    means = np.stack([whole.changes[whole.groups == g].mean(axis=0) for g in range(whole.groups.max() + 1)])
    drawn, chosen = domains(kind, layer, sizes, rng), np.arange(len(sizes))
    clients = [
        rng.choice(np.flatnonzero(whole.groups == g), n, replace=False) for g, n in zip(chosen, sizes, strict=True)
    ]
    deviations = whole.changes[np.concatenate(clients)] - means[of(sizes)]
    return drawn._replace(weights=deviations + orthogonal(means[: len(sizes)])[of(sizes)])


def signed_groups(kind: Kind, layer: int, sizes: Sizes, rng: np.random.Generator) -> Layer:
    """Trained clients that agree, with signs of whole groups at random: groups do not agree."""
    whole, groups = trained(kind, layer), of(sizes)
    chosen = rng.choice(len(whole.changes), len(groups), replace=False)
    w = whole.changes[chosen] * rng.choice([-1, 1], size=len(sizes))[groups][:, None, None]
    return Layer(w, groups, whole.within, whole.between)


def null(name: str, sizes: Sizes, rng: np.random.Generator) -> Layer:
    """Clients that agree on no unit, neither within groups nor between them."""
    w, nothing = NULLS[name].draw(sum(sizes), rng), np.zeros(UNITS + 1)
    return Layer(w, of(sizes), nothing, nothing)


def estimated(draw: Draw, claim: str, rng: np.random.Generator) -> tuple[GroupIccResult, Layer]:
    """The result of a draw."""
    layer = draw(rng)
    return fedstat.icc(layer.weights, groups=layer.groups, claim=claim), layer


def covered(draw: Draw, claim: str, rng: np.random.Generator) -> list[Any]:
    """Whether intervals cover: units and layer within groups, and between them; nothing is claimed with a caution."""
    result, layer = estimated(draw, claim, rng)
    parts = []
    for agreement, truth in ((result.agreement.within, layer.within), (result.agreement.between, layer.between)):
        low, high = agreement.conf_low, agreement.conf_high
        covers = np.where(np.isnan(low), np.nan, (low <= truth) & (truth <= high))
        covers = np.where(any(x.title == "Clients of unlike size" for x in result.cautions()), np.nan, covers)
        parts += [covers[:-1], covers[-1]]
    return parts


def rejected(draw: Draw, claim: str, rng: np.random.Generator, *, within: bool = True) -> list[Any]:
    """Rejections within groups, if these are null, and between them: units, any unit at FDR .05, the layer."""
    result, _ = estimated(draw, claim, rng)
    parts: list[Any] = []
    for i, agreement in enumerate((result.agreement.within, result.agreement.between)):
        p, layer, adjusted = agreement.p_value[:-1], agreement.p_value[-1], result.p_adjusted[:, i]
        is_null, is_tested = within or i, np.isfinite(p)
        parts += [
            p[is_tested] <= 0.05 if is_null and is_tested.any() else np.nan,
            (adjusted[is_tested] <= 0.05).any() if is_null and is_tested.any() else np.nan,
            layer <= 0.05 if is_null and np.isfinite(layer) else np.nan,
        ]
    return parts


_SIZES = "a caution is given where clients of unlike size are seen"
_TAILS = "help of fedstat.icc names weights with long tails"
_CLAIMS = ("these groups", "new groups")
_COVERED = ("units within", "layer within", "units between", "layer between")
_REJECTED = tuple(
    f"{what} {where}" for where in ("within", "between") for what in ("units", "any unit at FDR .05,", "layer")
)


def _claims_of(sizes: Sizes) -> tuple[str, ...]:
    return _CLAIMS if len(sizes) > 4 else _CLAIMS[:1]


def _coverage() -> dict[str, Case]:
    cases = {
        f"{kind} weights, {common} common, {group} of groups, {name}, {claim}": Case(
            partial(covered, partial(synthetic, kind, sizes, common, group, claim), claim), kind != "t3", 200,
            _TAILS * (kind == "t3"), _COVERED,
        )
        for kind in ("white", "smooth", "t3")
        for common, group in ((0.0, 0.6), (0.3, 0.3))
        for name, sizes in LAYERS.items()
        for claim in _claims_of(sizes)
    }  # fmt: skip
    of_pools: tuple[tuple[Kind, Sizes], ...] = (
        ("two domains", (3, 3)),
        ("two domains", (6, 14)),
        ("four domains", (3,) * 4),
        ("four rotations", (2, 4, 6, 8)),
    )
    for kind, sizes in of_pools:
        for layer in (1, 2, 3):
            name = f"changes, {kind}, layer {layer}, groups of {', '.join(map(str, sizes))}, these groups"
            cases[name] = Case(
                partial(covered, partial(domains, kind, layer, sizes), "these groups"), True, 200, "", _COVERED, True
            )
    for sizes in ((3,) * 6, (2, 3, 4, 5, 6, 7, 8, 9)):
        for layer in (1, 2, 3):
            name = (
                f"changes, ten domains, layer {layer}, {len(sizes)} groups of {min(sizes)} to {max(sizes)}, new groups"
            )
            cases[name] = Case(
                partial(covered, partial(domains, "ten domains", layer, sizes), "new groups"),
                True,
                200,
                "",
                _COVERED,
                True,
            )
    return cases


_NULLS = (
    "smooth weights", "t3 weights", "unlike clients weights", "units and clients of unlike sizes",
    "iid, 60 steps, layer 1, signs at random", "two classes, 60 steps, layer 2, signs at random",
    "own starts, 60 steps, layer 2",
)  # fmt: skip


def _level() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in ("2 groups of 5", "3 groups of 3", "2 groups of 20", "6 groups of 2", "5 groups of 2 to 10"):
        sizes = LAYERS[name]
        for claim in _claims_of(sizes):
            for one in _NULLS:
                if sum(sizes) <= NULLS[one].most:
                    cases[f"{one}, {name}, {claim}"] = Case(
                        partial(rejected, partial(null, one, sizes), claim),
                        True,
                        200,
                        "",
                        _REJECTED,
                        NULLS[one].trained,
                    )
            for kind in ("white", "smooth"):
                apart = claim == "these groups"
                draw = partial(synthetic, kind, sizes, 0.0, 0.6, claim, apart=apart)
                cases[f"{kind} weights that agree within groups, {name}, {claim}"] = Case(
                    partial(rejected, draw, claim, within=False), True, 200, "", _REJECTED
                )
    for layer in (1, 2, 3):
        for kind, sizes in (("two domains", (3, 3)), ("two domains", (6, 14)), ("four domains", (3,) * 4)):
            draw = partial(domains_apart, kind, layer, sizes)
            cases[f"changes, {kind} apart, layer {layer}, groups of {', '.join(map(str, sizes))}, these groups"] = Case(
                partial(rejected, draw, "these groups", within=False), True, 200, "", _REJECTED, True
            )
        for sizes in ((3,) * 6, (2, 3, 4, 5, 6, 7, 8, 9)):
            draw = partial(signed_groups, "two domains", layer, sizes)
            cases[f"changes, signs of {len(sizes)} groups at random, layer {layer}, new groups"] = Case(
                partial(rejected, draw, "new groups", within=False), True, 200, "", _REJECTED, True
            )
    return cases


def power(kind: Noise, sizes: Sizes, claim: str, rng: np.random.Generator) -> list[Any]:
    """Whether units and the layer, .2 of whose variance is common and .2 of groups, are found to agree."""
    result, _ = estimated(partial(synthetic, kind, sizes, 0.2, 0.2, claim), claim, rng)
    layers = (result.agreement.within.p_value[-1], result.agreement.between.p_value[-1])
    parts = [(result.p_adjusted[:, i] <= 0.05, layers[i] <= 0.05) for i in range(2)]
    return [x for part in parts for x in part]


FITTED = {"10 groups of 4": (4,) * 10, "3 groups of 6": (6,) * 3, "4 groups of 3 to 9": (3, 5, 7, 9)}
_FIT: dict[str, Any] = {"method": "pc", "n_factors": 2}
_TYPES = LOADINGS + 0.6 * np.random.default_rng(11).normal(size=(4, *LOADINGS.shape))


def factors(sizes: Sizes, claim: str, rng: np.random.Generator) -> np.ndarray:
    """Clients of groups with loadings of their own: new ones in each draw, or those of these groups."""
    loadings = LOADINGS + 0.6 * rng.normal(size=(len(sizes), *LOADINGS.shape))
    return two_factors(sum(sizes), rng, (loadings if claim == "new groups" else _TYPES)[of(sizes)])


@cache
def expected(sizes: Sizes, claim: str) -> np.ndarray:
    """Mean communality (unit,) over 2,000 samples of such groups."""
    rng = np.random.default_rng(12)
    return np.mean([communality(factors(sizes, claim, rng), _FIT) for _ in range(2000)], axis=0)


def bootstrapped(sizes: Sizes, claim: str, rng: np.random.Generator) -> np.ndarray:
    """Whether bootstrap intervals of communalities cover."""
    w = factors(sizes, claim, rng)
    options: dict[str, Any] = {"groups": of(sizes), "claim": claim, "seed": int(rng.integers(2**31)), **_FIT}
    found = fedstat.bootstrap(w, **options).tidy()
    nu = expected(sizes, claim)
    return np.asarray((found["conf_low"] <= nu) & (nu <= found["conf_high"]))


_RESULT = "GroupIccResult"
_SOURCES = (
    "fedstat.stats.group_icc.over_groups",
    "fedstat.stats.group_icc._quantities",
    "fedstat.stats.group_icc._interval",
)
CLAIMS = {
    "icc with groups, intervals": Claim(
        "coverage", _SOURCES,
        tuple(f"{_RESULT}.{of}_{end}" for of in ("conf", "within", "between") for end in ("low", "high")),
        _coverage(),
    ),
    "icc with groups, tests of no agreement": Claim(
        "level", ("fedstat.stats.icc_tests.sign_flips", *_SOURCES),
        tuple(f"{_RESULT}.{name}" for name in ("p_value", "p_adjusted", "within_p_value", "between_p_value")),
        _level(),
    ),
    "bootstrap with groups, ν of samples of this size": Claim(
        "coverage", ("fedstat.stats.resampling.bootstrap", "fedstat.stats.resampling.expanded_percentiles"),
        ("BootstrapResult.conf_low", "BootstrapResult.conf_high"),
        {
            f"two factors, {name}, {claim}": Case(partial(bootstrapped, sizes, claim), replicates=300)
            for name, sizes in FITTED.items()
            for claim in (_CLAIMS[1:] if len(sizes) > 4 else _CLAIMS[:1])
        },
    ),
    "icc with groups, power": Claim(
        "rate", ("fedstat.stats.icc_tests.sign_flips", *_SOURCES), (f"{_RESULT}.conclusion",),
        {
            f"{kind} weights, {name}, {claim}": Case(
                partial(power, kind, sizes, claim), replicates=100, parts=_COVERED
            )
            for kind in ("white", "smooth")
            for name, sizes in LAYERS.items()
            for claim in _claims_of(sizes)
        },
    ),
}  # fmt: skip
