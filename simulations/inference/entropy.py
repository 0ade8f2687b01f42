"""Intervals of nearest-neighbour entropies, on samples of known entropy, with ties and without."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import scipy

import fedstat
from simulations.inference import pools
from simulations.inference.table import Case, Claim

SERIES = 20
"""Samples that one replicate draws."""
KS = (1, 3, 10)
NORMAL = 0.5 * math.log(2 * math.pi * math.e)


class Population(NamedTuple):
    """Samples (series, sample, coordinate) drawn from a generator and a shape, and their entropy in nats."""

    draw: Callable[[np.random.Generator, tuple[int, int, int]], np.ndarray]
    entropy: Callable[[int], float]


def bimodal(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Two normal peaks, four standard deviations apart."""
    return rng.normal(size=shape) + 4 * rng.integers(0, 2, shape)


@cache
def entropy_of_bimodal(_: int) -> float:
    """By quadrature."""

    def integrand(x: float) -> float:
        f = 0.5 * float(np.sum(scipy.stats.norm.pdf(x, [0, 4])))
        return -f * math.log(f)

    return float(scipy.integrate.quad(integrand, -9, 13, limit=200)[0])


def correlated(r: float) -> Population:
    """Two normal coordinates."""
    root = np.linalg.cholesky(np.array([[1, r], [r, 1]]))
    return Population(
        lambda rng, shape: rng.normal(size=shape) @ root.T, lambda d: d * NORMAL + 0.5 * math.log(1 - r**2)
    )


def of_groups(groups: int, sd: float = 1e-4) -> Population:
    """Normal groups at distance 1, far apart for the entropy if the standard deviation is at most .1."""
    return Population(
        lambda rng, shape: rng.integers(0, groups, shape) + sd * rng.normal(size=shape),
        lambda _: NORMAL + math.log(groups * sd),
    )


