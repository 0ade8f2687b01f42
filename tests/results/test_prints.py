"""Prints of all results, as golden files."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
from prints import require_golden

import fedstat


@cache
def weights() -> np.ndarray:
    """README's weights: 30 clients, 24 units, of which 12 to 23 are shared; model (8) of FedFac, and noise."""
    truth = fedstat.sim.generate(clients=30, d=60, m=24, seed=0)["w"].to_numpy()
    return truth + 0.5 * np.random.default_rng(1).normal(size=truth.shape)


@cache
def replicates() -> np.ndarray:
    """Two replicates of 20 clients; units differ between clients from not at all to twice the training noise."""
    rng = np.random.default_rng(2)
    return rng.normal(size=(20, 1, 12, 40)) * np.linspace(0, 2, 12)[:, None] + rng.normal(size=(20, 2, 12, 40))


def accuracies() -> pd.DataFrame:
    """Three methods, six seeds."""
    rng = np.random.default_rng(3)
    gain = np.tile([0.0, 0.05, 0.0], 6)
    columns = {"method": ["fedavg", "fedper", "ditto"] * 6, "seed": np.repeat(range(6), 3)}
    return pd.DataFrame(columns | {"accuracy": 0.7 + gain + rng.normal(scale=0.01, size=18)})


RESULTS: dict[str, Callable[[], Any]] = {
    "icc": lambda: fedstat.icc(weights()),
    "icc-permutation": lambda: fedstat.icc(weights(), inference="permutation"),
    "icc-F": lambda: fedstat.icc(weights(), inference="F"),
    "icc-4-clients": lambda: fedstat.icc(weights()[:4]),
    "icc-2-clients": lambda: fedstat.icc(weights()[:2]),
    "split": lambda: fedstat.split(weights(), kappa=0.75),
    "split-icc": lambda: fedstat.split(weights(), method="icc"),
    "split-test": lambda: fedstat.split(replicates(), method="icc", tau="test"),
    "fa": lambda: fedstat.fa(weights(), kappa=0.75),
    "bootstrap": lambda: fedstat.bootstrap(weights(), kappa=0.75, method="pc", n_boot=50),
    "bootstrap-5-clients": lambda: fedstat.bootstrap(weights()[:5], kappa=0.75, method="pc", n_boot=50),
    "jackknife": lambda: fedstat.jackknife(weights(), kappa=0.75, method="pc", n_blocks=10),
    "jackknife-groups": lambda: fedstat.jackknife(weights(), n_factors=2, groups=np.arange(30) // 7),
    "icc-groups": lambda: fedstat.icc(weights(), groups=np.arange(30) // 5),
    "icc-these-groups": lambda: fedstat.icc(weights(), groups=np.repeat(["a", "b"], 15), claim="these groups"),
    "bootstrap-groups": lambda: fedstat.bootstrap(
        weights(), n_factors=2, method="pc", groups=np.arange(30) % 3, claim="these groups", n_boot=50
    ),
    "sensitivity": lambda: fedstat.sensitivity(weights(), kappa=0.75, method="pc", n_starts=0),
    "permutation_test": lambda: fedstat.permutation_test(weights(), kappa=0.75, method="pc"),
    "n_factors": lambda: fedstat.n_factors(weights()),
    "split_map": lambda: fedstat.split_map(weights(), methods=("pc", "leverage", "icc")),
    "knn_entropy": lambda: fedstat.knn_entropy(np.random.default_rng(4).normal(size=(200, 5))),
    "effective_rank": lambda: fedstat.effective_rank(weights()),
    "client_clusters": lambda: fedstat.client_clusters(weights(), n_clusters=3, groups=np.repeat([0, 1, 2], 10)),
    "variance_components": lambda: fedstat.variance_components(replicates()),
    "compare": lambda: fedstat.compare(accuracies(), reference="fedavg"),
}


@pytest.mark.parametrize("name", RESULTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_result_prints_its_golden_file_in_80_columns(name: str) -> None:
    require_golden(name, RESULTS[name]().summary())
