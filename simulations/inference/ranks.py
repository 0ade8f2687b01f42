"""Tests of ranks: Friedman's, and Nemenyi's critical difference."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import numpy as np
import scipy

from fedstat.stats import ranking
from simulations.inference.table import Case, Claim

difference = cache(ranking.critical_difference)
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def alike(rng: np.random.Generator, settings: int, methods: int) -> np.ndarray:
    """Methods that do not differ."""
    return rng.normal(size=(settings, methods))


def tied(rng: np.random.Generator, settings: int, methods: int) -> np.ndarray:
    """Accuracies of two values."""
    return rng.integers(0, 2, size=(settings, methods)).astype(float)


def unequal_spread(rng: np.random.Generator, settings: int, methods: int) -> np.ndarray:
    """The first method varies ten times as much as the others, about the same mean."""
    return rng.normal(size=(settings, methods)) * np.where(np.arange(methods) == 0, 10, 1)


def paired(rng: np.random.Generator, settings: int, methods: int) -> np.ndarray:
    """Settings two by two on one data set, which rank methods nearly alike."""
    return np.repeat(rng.normal(size=(settings // 2, methods)), 2, 0) + 0.3 * rng.normal(size=(settings, methods))


def friedman(draw: Draw, settings: int, methods: int, rng: np.random.Generator) -> float:
    """Whether the test rejects."""
    p = ranking.friedman(draw(rng, settings, methods)).p_value
    return float(p <= 0.05) if np.isfinite(p) else np.nan


def nemenyi(draw: Draw, settings: int, methods: int, rng: np.random.Generator) -> float:
    """Whether any two methods are called different."""
    ranks = scipy.stats.rankdata(draw(rng, settings, methods), axis=1).mean(axis=0)
    return float(np.ptp(ranks) > difference(methods, settings))


def cases(hits: Callable[..., float]) -> dict[str, Case]:
    """Few and many settings and methods, and what breaks exchangeability."""
    found = {
        f"{n} settings × {k} methods": Case(partial(hits, alike, n, k), replicates=1000 if n > 6 else 4000)
        for n, k in [(2, 3), (3, 3), (4, 3), (3, 4), (2, 5), (6, 10), (10, 5), (6, 31)]
    }
    said = "docs/howto/leaderboard.md: methods that vary more, and settings that share data, are not what it asks about"
    more = {
        "6 settings × 10 methods, half of the accuracies tied": Case(partial(hits, tied, 6, 10), replicates=1000),
        "6 settings × 10 methods, one varies 10 times as much": Case(partial(hits, unequal_spread, 6, 10), False, 1000),
        "10 settings × 5 methods, one varies 10 times as much": Case(partial(hits, unequal_spread, 10, 5), False, 1000),
        "6 settings × 10 methods, pairs of settings share data": Case(partial(hits, paired, 6, 10), False, 1000),
    }
    return found | {name: case if case.holds else case._replace(note=said) for name, case in more.items()}


CLAIMS = {
    "Friedman's test": Claim("level", ("fedstat.stats.ranking.friedman",), ("Friedman.p_value",), cases(friedman)),
    "Nemenyi's test, any pair": Claim(
        "level",
        ("fedstat.stats.ranking.critical_difference", "fedstat.stats.ranking.nemenyi"),
        (),
        cases(nemenyi),
    ),
}
