"""Clients in groups: tests and intervals of groups, and of clients within groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

import fedstat
from simulations.inference import pools
from simulations.inference.pools import DOMAINS, Kind
from simulations.inference.table import Case, Claim
from simulations.inference.weights import KINDS, Noise, noise

Groups = Literal["these groups", "new groups"]
SIZES: dict[str, tuple[int, ...]] = {
    "2 groups of 5": (5, 5),
    "2 groups of 2 and 20": (2, 20),
    "3 groups of 2 to 6": (2, 4, 6),
    "5 groups of 4": (4,) * 5,
    "5 groups of 2 to 20": (2, 3, 5, 9, 20),
    "10 groups of 2": (2,) * 10,
    "10 groups of 1 to 16": (1, 1, 2, 3, 3, 4, 6, 8, 12, 16),
}
CLAIMED: dict[Groups, tuple[str, ...]] = {
    "these groups": tuple(name for name, sizes in SIZES.items() if min(sizes) > 1),
    "new groups": tuple(name for name, sizes in SIZES.items() if len(sizes) >= 5),
}
GROUPS, CLIENTS, NOISE = 0.5, 1.0, 0.5
"""Variances of groups and of clients; noise of the mean of two replicates."""


def codes_of(sizes: tuple[int, ...]) -> np.ndarray:
    """Number of each client's group."""
    return np.repeat(np.arange(len(sizes)), sizes)


def claim_of(sizes: tuple[int, ...]) -> Groups:
    """A claim that these groups allow."""
    return "these groups" if min(sizes) > 1 else "new groups"


def drawn(
    kind: Noise, sizes: tuple[int, ...], rng: np.random.Generator, *, of_groups: float, of_clients: float = CLIENTS
) -> tuple[np.ndarray, np.ndarray]:
    """Weights (client, replicate, unit, weight), and effects of groups (group, unit, weight)."""
    codes, effects = codes_of(sizes), "smooth" if kind == "smooth" else "white"
    groups = np.sqrt(of_groups) * noise(effects, len(sizes), rng)
    clients = np.sqrt(of_clients) * noise(effects, len(codes), rng)
    w = groups[codes] + clients + np.sqrt(2 * NOISE) * noise(kind, len(codes), rng, replicates=2)
    return w, groups[:, 0]


def tests(found: fedstat.results.ComponentsResult) -> list[np.ndarray]:
    """Whether tests of groups reject: units, any unit, layer."""
    table = found.tidy()
    return [
        np.asarray(table["groups_p_value"] <= 0.05),
        np.array([(table["groups_p_adjusted"] <= 0.05).any()]),
        np.asarray(found.layer["groups_p_value"] <= 0.05),
    ]


def no_groups(kind: Noise, sizes: tuple[int, ...], rng: np.random.Generator, *, of_groups: float = 0) -> Any:
    """Tests of groups, without differences between groups or with some."""
    w, _ = drawn(kind, sizes, rng, of_groups=of_groups)
    return tests(fedstat.variance_components(w, groups=codes_of(sizes), claim=claim_of(sizes)))


