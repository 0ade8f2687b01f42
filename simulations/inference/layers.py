"""Layers with known truth: clients that agree on no unit, and populations of clients whose agreement is known."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

import fedstat
from simulations.inference.pools import Kind, Optimizer, pool
from simulations.inference.weights import UNITS, WEIGHTS, Noise, noise, smooth

Draw = Callable[[int, np.random.Generator], np.ndarray]
"""From a number of clients to weights (client, unit, weight)."""


class Null(NamedTuple):
    """Layers of which clients agree on no unit beyond the profile that all units have in common.

    Deviations of clients from this profile have mean 0.

    Attributes
    ----------
    draw : callable (clients, Generator) -> array (client, unit, weight)
    profile : bool
        True if units have a profile in common.
    trained : bool
    alike : bool
        True if all units have the same covariance but for their size.
    most : int
        Clients of a layer, at most: a pool has few different ones.
    symmetric : bool
        True if deviations of clients are symmetric about 0.
    """

    draw: Draw
    profile: bool = False
    trained: bool = False
    alike: bool = False
    most: int = 100
    symmetric: bool = True


def unlike_sizes(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Smooth weights; standard deviations of clients and of units are log-normal (σ = .7)."""
    w = noise("smooth", clients, rng)[:, 0] * np.exp(0.7 * rng.normal(size=(clients, 1, 1)))
    return w * np.exp(0.7 * rng.normal(size=(UNITS, 1)))


