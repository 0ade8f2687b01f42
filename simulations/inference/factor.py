"""Splits by communality: bootstrap intervals of ν, how often labels are right, the permutation test."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

import fedstat
from fedstat.stats import factor, split
from fedstat.stats.moments import Moments, correlation, moments
from fedstat.stats.resampling import reweighted
from simulations.inference import pools
from simulations.inference.layers import NULLS
from simulations.inference.pools import Kind
from simulations.inference.table import Case, Claim
from simulations.inference.weights import smooth

CLIENTS, UNITS, WEIGHTS = 2000, 16, 40
GROUPS = ("shared units", "personal units")


class Population(NamedTuple):
    """All clients that there are: weights (client, unit, weight), and their sums."""

    weights: np.ndarray
    sums: Moments


TRAINED: dict[str, tuple[Kind, int, int]] = {
    f"changes, {kind}, {steps} steps, layer {layer}": (kind, steps, layer)
    for kind, steps, layer in (("iid", 60, 1), ("two classes", 6, 1), ("two classes", 60, 2))
}  # fmt: skip


@cache
def population(name: str) -> Population:
    """A population of 2,000 clients, or a pool of trained ones.

    Parameters
    ----------
    name : {"model (8)", "profile", "smooth", "factors"} or a key of TRAINED
        Model (8) of FedFac with noise of .5, as in README; a profile that clients share in half of the units and noise;
        the same, smooth over weights, clients' norms log-normal; three factors of unlike strength.
    """
    if name in TRAINED:
        pool = pools.pool(*TRAINED[name])
        w = (pool.weights - pool.initial).astype(float)
        return Population(w, moments(np.swapaxes(w, 1, 2)))
    rng = np.random.default_rng(0)
    half, shape = UNITS // 2, (CLIENTS, UNITS, WEIGHTS)
    if name == "model (8)":
        truth = fedstat.sim.generate(clients=CLIENTS, d=WEIGHTS, m=UNITS, seed=0, n_train=2, n_test=1)["w"].to_numpy()
        w = truth + 0.5 * rng.normal(size=shape)
    elif name == "factors":
        loadings = np.zeros((UNITS, 3))
        loadings[:6, 0], loadings[6:10, 1], loadings[10:13, 2] = 1.2, 1.0, 0.8
        w = loadings @ rng.normal(size=(CLIENTS, 3, WEIGHTS)) + rng.normal(size=shape)
    else:
        w = rng.normal(size=shape)
        w[:, :half] += rng.normal(size=(half, WEIGHTS))
        if name == "smooth":
            w = smooth(w) * np.exp(0.7 * rng.normal(size=(CLIENTS, 1, 1)))
    return Population(w, moments(np.swapaxes(w, 1, 2)))


def communality(name: str, counts: np.ndarray, **options: Any) -> np.ndarray:
    """ν (sample, unit) of samples that hold client c ``counts[b, c]`` times."""
    r = correlation(reweighted(population(name).sums, counts.astype(float)))
    return np.asarray(factor.fit(r, loadings=False, **options).communality)


@cache
def truth(name: str, clients: int | None, options: tuple[tuple[str, Any], ...]) -> np.ndarray:
    """ν (unit,) of the population, or its mean over 2,000 samples of so many clients in which the unit varies."""
    n = len(population(name).weights)
    if clients is None:
        return communality(name, np.ones((1, n)), **dict(options))[0]
    rng, found = np.random.default_rng(1), []
    for _ in range(10):
        counts = np.zeros((200, n))
        for row in counts:
            np.add.at(row, rng.integers(0, n, clients), 1)
        found.append(np.nanmean(communality(name, counts, **dict(options)), axis=0))
    return np.nanmean(found, axis=0)


def intervals(
    name: str, clients: int, options: tuple[tuple[str, Any], ...], rng: np.random.Generator
) -> list[np.ndarray]:
    """Whether the intervals of one sample of clients cover: of units of high ν in the population, and of the others."""
    weights = population(name).weights
    sample = weights[rng.integers(0, len(weights), clients)]
    found = fedstat.bootstrap(sample, seed=int(rng.integers(2**31)), **dict(options)).tidy()
    nu = truth(name, clients, options)
    covers = np.where(found["conf_low"].isna(), np.nan, (found["conf_low"] <= nu) & (nu <= found["conf_high"]))
    high = split.shared(truth(name, None, options), tau=0.5)
    return [covers[high], covers[~high]]


def labels(name: str, clients: int, options: tuple[tuple[str, Any], ...], rng: np.random.Generator) -> list[np.ndarray]:
    """Whether labels that 90 to 97 % of the replicates repeat are the population's: without caution, and with it."""
    weights = population(name).weights
    sample = weights[rng.integers(0, len(weights), clients)]
    found = fedstat.bootstrap(sample, seed=int(rng.integers(2**31)), **dict(options))
    share = np.where(found.split.shared, found.prop_shared, 1 - found.prop_shared)
    right = found.split.shared == split.shared(truth(name, None, options), tau=0.5)
    right = np.where((share >= 0.9) & (share < 0.97), right, np.nan)
    nothing = np.full(len(right), np.nan)
    return [nothing, right] if found.separation < 2 else [right, nothing]


