"""Clusters of clients and shapes of samples: agreement with known groups, numbers of peaks, fit of a factor model."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

import fedstat
from fedstat.motivation import statistics
from fedstat.stats import number_of_factors
from simulations.inference.pools import Kind, pool
from simulations.inference.table import Case, Claim

_TRAINED: dict[str, tuple[Kind, int, int]] = {
    "changes, two classes, 60 steps, layer 2": ("two classes", 60, 2),
    "weights, two starts, 60 steps, layer 1": ("two starts", 60, 1),
}


def groups_of(clients: int, n: int) -> np.ndarray:
    """Known groups (client,), as equal as can be."""
    return np.arange(clients) % n


def unrelated(kind: str, clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether either test finds known groups that have nothing to do with the vectors."""
    v = rng.normal(size=(clients, 30))
    if kind == "own clusters":  # other than the groups that are asked about
        v += 3 * rng.normal(size=(3, 30))[rng.integers(0, 3, clients)]
    if kind == "unlike norms":
        v *= np.exp(rng.normal(size=(clients, 1)))
    if kind in _TRAINED:
        found = pool(*_TRAINED[kind])
        changes = found.weights - (found.start.max() == 0) * found.initial
        v = changes[rng.choice(len(changes), clients, replace=False)]
    found = fedstat.client_clusters(v, n_clusters=3, groups=groups_of(clients, 3), n_subsamples=1, n_permutations=499)
    return [np.array([found.p_value <= 0.05]), np.array([found.contrast_p_value <= 0.05])]


