"""Standard errors by ``fedstat.jackknife`` against the truth: ``python -m simulations.inference.jackknife [OUT.csv]``.

For each case, standard errors of 40 samples of clients are compared with the standard deviation of the communality over
400 other samples of as many clients.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedstat.stats import factor, resampling
from fedstat.stats.moments import correlation, moments
from simulations.inference.table import revision

UNITS, WEIGHTS, SAMPLES, ESTIMATES, N_BOOT, SEED = 12, 30, 400, 40, 60, 7
LOADINGS = np.zeros((UNITS, 2))
LOADINGS[:5, 0], LOADINGS[5:9, 1] = 1.2, 0.8
_RNG = np.random.default_rng(5)
INITIAL = _RNG.uniform(-1, 1, size=(UNITS, WEIGHTS))
TYPES = LOADINGS + 0.6 * _RNG.normal(size=(4, UNITS, 2))
CLUSTER = 4  # clients of a cluster
Draw = Callable[[int, np.random.Generator], np.ndarray]


def two_factors(clients: int, rng: np.random.Generator, loadings: np.ndarray = LOADINGS) -> np.ndarray:
    """Draw weights (client, unit, weight) of noise and two factors; loadings are (unit, 2) or (client, unit, 2)."""
    of_clients = np.broadcast_to(loadings, (clients, UNITS, 2))
    common = np.einsum("kuf,kfw->kuw", of_clients, rng.normal(size=(clients, 2, WEIGHTS)))
    return common + rng.normal(size=(clients, UNITS, WEIGHTS))


def of_types(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw clients of four types, which have different loadings."""
    return two_factors(clients, rng, TYPES[rng.integers(0, 4, clients)])


def in_clusters(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw clusters of four clients with common loadings."""
    loadings = LOADINGS + 0.6 * rng.normal(size=(clients // CLUSTER, UNITS, 2))
    return two_factors(clients, rng, np.repeat(loadings, CLUSTER, axis=0))


def near_initial(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw clients that have hardly left common initial parameters."""
    return INITIAL + 0.05 * two_factors(clients, rng)


def of_unequal_scale(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw clients whose weights have log-normal scales."""
    return two_factors(clients, rng) * np.exp(0.7 * rng.normal(size=(clients, 1, 1)))


def with_diverged(clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw clients of which the first diverged."""
    w = two_factors(clients, rng)
    w[0] = 10 * rng.normal(size=w[0].shape)
    return w


class Case(NamedTuple):
    """A way to draw clients, their number, options of the fit, and groups: numbers of random groups, or "clusters"."""

    name: str
    draw: Draw
    clients: int
    groups: tuple[int | str, ...]
    options: Mapping[str, Any] = MappingProxyType({"n_factors": 2})


CASES = (
    *(Case("clients alike", two_factors, k, (k,)) for k in (4, 6, 10)),
    Case("clients alike", two_factors, 40, (40, 20, 10)),
    Case("four types of clients", of_types, 40, (40, 10)),
    Case("clusters of four clients", in_clusters, 40, (40, 10, "clusters")),
    Case("near common initial parameters", near_initial, 40, (40, 10)),
    Case("near common initial parameters", near_initial, 10, (10,)),
    Case("unequal scale", of_unequal_scale, 40, (40, 10)),
    Case("one diverged client", with_diverged, 40, (40, 10)),
    *(Case(f"kappa = {kappa:g}", two_factors, 40, (40, 10), {"kappa": kappa}) for kappa in (0.5, 0.85)),
)


def communality(w: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """Estimate the communalities of a sample of clients by principal axes."""
    rows = w.swapaxes(1, 2).reshape(-1, w.shape[1])
    return np.asarray(factor.fit(correlation(moments(rows)), loadings=False, **options).communality)


def rows_of(case: Case) -> list[dict[str, Any]]:
    """Return a row per kind of groups, and one for the bootstrap: median ratio of SE and SD over units, its error."""
    rng = np.random.default_rng(SEED)
    samples = [communality(case.draw(case.clients, rng), case.options) for _ in range(SAMPLES)]
    deviation = np.std(samples, axis=0, ddof=1)
    errors: dict[str, list[np.ndarray]] = {}
    df: dict[str, list[float]] = {}
    for i in range(ESTIMATES):
        sums = moments(case.draw(case.clients, rng).swapaxes(1, 2))
        for kind in case.groups:
            if isinstance(kind, str):
                method, groups = f"jackknife, {kind}", np.arange(case.clients) // CLUSTER
            else:
                method, groups = f"jackknife, {kind} groups", resampling.divide_clients(case.clients, kind, seed=i)
            refits = resampling.delete_blocks(sums, groups, **case.options)
            error, freedom = resampling.jackknife(np.asarray(refits.communality), int(groups.max()))
            errors.setdefault(method, []).append(error)
            df.setdefault(method, []).append(float(np.median(freedom)))
        refits = resampling.bootstrap(sums, replicates=N_BOOT, seed=i, **case.options)
        errors.setdefault("bootstrap", []).append(np.nanstd(np.asarray(refits.communality), axis=0, ddof=1))
    rows = []
    for method, by_sample in errors.items():
        ratio, means = np.sqrt(np.mean(np.square(by_sample), axis=0)) / deviation, np.mean(by_sample, axis=1)
        mc_error = np.hypot(1 / np.sqrt(2 * SAMPLES), means.std() / means.mean() / np.sqrt(ESTIMATES))
        row = {"case": case.name, "clients": case.clients, "method": method, "ratio": np.median(ratio)}
        row |= {"lowest": ratio.min(), "highest": ratio.max(), "mc_error": mc_error}
        rows.append(row | {"df": np.median(df.get(method, [np.nan]))})
    return rows


def main() -> None:
    """Print the table, and write it to a file if one is named."""
    warnings.simplefilter("ignore")
    table = pd.concat(map(pd.DataFrame, map(rows_of, CASES)), ignore_index=True).round(3)
    print(table.to_string(index=False))
    if sys.argv[1:]:
        table.assign(seed=SEED, revision=revision()).to_csv(sys.argv[1], index=False)


if __name__ == "__main__":
    main()