def common_profile(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Smooth weights; half of their variance is a profile that all units of all clients have."""
    return noise("smooth", clients, rng)[:, 0] + smooth(rng.normal(size=(1, WEIGHTS)))


def half_smooth(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Half of the units smooth, half of them white."""
    w = noise("smooth", clients, rng)[:, 0]
    w[:, ::2] = noise("white", clients, rng)[:, 0, ::2]
    return w


def unlike_ranks(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Units whose weights vary in 1, 3, 30 or 64 directions."""
    rank = np.resize([1, 3, 30, 64], UNITS)
    return np.stack([rng.normal(size=(clients, r)) @ rng.normal(size=(r, WEIGHTS)) / np.sqrt(r) for r in rank], axis=1)


def pruned(clients: int, rng: np.random.Generator) -> np.ndarray:
    """White weights of which all clients keep the same tenth."""
    return noise("white", clients, rng)[:, 0] * (rng.random((UNITS, WEIGHTS)) < 0.1)


def signed_changes(kind: Kind, steps: int, layer: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deviations of trained clients from the mean of their pool, with signs at random."""
    w = _deviations(kind, steps, layer)
    return w[rng.choice(len(w), clients, replace=False)] * rng.choice([-1, 1], size=(clients, 1, 1))


def less_mean(kind: Kind, layer: int, optimizer: Optimizer, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Deviations of trained clients from the mean of their pool after 60 steps, as they are."""
    w = _deviations(kind, 60, layer, optimizer)
    return w[rng.choice(len(w), clients, replace=False)]


def majority(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Units on which four in five clients deviate by .5 in one direction, the others by 2 in the opposite one."""
    direction, size = rng.normal(size=(16, 50)), np.where(rng.random((clients, 16)) < 0.8, 0.5, -2.0)
    return size[..., None] * direction + 0.5 * rng.normal(size=(clients, 16, 50))


@cache
def _deviations(kind: Kind, steps: int, layer: int, optimizer: Optimizer = "SGD") -> np.ndarray:
    w = pool(kind, steps, layer, optimizer).weights
    return w - w.mean(axis=0)


def own_starts(layer: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Clients trained from initial parameters of their own."""
    w = pool("own starts", 60, layer).weights
    return w[rng.choice(len(w), clients, replace=False)]


def permuted(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Clients of a common start that name their units in any order."""
    w = pool("iid", 60, 1).weights
    return rng.permuted(w[rng.choice(len(w), clients, replace=False)].swapaxes(0, 1), axis=0).swapaxes(0, 1)


_SIGNED: tuple[tuple[Kind, int, int], ...] = (
    ("iid", 60, 1), ("iid", 1, 2), ("five classes", 6, 2), ("two classes", 6, 1), ("two classes", 60, 2),
    ("two classes", 60, 3), ("random labels", 60, 2),
)  # fmt: skip
NULLS: dict[str, Null] = {
    f"{kind} weights": Null(lambda clients, rng, kind=kind: noise(kind, clients, rng)[:, 0], alike=True)
    for kind in ("white", "smooth", "t3", "unlike clients")
} | {
    "units and clients of unlike sizes": Null(unlike_sizes, alike=True),
    "a common profile": Null(common_profile, profile=True, alike=True),
    "half smooth, half white": Null(half_smooth),
    "units of unlike ranks": Null(unlike_ranks),
    "pruned to a tenth": Null(pruned),
    **{
        f"{kind}, {steps} steps, layer {layer}, signs at random": Null(
            partial(signed_changes, kind, steps, layer), trained=True
        )
        for kind, steps, layer in _SIGNED
    },
    "own starts, 60 steps, layer 1": Null(partial(own_starts, 1), profile=True, trained=True, most=30),
    "own starts, 60 steps, layer 2": Null(partial(own_starts, 2), trained=True, most=30),
    "units permuted, 60 steps, layer 1": Null(permuted, profile=True, trained=True, alike=True, most=30),
}
ASYMMETRIC: dict[str, Null] = {
    "four in five clients one way": Null(majority, most=30, symmetric=False),
    **{
        f"{kind}, {optimizer}, {'output layer' if layer == 3 else f'layer {layer}'}, less the mean": Null(
            partial(less_mean, kind, layer, optimizer), trained=True, most=30, symmetric=False
        )
        for kind in ("one class", "two classes")
        for optimizer in ("SGD", "Adam")
        for layer in (1, 2, 3)
    },
}


class Sample(NamedTuple):
    """Clients of a population, and what ICC2 is in it.

    Attributes
    ----------
    weights : array (client, unit, weight)
    units : array (unit,)
        NaN for a unit that does not vary.
    layer : float
    sound : bool
        True if the clients are independent and vary alike, as far as can be seen from them.
    """

    weights: np.ndarray
    units: np.ndarray
    layer: float
    sound: bool = True


class Population(NamedTuple):
    """Clients to draw.

    Attributes
    ----------
    draw : callable (clients, Generator) -> Sample
    trained : bool
    sound : tuple of bool
        Kinds of samples that it has, as :attr:`Sample.sound`.
    clients : tuple of int
        Numbers of clients to draw.
    """

    draw: Callable[[int, np.random.Generator], Sample]
    trained: bool = False
    sound: tuple[bool, ...] = (True,)
    clients: tuple[int, ...] = (3, 5, 10, 30)


def agreeing(kind: Noise, share: float, clients: int, rng: np.random.Generator) -> Sample:
    """Clients with a profile of variance ``share`` and noise of the rest; unlike clients are not sound."""
    profile = np.sqrt(share) * noise("smooth" if kind == "smooth" else "white", 1, rng)[0, 0]
    w = profile + np.sqrt(1 - share) * noise(kind, clients, rng)[:, 0]
    units, whole = profile.var(axis=1, ddof=1), profile.var(ddof=1)
    return Sample(w, units / (units + 1 - share), whole / (whole + 1 - share), kind != "unlike clients")


def changes(kind: Kind, steps: int, layer: int, sizes: str, clients: int, rng: np.random.Generator) -> Sample:
    """Changes from a common start, of clients of sizes "alike", "log-normal .7" or "one in ten 10 times".

    Without one of the tenth that changed more, clients are a sample of the others, and sound.
    """
    found = _of_sizes(kind, steps, layer, sizes)
    chosen = rng.choice(len(found.weights), clients, replace=False)
    w, large = found.weights[chosen], sizes == "one in ten 10 times" and (chosen % 10 == 0).any()
    if sizes == "one in ten 10 times" and not large:
        found = _of_sizes(kind, steps, layer, "alike")
    return Sample(w, found.units, found.layer, sizes == "alike" or (sizes == "one in ten 10 times" and not large))


@cache
def _of_sizes(kind: Kind, steps: int, layer: int, sizes: str) -> Sample:
    """All clients of a pool, and their agreement."""
    found = pool(kind, steps, layer)
    n = np.arange(len(found.weights))
    by = {"log-normal .7": np.exp(0.7 * np.random.default_rng(0).normal(size=len(n))),
          "one in ten 10 times": np.where(n % 10, 1.0, 10.0)}.get(sizes, np.ones(len(n)))  # fmt: skip
    return _whole((found.weights - found.initial) * by[:, None, None])


class Groups(NamedTuple):
    """Trained clients that are a mixture of groups.

    Attributes
    ----------
    kind, steps, layer, optimizer
        Of the pool.
    changes : bool
        True for changes from the start, False for weights.
    equal : bool
        True if groups are drawn in equal numbers, False if clients are drawn from the mixture.
    """

    kind: Kind
    steps: int = 60
    layer: int = 1
    optimizer: Optimizer = "SGD"
    changes: bool = True
    equal: bool = False


def of_groups(groups: Groups, clients: int, rng: np.random.Generator) -> Sample:
    """Clients of a mixture of groups, of which the agreement is that of the mixture; clients of one group are sound."""
    group = pool(groups.kind, groups.steps, groups.layer, groups.optimizer).group
    chosen = rng.choice(len(group), clients, replace=False)
    if groups.equal:
        n = np.bincount(np.arange(clients) % (group.max() + 1))
        chosen = np.concatenate([rng.choice(np.flatnonzero(group == g), k, replace=False) for g, k in enumerate(n)])
    at = np.unique(group[chosen])
    whole = _mixture(groups._replace(equal=False), int(at[0]) if len(at) == 1 else None)
    return Sample(_mixture(groups._replace(equal=False), None).weights[chosen], whole.units, whole.layer, len(at) == 1)


@cache
def _mixture(groups: Groups, only: int | None) -> Sample:
    """All clients of a pool, or of one of its groups."""
    found = pool(groups.kind, groups.steps, groups.layer, groups.optimizer)
    w = found.weights - found.initial if groups.changes else found.weights
    return _whole(w if only is None else w[found.group == only])


def simulated_groups(n: int, similarity: float, equal: bool, clients: int, rng: np.random.Generator) -> Sample:
    """White weights of clients of groups with independent means and a similarity within, as :func:`of_groups`."""
    of = np.arange(clients) % n if equal else rng.integers(n, size=clients)
    means = np.sqrt(similarity) * rng.normal(size=(n, UNITS, WEIGHTS))
    w = means[of] + np.sqrt(1 - similarity) * rng.normal(size=(clients, UNITS, WEIGHTS))
    means = means if (several := len(np.unique(of)) > 1) else means[of[:1]]
    profile, between = means.mean(axis=0), means.var(axis=0).mean(axis=-1)
    units, layer = profile.var(axis=1, ddof=1), profile.var(ddof=1)
    others = between + 1 - similarity
    return Sample(w, units / (units + others), layer / (layer + others.mean()), not several)


def _whole(w: np.ndarray) -> Sample:
    found = fedstat.icc(w, inference="F")
    return Sample(w, found.agreement, float(found.layer_coefficients.icc[1]))


_EQUALLY = ", equally many of each"
POPULATIONS: dict[str, Population] = {
    f"{kind} weights, ICC2 {share}": Population(partial(agreeing, kind, share), sound=(kind != "unlike clients",))
    for kind in ("white", "smooth", "t3", "unlike clients")
    for share in (0.0, 0.3, 0.9)
} | {
    f"changes, {kind}, {steps} steps, layer {layer}": Population(partial(changes, kind, steps, layer, "alike"), True)
    for kind, steps, layer in (
        ("iid", 1, 1), ("iid", 60, 1), ("iid", 60, 2), ("five classes", 60, 1), ("two classes", 1, 1),
        ("two classes", 6, 1), ("two classes", 60, 1), ("two classes", 60, 2), ("random labels", 60, 1),
    )
} | {
    "changes, iid, 60 steps, layer 1, sizes log-normal .7": Population(
        partial(changes, "iid", 60, 1, "log-normal .7"), True, (False,)
    ),
    "changes, iid, 60 steps, layer 1, sizes one in ten 10 times": Population(
        partial(changes, "iid", 60, 1, "one in ten 10 times"), True, (True, False)
    ),
    "weights, common start, 60 steps, layer 1": Population(partial(of_groups, Groups("iid", changes=False)), True),
    "weights, two starts, 60 steps, layer 1": Population(
        partial(of_groups, Groups("two starts", changes=False)), True, (True, False)
    ),
} | {
    f"changes, {kind}, {optimizer}, {steps} steps, layer {layer}": Population(
        partial(of_groups, Groups(kind, steps, layer, optimizer)), True
    )
    for kind, steps, layer, optimizer in (
        ("Dirichlet .1", 6, 2, "SGD"), ("Dirichlet .1", 60, 1, "SGD"), ("Dirichlet .1", 60, 2, "Adam"),
        ("two classes", 60, 2, "Adam"), ("two classes", 60, 3, "Adam"),
    )
} | {
    f"{n} groups of similarity {similarity}{_EQUALLY * equal}": Population(
        partial(simulated_groups, n, similarity, equal), sound=(False,) if equal else (True, False), clients=(6, 10, 30)
    )
    for n, similarity, equal in ((2, 0.67, False), (2, 0.67, True), (2, 0.33, True), (4, 0.67, True))
} | {
    f"{'changes' if groups.changes else 'weights'}, {groups.kind}, {groups.optimizer}, 60 steps, layer {groups.layer}"
    f"{_EQUALLY * groups.equal}": Population(
        partial(of_groups, groups), True, (False,) if groups.equal else (True, False), (6, 10, 30)
    )
    for groups in (
        Groups("two domains"), Groups("two domains", equal=True), Groups("two domains", optimizer="Adam", equal=True),
        Groups("four domains", optimizer="Adam"), Groups("two rotations", optimizer="Adam", equal=True),
        Groups("four rotations", optimizer="Adam"), Groups("two starts", changes=False, equal=True),
        Groups("two starts", optimizer="Adam", changes=False),
        Groups("two starts", layer=3, optimizer="Adam", equal=True),
    )
}  # fmt: skip