def permutation(kind: str, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether the test finds an identity where units have none: of all units together, and of any single one."""
    w = rng.normal(size=(clients, UNITS, WEIGHTS)) if kind != "t3" else rng.standard_t(3, (clients, UNITS, WEIGHTS))
    w = smooth(w) if kind == "smooth" else w
    if kind == "unlike units":  # each client has units of its own kinds, in an order of its own
        sizes = np.geomspace(0.1, 3, UNITS)
        w += rng.normal(size=(clients, 1, WEIGHTS)) * rng.permuted(np.tile(sizes, (clients, 1)), axis=1)[..., None]
    found = fedstat.permutation_test(w, kappa=0.75, method="pc", n_permutations=199, seed=int(rng.integers(2**31)))
    return [np.array([found.p_value <= 0.05]), np.array([found.tidy()["p_adjusted"].min() <= 0.05])]


def _options(method: str, size: float) -> tuple[tuple[str, Any], ...]:
    return ("method", method), (("kappa", size) if size < 1 else ("n_factors", int(size)))


def _draws(options: tuple[tuple[str, Any], ...]) -> int:
    """Samples of clients: fewer of estimators that iterate, whose bootstrap takes seconds."""
    return {"pa": 150, "minres": 60}.get(dict(options)["method"], 400)


def _of_samples() -> dict[str, Case]:
    found = {}
    for clients in (8, 10, 30, 100):
        for kappa in (0.5, 0.6, 0.75, 0.85):
            found[f"model (8), pc, κ {kappa}, {clients} clients"] = ("model (8)", clients, _options("pc", kappa))
    for method, kappas in {"pa": (0.5, 0.75, 0.85), "minres": (0.5,), "leverage": (0.5, 0.75, 0.85)}.items():
        for kappa in kappas:
            found[f"model (8), {method}, κ {kappa}, 30 clients"] = ("model (8)", 30, _options(method, kappa))
    for name in ("profile", "smooth", "factors"):
        for kappa in (0.5, 0.85):
            found[f"{name}, pc, κ {kappa}, 10 clients"] = (name, 10, _options("pc", kappa))
    found["factors, pa, 3 factors, 10 clients"] = ("factors", 10, _options("pa", 3))
    for name in TRAINED:
        for kappa in (0.5, 0.75):
            for clients in (10, 30):
                found[f"{name}, pc, κ {kappa}, {clients} clients"] = (name, clients, _options("pc", kappa))
    return {
        name: Case(partial(intervals, *what), replicates=_draws(what[2]), parts=GROUPS, trained=what[0] in TRAINED)
        for name, what in found.items()
    }


def permutation_of_trained(null: str, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """As :func:`permutation`, of clients that agree on no unit; units of a common start are not exchangeable."""
    w = NULLS[null].draw(clients, rng)
    found = fedstat.permutation_test(w, kappa=0.75, method="pc", n_permutations=99, seed=int(rng.integers(2**31)))
    return [np.array([found.p_value <= 0.05]), np.array([found.tidy()["p_adjusted"].min() <= 0.05])]


_EXCHANGEABLE = "help of fedstat.permutation_test: a common start makes units differ, and H0 false"


def _permutations() -> dict[str, Case]:
    trained = (
        "own starts, 60 steps, layer 1", "own starts, 60 steps, layer 2", "units permuted, 60 steps, layer 1",
        "iid, 60 steps, layer 1, signs at random", "two classes, 60 steps, layer 2, signs at random",
    )  # fmt: skip
    return {
        f"{name}, {clients} clients": Case(
            partial(permutation_of_trained, name, clients),
            "signs" not in name,
            400,
            _EXCHANGEABLE if "signs" in name else "",
            ("all units", "any unit at FDR .05"),
            True,
        )
        for name in trained
        for clients in (3, 12)
    } | {
        f"{kind}, {clients} clients": Case(
            partial(permutation, kind, clients), replicates=1000, parts=("all units", "any unit at FDR .05")
        )
        for clients in (3, 12)
        for kind in ("white", "smooth", "t3", "unlike units")
    }


_BOOTSTRAP = ("fedstat.stats.resampling.expanded_percentiles",)
_ENDS = ("BootstrapResult.conf_low", "BootstrapResult.conf_high")
_PERMUTATION = "fedstat.results.uncertainty.PermutationResult"
CLAIMS = {
    "bootstrap, ν of samples of this size": Claim("coverage", _BOOTSTRAP, _ENDS, _of_samples()),
    "bootstrap, labels of .9 to .97 of the replicates are right": Claim(
        "rate", ("fedstat.stats.resampling.reweighted",), ("BootstrapResult.prop_shared", "SplitMapResult.prop_shared"),
        {
            f"{name}, κ {kappa}, {clients} clients": Case(
                partial(labels, name, clients, _options("pc", kappa)), replicates=500,
                parts=("groups 2 standard errors apart", "less, with a caution"),
            )
            for clients in (10, 30)
            for name in ("model (8)", "profile", "smooth", "factors")
            for kappa in (0.5, 0.85)
        },
    ),
    "permutation_test, units without an identity": Claim(
        "level",
        (f"{_PERMUTATION}.p_value", f"{_PERMUTATION}.tidy"),
        ("PermutationResult.p_value", "PermutationResult.p_adjusted"),
        _permutations(),
    ),
}  # fmt: skip
