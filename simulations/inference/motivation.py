"""The motivating study: errors of neurons' entropies, their peaks, and the correlation of entropy and communality."""

from __future__ import annotations

from functools import cache, partial
from typing import Literal

import numpy as np

from fedstat.motivation import findings, statistics
from simulations.inference.table import Case, Claim

Kind = Literal["independent", "common factor", "classes", "classes, half dead", "alike"]
KINDS: tuple[Kind, ...] = ("alike", "independent", "common factor", "classes", "classes, half dead")
CLASSES, DRAWS = 10, 40


def strata(kind: Kind, clients: int) -> np.ndarray:
    """Classes (client,), where clients have one each."""
    return np.arange(clients) % CLASSES if kind.startswith("classes") else np.zeros(clients, int)


def outputs(kind: Kind, clients: int, units: int, peaks: int, rng: np.random.Generator) -> np.ndarray:
    """Outputs (client, unit) of fixed neurons for clients drawn anew.

    Parameters
    ----------
    kind : {"alike", "independent", "common factor", "classes", "classes, half dead"}
        Normal outputs of neurons of one scale, in which all entropies are equal; of unlike scales; with correlations of
        .49 between neurons; about means of ten classes, ten times as far apart as clients of a class; the same,
        rectified, so that nearly half of the outputs are 0.
    clients, units : int
    peaks : {1, 2}
        With 2, three in ten neurons have five times the scale.
    rng : Generator
    """
    fixed = np.random.default_rng(3)
    scale = np.ones(units) if kind == "alike" else np.exp(0.3 * fixed.normal(size=units))
    scale = scale * (np.where(np.arange(units) < 0.7 * units, 1, 5) if peaks == 2 else 1)
    x = rng.normal(size=(clients, units))
    if kind == "common factor":
        x = 0.7 * rng.normal(size=(clients, 1)) + np.sqrt(0.51) * x
    if kind.startswith("classes"):
        x += 10 * fixed.normal(size=(CLASSES, units))[strata(kind, clients)]
    return scale * (np.maximum(x, 0) if "constant" in kind else x)


def _entropies(x: np.ndarray) -> np.ndarray:
    return statistics.dispersion(x)["entropy"]


@cache
def mean_median(kind: Kind, clients: int, units: int) -> float:
    """Mean over 1,000 draws of clients of the median over neurons."""
    rng = np.random.default_rng(1)
    return float(np.mean([np.nanmedian(_entropies(outputs(kind, clients, units, 1, rng))) for _ in range(1000)]))


@cache
def mean_positions(kind: Kind, clients: int, units: int, peaks: int) -> np.ndarray:
    """Mean over 400 draws of clients of the positions of peaks."""
    rng = np.random.default_rng(1)
    drawn = [
        statistics.peaks(_entropies(outputs(kind, clients, units, peaks, rng)), peaks).position for _ in range(400)
    ]
    return np.mean([p for p in drawn if len(p) == peaks], axis=0)


def median(kind: Kind, clients: int, units: int, rng: np.random.Generator) -> float:
    """Whether the median entropy ± 1.96 standard errors covers its mean over draws of clients."""
    x = outputs(kind, clients, units, 1, rng)
    entropy = _entropies(x)
    live = np.isfinite(entropy)
    error = statistics.entropy_errors(x[:, live], strata(kind, clients), seed=int(rng.integers(2**31)))
    se = np.median(statistics.with_errors(entropy[live], error), axis=1).std(ddof=1)
    return float(abs(np.median(entropy[live]) - mean_median(kind, clients, units)) <= 1.96 * se)