def related(clients: int, away: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of clients around the means of four groups, and the groups."""
    centres = np.random.default_rng(7).normal(size=(4, 30))
    group = rng.integers(0, 4, clients)
    return away * centres[group] + rng.normal(size=(clients, 30)), group


DRAWS = 2000


@cache
def mean_rand(clients: int, away: float) -> float:
    """Mean adjusted Rand index of clusters and groups, over ``DRAWS`` draws of clients."""
    rng, found = np.random.default_rng(1), []
    for _ in range(DRAWS):
        v, group = related(clients, away, rng)
        if len(np.unique(group)) == 4:
            found.append(_clusters(v, group, resamples=1).ari)
    return float(np.mean(found))


def _clusters(v: np.ndarray, group: np.ndarray, *, resamples: int = 200) -> fedstat.results.ClientClustersResult:
    return fedstat.client_clusters(v, n_clusters=4, groups=group, n_permutations=19, n_subsamples=resamples)


def rand_interval(clients: int, away: float, rng: np.random.Generator) -> np.ndarray:
    """Whether the interval of the adjusted Rand index covers its mean."""
    v, group = related(clients, away, rng)
    if len(np.unique(group)) < 4:
        return np.array([np.nan])
    found, truth = _clusters(v, group), mean_rand(clients, away)
    if not np.isfinite(found.conf_low):
        return np.array([np.nan])
    return np.array([found.conf_low <= truth <= found.conf_high])


def peaks(kind: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Whether a sample with one peak is said to have more, or not to be normal."""
    x = {"normal": rng.normal, "t3": partial(rng.standard_t, 3), "exponential": rng.exponential}[kind](size=n)
    seed = int(rng.integers(2**31))
    return [
        np.array([statistics.peaks(x, 1, draws=99, seed=seed).p_value <= 0.05]),
        np.array([statistics.mixture(x, draws=39, seed=seed).p_value <= 0.05]),
    ]


def fit_of_factors(kind: str, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Tests of a factor model that is true, and of sphericity where units are independent."""
    d = 12
    factors = np.zeros((d, 2))
    factors[:6, 0], factors[6:, 1] = 0.7, 0.6
    common, own = rng.normal(size=(n, 2)), rng.normal(size=(n, d))
    if kind == "rows alike":  # as rows of one client are: ten rows share their draws
        common, own = (np.repeat(x[: n // 10], 10, axis=0) for x in (common, own))
    if kind == "t3":
        own = rng.standard_t(3, (n, d)) / np.sqrt(3)
    z = common @ factors.T + own * np.sqrt(1 - np.square(factors).sum(1))
    found = fedstat.fa(z, n_factors=2, method="minres").glance().iloc[0]
    sphericity = number_of_factors.bartlett(np.corrcoef(own, rowvar=False), n)[2]
    return [np.array([found["p_value"] <= 0.05]), np.array([sphericity <= 0.05])]


def rmsea(weak: float, n: int, rng: np.random.Generator) -> np.ndarray:
    """Whether the 90 % interval of RMSEA covers that of two factors in the population, where a third is left out."""
    d = 12
    factors = np.zeros((d, 3))
    factors[:6, 0], factors[6:, 1], factors[::2, 2] = 0.7, 0.6, weak
    sigma = factors @ factors.T + np.diag(1 - np.square(factors).sum(1))
    z = rng.multivariate_normal(np.zeros(d), sigma, n)
    found, truth = (
        fedstat.fa(r, n_factors=2, method="minres", corr=True, n_obs=rows).glance().iloc[0]
        for r, rows in ((np.corrcoef(z, rowvar=False), n), (sigma, 10**7))
    )
    return np.array([found["rmsea_low"] <= truth["rmsea"] <= found["rmsea_high"]])


_CLUSTERS = "ClientClustersResult"
_TAILS = "help of fedstat.motivation.statistics, and the motivating study's print: long tails look like peaks"
_RMSEA = "as R's psych has it; help of fedstat.stats.number_of_factors.fit_indices says how it covers"
_ROWS = "for many independent rows: help of fedstat.stats.number_of_factors.fit_indices; rows of one client are alike"
CLAIMS = {
    "client_clusters, tests of known groups": Claim(
        "level",
        ("fedstat.stats.clustering.p_value",),
        (f"{_CLUSTERS}.p_value", f"{_CLUSTERS}.contrast_p_value"),
        {
            f"{kind}, {n} clients": Case(
                partial(unrelated, kind, n), replicates=1000,
                parts=("adjusted Rand index", "similarity within groups"), trained=kind in _TRAINED,
            )
            for kind in ("independent vectors", "own clusters", "unlike norms", *_TRAINED)
            for n in (6, 20)
        },
    ),
    "client_clusters, interval of the adjusted Rand index": Claim(
        "coverage",
        ("fedstat.labelled.between_clients._agreement",),
        (f"{_CLUSTERS}.conf_low", f"{_CLUSTERS}.conf_high"),
        {
            f"{n} clients, groups {away} apart": Case(partial(rand_interval, n, away), replicates=500)
            for n in (12, 40)
            for away in (0.3, 0.5)
        },
    ),
    "modes, one peak": Claim(
        "level",
        ("fedstat.motivation.statistics.peaks", "fedstat.motivation.statistics.mixture"),
        (),
        {
            f"{kind}, {n} values": Case(
                partial(peaks, kind, n), kind == "normal", 200,
                "" if kind == "normal" else _TAILS,
                ("Silverman, more than one peak", "mixture, not one normal"),
            )
            for kind in ("normal", "t3", "exponential")
            for n in (20, 100)
        },
    ),
    "fa, fit of a true model": Claim(
        "level",
        ("fedstat.stats.number_of_factors._likelihood", "fedstat.stats.number_of_factors.bartlett"),
        ("FactorResult.p_value", "FactorResult.bartlett_p", "SplitResult.bartlett_p"),
        {
            f"{kind}, {n} rows": Case(
                partial(fit_of_factors, kind, n), kind == "normal", 500, _ROWS,
                ("χ² of the model", "Bartlett's sphericity"),
            )
            for kind in ("normal", "t3", "rows alike")
            for n in (100, 1000)
        },
    ),
    "fa, interval of RMSEA": Claim(
        "coverage",
        ("fedstat.stats.number_of_factors._rmsea_interval.end",),
        tuple(f"{result}.rmsea_{end}" for result in ("FactorResult", "SplitResult") for end in ("low", "high")),
        {
            f"a third factor of loadings {weak}, {n} rows": Case(
                partial(rmsea, weak, n), weak < 0.3, 1000, _RMSEA
            )
            for weak in (0.2, 0.5)
            for n in (200, 1000)
        },
        confidence=0.9,
    ),
}  # fmt: skip