def unlike_variances(ratio: float, sizes: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Tests of groups without differences; the first group, the smallest, has the largest variance."""
    w, _ = drawn("smooth", sizes, rng, of_groups=0)
    spread = np.geomspace(ratio, 1, len(sizes)) ** 0.5
    w *= spread[codes_of(sizes)][:, None, None, None]
    return tests(fedstat.variance_components(w, groups=codes_of(sizes), claim=claim_of(sizes)))


def no_clients(kind: Noise, sizes: tuple[int, ...], claim: Groups, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether tests of clients within groups reject, where only groups differ: units, any unit, layer."""
    w, _ = drawn(kind, sizes, rng, of_groups=GROUPS, of_clients=0)
    found = fedstat.variance_components(w, groups=codes_of(sizes), claim=claim)
    units = np.where(np.isfinite(found.components.p_value), found.components.p_value <= 0.05, np.nan)
    return [units, np.array([(found.p_adjusted <= 0.05).any()]), np.asarray(found.layer["p_value"] <= 0.05)]


def variance_of(effects: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Variance (unit,) between these groups, as their sizes weight them."""
    n = np.array(sizes, float)
    mean = np.tensordot(n, effects, 1) / n.sum()
    squares = np.tensordot(n, np.square(effects - mean).mean(axis=-1), 1)
    return np.asarray(squares / (n.sum() - (n**2).sum() / n.sum()))


def covered(
    kind: Noise,
    sizes: tuple[int, ...],
    claim: Groups,
    method: Literal["moments", "reml"],
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Whether intervals cover: reliability of clients and proportion of groups, of units and of the layer."""
    w, effects = drawn(kind, sizes, rng, of_groups=GROUPS)
    found = fedstat.variance_components(w, groups=codes_of(sizes), claim=claim, method=method)
    between = variance_of(effects, sizes) if claim == "these groups" else np.full(w.shape[2], GROUPS)
    truth = Truth(np.full(w.shape[2], CLIENTS / (CLIENTS + NOISE)), between / (between + CLIENTS + NOISE))
    of_layer = between.mean() / (between.mean() + CLIENTS + NOISE)
    return _covers(found, truth, Truth(CLIENTS / (CLIENTS + NOISE), of_layer))


class Truth(NamedTuple):
    """Reliability of clients within groups, and proportion of groups."""

    reliability: Any
    proportion: Any


def _covers(found: fedstat.results.ComponentsResult, units: Truth, layer: Truth) -> list[np.ndarray]:
    hits = []
    for low, high, of in (("conf_low", "conf_high", 0), ("groups_low", "groups_high", 1)):
        for table, truth in ((found.tidy(), units[of]), (found.layer, layer[of])):
            known = np.isfinite(table[low]) & np.isfinite(truth)
            hits.append(np.where(known, (table[low] <= truth) & (truth <= table[high]), np.nan))
    return hits


class Trained(NamedTuple):
    """Two replicates of trained clients in groups, and what their components are.

    Attributes
    ----------
    weights : array (client, 2, unit, weight)
    units, layer : array (unit,), float
        Reliability among these clients, from their other replicates.
    of_units, of_layer : Truth
        Components of all clients of the pool in these groups, or in all groups.
    """

    weights: np.ndarray
    units: np.ndarray
    layer: float
    of_units: Truth
    of_layer: Truth


class Domains(NamedTuple):
    """Components of a pool of domains: means (domain, unit, weight); variances of a unit's weights, summed.

    ``clients`` and ``noise`` (domain, unit) are those of clients and of the mean of two replicates, ``groups`` (unit,)
    that of domains.
    """

    means: np.ndarray
    clients: np.ndarray
    noise: np.ndarray
    groups: np.ndarray


def trained(
    kind: Kind, steps: int, layer: int, sizes: tuple[int, ...], claim: Groups, rng: np.random.Generator
) -> Trained:
    """Draw domains, clients of each, and two of their replicates."""
    w = pools.replicates(kind, steps, layer)
    of_domain, n = _by_domain(w), np.array(sizes, float)
    drawn_domains = rng.choice(DOMAINS, len(sizes), replace=False)
    n_clients = of_domain.shape[1]  # in a small pool, as tests have, clients are drawn several times
    clients = [rng.choice(n_clients, k, replace=k > n_clients) for k in sizes]
    chosen = np.concatenate([of_domain[g, c] for g, c in zip(drawn_domains, clients, strict=True)])
    chosen = chosen[:, rng.permutation(w.shape[1])].astype(float)
    pool = _of_pool(kind, steps, layer)
    if claim == "new groups":
        parts = pool.groups, pool.clients.mean(axis=0), pool.noise.mean(axis=0)
    else:
        groups = variance_of(pool.means[drawn_domains], sizes) * w.shape[3]
        parts = groups, *((n - 1) @ x[drawn_domains] / (n - 1).sum() for x in (pool.clients, pool.noise))
    return Trained(
        chosen[:, :2], *_reliability(chosen[:, 2:], sizes), _truth(*parts), _truth(*(x.sum() for x in parts))
    )


def _truth(groups: Any, clients: Any, noise_of_mean: Any) -> Truth:
    with np.errstate(invalid="ignore"):
        return Truth(clients / (clients + noise_of_mean), groups / (groups + clients + noise_of_mean))


def _by_domain(w: np.ndarray) -> np.ndarray:
    """Clients by domain (domain, client, ...), which alternate in a pool."""
    return w.reshape(-1, DOMAINS, *w.shape[1:]).swapaxes(0, 1)


@cache
def _of_pool(kind: Kind, steps: int, layer: int) -> Domains:
    w = _by_domain(pools.replicates(kind, steps, layer).astype(float))
    spread = w.var(axis=2, ddof=1).mean(axis=1).sum(axis=-1)
    clients = w.mean(axis=2)
    of_means, means = clients.var(axis=1, ddof=1).sum(axis=-1), clients.mean(axis=1)
    groups = means.var(axis=0, ddof=1).sum(axis=-1) - of_means.mean(axis=0) / w.shape[1]
    return Domains(means, of_means - spread / w.shape[2], spread / 2, groups)


def _reliability(w: np.ndarray, sizes: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """Reliability (unit,) of differences of means over two replicates within groups, and that of the layer."""
    codes, n = codes_of(sizes), np.array(sizes, float)
    spread = (w.var(axis=1, ddof=1) * (1 - 1 / n[codes])[:, None, None]).sum(axis=(0, 2)) / (n - 1).sum()
    means = w.mean(axis=1)
    groups = np.stack([means[codes == g].mean(axis=0) for g in range(len(n))])
    clients = np.square(means - groups[codes]).sum(axis=(0, 2)) / (n - 1).sum() - spread / w.shape[1]
    with np.errstate(invalid="ignore"):
        return clients / (clients + spread / 2), float(clients.sum() / (clients.sum() + spread.sum() / 2))


def covered_trained(
    kind: Kind, steps: int, layer: int, sizes: tuple[int, ...], claim: Groups, rng: np.random.Generator
) -> list[np.ndarray]:
    """Whether intervals of trained networks cover: clients among these and in the pool, and groups in the pool."""
    x = trained(kind, steps, layer, sizes, claim, rng)
    found = fedstat.variance_components(x.weights, groups=codes_of(sizes), claim=claim)
    _, population, *of_groups = _covers(found, x.of_units, x.of_layer)
    these = Truth(x.units, np.nan), Truth(x.layer, np.nan)
    return [*_covers(found, *these)[:2], population, *of_groups]


def random_groups(kind: Kind, steps: int, layer: int, sizes: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Tests of groups that trained clients were dealt to at random."""
    w = pools.replicates(kind, steps, layer)
    chosen = w[rng.choice(len(w), sum(sizes), replace=False)][:, rng.permutation(w.shape[1])[:2]]
    return tests(fedstat.variance_components(chosen, groups=codes_of(sizes), claim=claim_of(sizes)))


def of_domains(kind: Kind, steps: int, layer: int, sizes: tuple[int, ...], rng: np.random.Generator) -> Any:
    """Tests of groups that are domains."""
    x = trained(kind, steps, layer, sizes, claim_of(sizes), rng)
    return tests(fedstat.variance_components(x.weights, groups=codes_of(sizes), claim=claim_of(sizes)))


def of_clusters(clients: int, rng: np.random.Generator) -> Any:
    """Tests of groups that are clusters of the same weights, which have no groups."""
    w, _ = drawn("white", (clients,), rng, of_groups=0)
    clusters = fedstat.client_clusters(w.mean(axis=1), n_clusters=2).cluster
    single = np.flatnonzero(np.bincount(clusters) == 1)
    if len(single):  # no claim about these groups
        return [np.nan] * 3
    return tests(fedstat.variance_components(w, groups=clusters, claim="these groups"))


def called(kind: Kind, steps: int, layer: int, sizes: tuple[int, ...], claim: Groups, rng: np.random.Generator) -> Any:
    """Units called the other by ``split``, of those called; layers with some; units called."""
    x = trained(kind, steps, layer, sizes, claim, rng)
    found = fedstat.split(x.weights, method="icc", tau="test", groups=codes_of(sizes), claim=claim).conclusion
    decided, truth = np.isin(found, ("shared", "personal")), x.units
    wrong = decided & np.where(found == "shared", truth > 0.5, truth < 0.5)
    return wrong.sum() / max(1, decided.sum()), float(wrong.any()), decided.mean()


def wrong_of_called(*where: Any) -> float:
    """The first rate of :func:`called`."""
    return float(called(*where)[0])


def rates_of_called(*where: Any) -> list[float]:
    """The other rates of :func:`called`."""
    return list(called(*where)[1:])


_SOURCES = ("fedstat.stats.nested.components", "fedstat.stats.nested._of_units", "fedstat.stats.icc.fdr")
_UNLIKE = "help of fedstat.variance_components names groups of unlike variance"
_NOISE = "a caution is given where training noise is unequal; docs/which-test.md names heavy tails"
_TESTED = ("units", "any unit at FDR .05", "layer")
_PLACES: tuple[tuple[Kind, int, int], ...] = (
    ("five classes, ten domains", 6, 1), ("five classes, ten domains", 60, 2), ("five classes, ten domains", 60, 3),
    ("ten domains", 60, 1),
)  # fmt: skip
_NULLS: tuple[tuple[Kind, int, int], ...] = (
    ("iid", 60, 1), ("two classes", 60, 2), ("five classes", 6, 1), ("random labels", 60, 3),
)  # fmt: skip


def _cases(
    hits: Callable[..., Any], replicates: int, parts: tuple[str, ...], names: tuple[str, ...]
) -> dict[str, Case]:
    return {
        f"{kind} weights, {name}": Case(
            partial(hits, kind, SIZES[name]), kind != "unlike clients", replicates, parts=parts,
            note=_NOISE if kind == "unlike clients" else "",
        )
        for kind in KINDS for name in names
    }  # fmt: skip


def _by_claim(
    hits: Callable[..., Any], parts: tuple[str, ...], places: tuple[tuple[Kind, int, int], ...]
) -> dict[str, Case]:
    return {
        f"{kind}, {steps} steps, layer {layer}, {name}, {claim}": Case(
            partial(hits, kind, steps, layer, SIZES[name], claim), replicates=200, parts=parts, trained=True
        )
        for kind, steps, layer in places
        for claim, names in CLAIMED.items()
        for name in names
        if len(SIZES[name]) < DOMAINS and (hits is covered_trained or len(SIZES[name]) > 2)
    }


CLAIMS = {
    "variance_components(groups=), tests of groups": Claim(
        "level",
        _SOURCES,
        ("ComponentsResult.groups_p_value", "ComponentsResult.groups_p_adjusted",
         "ComponentsResult.layer_groups_p_value"),
        _cases(no_groups, 200, _TESTED, tuple(SIZES))
        | {f"variances of groups 1 : {ratio}, {name}": Case(
            partial(unlike_variances, ratio, SIZES[name]), False, 200, _UNLIKE, _TESTED)
           for ratio in (2, 8) for name in SIZES}
        | {f"{kind}, {steps} steps, layer {layer}, {name}": Case(
            partial(random_groups, kind, steps, layer, SIZES[name]), replicates=200, parts=_TESTED, trained=True)
           for kind, steps, layer in _NULLS for name in SIZES},
    ),
    "variance_components(groups=), power of tests of groups": Claim(
        "rate",
        _SOURCES,
        ("ComponentsResult.groups_p_value", "ComponentsResult.groups_p_adjusted",
         "ComponentsResult.layer_groups_p_value"),
        {f"smooth weights, groups {of_groups} of clients, {name}": Case(
            partial(no_groups, "smooth", SIZES[name], of_groups=of_groups), replicates=200, parts=_TESTED)
         for of_groups in (0.1, 0.5) for name in SIZES}
        | {f"{kind}, {steps} steps, layer {layer}, {name}": Case(
            partial(of_domains, kind, steps, layer, SIZES[name]), replicates=100, parts=_TESTED, trained=True)
           for kind, steps, layer in _PLACES for name in SIZES},
    ),
    "variance_components(groups=), tests of groups that are clusters of the same weights": Claim(
        "rate",
        _SOURCES,
        ("ComponentsResult.groups_p_value",),
        {f"{n} clients": Case(partial(of_clusters, n), False, 200, "a caution says so", _TESTED) for n in (10, 20)},
    ),
    "variance_components(groups=), tests of clients within groups": Claim(
        "level",
        _SOURCES,
        ("ComponentsResult.p_value", "ComponentsResult.p_adjusted", "ComponentsResult.layer_p_value"),
        {f"{kind} weights, {name}, {claim}": Case(
            partial(no_clients, kind, SIZES[name], claim), kind != "unlike clients", 200,
            _NOISE if kind == "unlike clients" else "", _TESTED)
         for kind in ("smooth", "unlike clients") for claim, names in CLAIMED.items() for name in names},
    ),
    "variance_components(groups=), intervals": Claim(
        "coverage",
        _SOURCES,
        tuple(f"ComponentsResult.{of}_{end}" for of in ("conf", "layer", "groups", "layer_groups")
              for end in ("low", "high")),
        {f"{kind} weights, {name}, {claim}, {method}": Case(
            partial(covered, kind, SIZES[name], claim, method), kind in ("white", "smooth"), 200,
            "" if kind in ("white", "smooth") else _NOISE,
            ("clients, units", "clients, layer", "groups, units", "groups, layer"))
         for kind in KINDS for claim, names in CLAIMED.items() for name in names
         for method in ("moments", "reml")[: 2 if kind == "smooth" else 1]}
        | _by_claim(
            covered_trained,
            ("clients, units", "clients, layer", "clients, layer, further clients", "groups, units", "groups, layer"),
            _PLACES,
        ),
    ),
    'split(tau="test", groups=), units called the other, of those called': Claim(
        "level",
        ("fedstat.stats.nested.components", "fedstat.stats.variance_components.classify_units"),
        ("SplitResult.conclusion",),
        _by_claim(wrong_of_called, ("",), _PLACES),
    ),
    'split(tau="test", groups=), layers with some unit called the other; units decided': Claim(
        "rate",
        ("fedstat.stats.nested.components", "fedstat.stats.variance_components.classify_units"),
        ("SplitResult.conclusion",),
        _by_claim(rates_of_called, ("some unit called the other", "units decided"), _PLACES),
    ),
}  # fmt: skip