def positions(kind: Kind, clients: int, units: int, peaks: int, rng: np.random.Generator) -> np.ndarray:
    """Whether the positions of so many peaks ± 1.96 standard errors cover their means over draws of clients."""
    x = outputs(kind, clients, units, peaks, rng)
    entropy, found = _entropies(x), statistics.peaks(_entropies(x), peaks).position
    if len(found) != peaks:
        return np.full(peaks, np.nan)
    error = statistics.entropy_errors(x, strata(kind, clients), draws=DRAWS, seed=int(rng.integers(2**31)))
    se = findings.position_errors(statistics.with_errors(entropy, error), peaks, peaks)
    covers = abs(found - mean_positions(kind, clients, units, peaks)) <= 1.96 * se
    return np.where(np.isnan(se), np.nan, covers)


def correlations(clients: int, units: int, kappa: float, related: bool, rng: np.random.Generator) -> np.ndarray:
    """Whether intervals of the rank correlation of entropy and communality cover, by estimator."""
    x, w = _sample(clients, units, related, rng)
    half = statistics.halves(np.zeros(clients, int), 40, seed=int(rng.integers(2**31)))
    found = statistics.relation(x[None], w[None], half, kappa=kappa)
    low, high = statistics.interval(found["relation/spearman"], found["relation/spearman_half"])
    truth = _mean_correlations(clients, units, kappa) if related else 0.0
    return ((low <= truth) & (truth <= high))[0, 0]


def _sample(clients: int, units: int, related: bool, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (client, unit) and weights (client, unit, weight); ``related``: wider neurons share less."""
    share = np.linspace(0, 1, units) if related else np.full(units, 0.5)
    common = np.random.default_rng(4).normal(size=16)
    w = share[:, None] * common + rng.normal(size=(clients, units, 16))
    return np.exp(-0.3 * share) * rng.normal(size=(clients, units)), w


@cache
def _mean_correlations(clients: int, units: int, kappa: float) -> np.ndarray:
    """Mean over 500 draws of clients of the rank correlation, by estimator."""
    rng, one = np.random.default_rng(1), np.ones((1, clients), bool)
    drawn = [
        statistics.relation(x[None], w[None], one, kappa=kappa)["relation/spearman"][0, 0]
        for x, w in (_sample(clients, units, True, rng) for _ in range(500))
    ]
    return np.mean(drawn, axis=0)


_TOLD = "help of fedstat.motivation.statistics.entropy_errors says how often they hold"


def _of_medians() -> dict[str, Case]:
    return {
        f"{kind}, {clients} clients, {units} neurons": Case(
            partial(median, kind, clients, units),
            replicates=300,
            note=_TOLD if kind in ("common factor", "classes") else "",
        )
        for kind in KINDS
        for clients, units in ((30, 50), (100, 50), (100, 200), (200, 50))
    }


def _of_positions() -> dict[str, Case]:
    return {
        f"{kind}, {peaks} peak{'s' * (peaks > 1)}, {clients} clients": Case(
            partial(positions, kind, clients, 50, peaks),
            replicates=100,
            note=_TOLD if kind in ("common factor", "classes") else "",
        )
        for kind in ("independent", "common factor", "classes")
        for peaks in (1, 2)
        for clients in (30, 100)
    }


def _of_correlations() -> dict[str, Case]:
    return {
        f"{'related' if related else 'independent'}, κ {kappa}, {clients} clients": Case(
            partial(correlations, clients, 24, kappa, related),
            replicates=100,
            note="the print of the study says how often they cover" if related and clients == 30 else "",
            parts=statistics.ESTIMATORS,
        )
        for related in (False, True)
        for kappa in (0.5, 0.75)
        for clients in (30, 100)
    }


CLAIMS = {
    "motivation, standard error of the median entropy": Claim(
        "coverage",
        ("fedstat.motivation.statistics.entropy_errors", "fedstat.motivation.findings.peaks"),
        (),
        _of_medians(),
    ),
    "motivation, standard errors of peaks": Claim(
        "coverage", ("fedstat.motivation.findings.position_errors",), (), _of_positions()
    ),
    "motivation, interval of entropy and communality": Claim(
        "coverage", ("fedstat.motivation.statistics.interval",), (), _of_correlations()
    ),
}