def unequal(rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    """Normal coordinates whose scales differ by 1 to 10⁴."""
    return rng.normal(size=shape) * SCALES[: shape[2]]


SCALES = np.array([1, 1e4])
POPULATIONS = {
    "normal": Population(lambda rng, shape: rng.normal(size=shape), lambda d: d * NORMAL),
    "uniform": Population(lambda rng, shape: rng.random(shape), lambda _: 0.0),
    "exponential": Population(lambda rng, shape: rng.exponential(size=shape), float),
    "t3": Population(lambda rng, shape: rng.standard_t(3, shape), lambda d: d * float(scipy.stats.t(3).entropy())),
    "bimodal": Population(bimodal, entropy_of_bimodal),
    "Cauchy": Population(lambda rng, shape: rng.standard_cauchy(shape), lambda d: d * math.log(4 * math.pi)),
    "arcsine": Population(lambda rng, shape: rng.beta(0.5, 0.5, shape), lambda d: d * math.log(math.pi / 4)),
    "correlated .9": correlated(0.9),
    "correlated .99": correlated(0.99),
    "scales 1:10⁴": Population(unequal, lambda d: d * NORMAL + math.log(SCALES[:d].prod())),
    "8 narrow groups": of_groups(8),
    "20 narrow groups": of_groups(20),
    "10 groups of SD .1": of_groups(10, 0.1),
    "20 groups of SD .05": of_groups(20, 0.05),
}


def twice(x: np.ndarray) -> np.ndarray:
    """Half of the samples, each of them twice."""
    return np.concatenate([x[:, : x.shape[1] // 2]] * 2, axis=1)


def one_pair(x: np.ndarray) -> np.ndarray:
    """A sample in place of another one."""
    return np.concatenate([x[:, 1:2], x[:, 1:]], axis=1)


def with_zeros(x: np.ndarray) -> np.ndarray:
    """Three tenths of the samples at 0: the entropy is that of the others."""
    return np.where(np.arange(x.shape[1])[:, None] < 0.3 * x.shape[1], 0.0, x)


def rounded(step: float, x: np.ndarray) -> np.ndarray:
    """To a grid."""
    return step * np.round(x / step)


def plain(x: np.ndarray) -> np.ndarray:
    """As they are."""
    return x


def covered(
    population: str,
    d: int,
    n: int,
    ks: tuple[int, ...],
    change: Callable[[np.ndarray], np.ndarray],
    options: dict[str, Any],
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Whether intervals cover, for each k; NaN where none is given."""
    draw, entropy = POPULATIONS[population]
    x = change(draw(rng, (SERIES, n, d)))
    found = [fedstat.knn_entropy(x, k=k, axis=1, feature_axis=2, **options) for k in ks]
    return [
        np.where(np.isnan(one.conf_low), np.nan, (one.conf_low <= entropy(d)) & (entropy(d) <= one.conf_high))
        for one in found
    ]


@cache
def of_all_clients(kind: pools.Kind, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights (client, weight) of a pool after 60 steps, less those that never change, and their entropies."""
    pool = pools.pool(kind, 60, layer)
    x = pool.weights.reshape(pools.CLIENTS, -1)
    x = x[:, [len(np.unique(column)) == pools.CLIENTS for column in x.T]]
    return x, fedstat.knn_entropy(x).entropy


def covered_of_trained(kind: pools.Kind, layer: int, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """As :func:`covered`: single weights over n clients of a pool; the truth is the estimate of all its clients."""
    x, truth = of_all_clients(kind, layer)
    drawn = rng.choice(x.shape[1], SERIES, replace=False)
    x = x[rng.choice(len(x), n, replace=False)][:, drawn]
    found = [fedstat.knn_entropy(x, k=k) for k in KS]
    return [
        np.where(np.isnan(one.conf_low), np.nan, (one.conf_low <= truth[drawn]) & (truth[drawn] <= one.conf_high))
        for one in found
    ]


def case(
    population: str,
    d: int,
    n: int,
    *,
    ks: tuple[int, ...] = KS,
    change: Callable[[np.ndarray], np.ndarray] = plain,
    holds: bool = True,
    note: str = "",
    **options: Any,
) -> Case:
    """A case with a part for each k."""
    hits: Callable[[np.random.Generator], Any] = partial(covered, population, d, n, ks, change, options)
    return Case(hits, holds, 100, note, tuple(f"k = {k}" for k in ks))


def cases() -> dict[str, Case]:
    """Shapes of one coordinate, normal and other vectors, ties."""
    line = {
        f"{shape}, n = {n}": case(shape, 1, n)
        for shape in ("normal", "uniform", "exponential", "t3", "bimodal")
        for n in (20, 50, 100, 1000)
    }
    space = {
        f"{shape}, {d} coordinates, n = {n}": case(shape, d, n)
        for shape, d in (
            ("normal", 2),
            ("uniform", 2),
            ("correlated .9", 2),
            ("correlated .99", 2),
            ("scales 1:10⁴", 2),
            ("normal", 3),
            ("uniform", 3),
            ("normal", 4),
        )
        for n in ((20, 50, 100, 1000) if d < 4 else (100,))
    }
    steep = "fedstat.stats.entropy.knn_entropy: densities that are steep at the scale of the k-th neighbour"
    copies = "a warning names the samples with exact copies; no interval is given"
    narrow = "a caution where groups show; the print says what size of groups intervals assume"
    rough = {
        "Cauchy, n = 100": case("Cauchy", 1, 100),
        **{
            f"arcsine (unbounded density), {d} coordinates, n = {n}": case("arcsine", d, n, holds=False, note=steep)
            for d, n in ((1, 100), (2, 100), (2, 1000), (3, 100), (3, 1000))
        },
        **{
            f"{groups}, n = {n}": case(groups, 1, n, holds=False, note=narrow)
            for groups in ("8 narrow groups", "20 narrow groups")
            for n in (20, 50, 100, 1000)
        },
        **{
            f"{groups}, n = {n}": case(groups, 1, n, ks=ks, holds=holds, note="" if holds else narrow)
            for groups in ("10 groups of SD .1", "20 groups of SD .05")
            for n, ks, holds in ((20, (1, 3), False), (300, (1, 3), False), (1800, (1, 3), True))
        },
    }
    ties = {
        "normal, n = 100, each sample twice": case(
            "normal", 1, 100, ks=(3, 10), change=twice, holds=False, note=copies
        ),
        "normal, 2 coordinates, n = 100, each sample twice": case(
            "normal", 2, 100, ks=(3, 10), change=twice, holds=False, note=copies
        ),
        "normal, n = 100, one sample twice": case(
            "normal", 1, 100, ks=(3, 10), change=one_pair, holds=False, note=copies
        ),
        "normal, n = 100, rounded to .01": case(
            "normal", 1, 100, ks=(10,), change=partial(rounded, 0.01), holds=False, note=copies
        ),
        "normal, n = 100, rounded to .1, jitter": case(
            "normal", 1, 100, change=partial(rounded, 0.1), ties="jitter", resolution=0.1
        ),
        "normal, n = 100, 30 of them 0, atoms": case("normal", 1, 100, change=with_zeros, ties="atoms"),
    }
    kinds: tuple[pools.Kind, ...] = ("iid", "two classes", "own starts")
    trained = {
        f"weights, {kind}, 60 steps, layer {layer}, n = {n}": Case(
            partial(covered_of_trained, kind, layer, n), True, 100, "", tuple(f"k = {k}" for k in KS), trained=True
        )
        for kind in kinds
        for layer in (2, 3)
        for n in (20, 50)
    }
    return line | space | rough | ties | trained


CLAIMS = {
    "knn_entropy, intervals": Claim(
        "coverage",
        ("fedstat.stats.entropy._limits",),
        ("EntropyResult.conf_low", "EntropyResult.conf_high"),
        cases(),
    ),
}
