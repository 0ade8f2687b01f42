"""A number beyond the end of its range is refused by name.

The refused numbers are next to the ends of the range, so that a range that is one too wide is noticed. Settings of
algorithms, partitions, training and optimizers are in the tables of fl and data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from layers import R8, weights

import fedstat
from fedstat import ntk, sim, study
from fedstat.attack.experiment import rounds_of
from fedstat.fl import algorithms, nets
from fedstat.fl.job import TrainConfig
from fedstat.flower.plan import Plan
from fedstat.motivation import statistics
from fedstat.ntk import descent, gram
from fedstat.plot.study import by_setting
from fedstat.stats import eigenvalues, entropy, moments, number_of_factors, ranking, resampling, variance_components
from fedstat.study.federation import partition_of

RNG = np.random.default_rng(0)
W, X = weights(), RNG.normal(size=40)
Z, VECTORS = fedstat.layer_matrix(W), RNG.normal(size=(6, 5))
MOMENTS = moments.moments(W.swapaxes(1, 2))
SPHERE = {"x": RNG.normal(size=(2, 4, 6)), "y": np.ones((2, 4)), "split": ["train", "train", "test", "test"]}
COMPONENTS = variance_components.components(variance_components.parts(RNG.normal(size=(5, 2, 3, 4))))
BELOW_1, OUTSIDE_0_TO_1 = [0], [0.0, 1.0]

RANGES: dict[str, tuple[Callable[[Any], Any], str, list[Any]]] = {
    "a bootstrap": (lambda n: fedstat.bootstrap(W, n_boot=n), "n_boot", BELOW_1),
    "a permutation test": (lambda n: fedstat.permutation_test(W, n_permutations=n), "n_permutations", BELOW_1),
    "replicates of a bootstrap": (lambda n: resampling.bootstrap(MOMENTS, replicates=n), "replicates", BELOW_1),
    "replicates of a permutation": (lambda n: resampling.permutation(MOMENTS, replicates=n), "replicates", BELOW_1),
    "pairs of halves": (lambda n: resampling.half_samples(MOMENTS, pairs=n), "pairs", BELOW_1),
    "starts of fa": (lambda n: fedstat.fa(Z, n_starts=n), "n_starts", BELOW_1),
    "starts of sensitivity": (lambda n: fedstat.sensitivity(W, n_starts=n), "n_starts", [-1]),
    "tol of fa": (lambda tol: fedstat.fa(Z, tol=tol), "tol", [-1e-9]),
    "rows of parallel analysis": (lambda n: number_of_factors.parallel_analysis(R8, n), "n_obs", [2]),
    "quantile of parallel analysis": (
        lambda q: number_of_factors.parallel_analysis(R8, 30, quantile=q), "quantile", OUTSIDE_0_TO_1,
    ),
    "draws of parallel analysis": (lambda n: number_of_factors.parallel_analysis(R8, 30, draws=n), "draws", BELOW_1),
    "methods of a critical difference": (lambda n: ranking.critical_difference(n, 5), "methods", [1]),
    "blocks of a critical difference": (lambda n: ranking.critical_difference(3, n), "blocks", BELOW_1),
    "methods of Nemenyi's test": (lambda n: ranking.nemenyi(np.arange(1.0, n + 1), 5), "methods", [1]),
    "blocks of Nemenyi's test": (lambda n: ranking.nemenyi([1.0, 2.0], n), "blocks", BELOW_1),
    "an axis of entropy": (lambda axis: entropy.knn_entropy(VECTORS, axis=axis), "axis", [-3, 2]),
    "clusters": (lambda n: fedstat.client_clusters(VECTORS, n_clusters=n), "n_clusters", BELOW_1),
    "permutations of clusters": (
        lambda n: fedstat.client_clusters(VECTORS, n_clusters=2, n_permutations=n), "n_permutations", BELOW_1,
    ),
    "subsamples of clusters": (
        lambda n: fedstat.client_clusters(VECTORS, n_clusters=2, n_subsamples=n), "n_subsamples", BELOW_1,
    ),
    "margin of reliability": (
        lambda m: variance_components.classify_units(COMPONENTS, margin=m), "margin", OUTSIDE_0_TO_1,
    ),
    "fdr of reliability": (
        lambda q: variance_components.classify_units(COMPONENTS, fdr=q), "fdr", OUTSIDE_0_TO_1,
    ),
    "tol of eigenvalues": (lambda tol: eigenvalues.extreme_eigenvalues(R8, tol=tol), "tol", [0.0]),
    "eigenvalues found at once": (
        lambda n: eigenvalues.extreme_eigenvalues(R8, direct_below=n), "direct_below", BELOW_1,
    ),
    "delta of Theorem 2": (lambda d: ntk.generalization(**SPHERE, normalize=True, delta=d), "delta", OUTSIDE_0_TO_1),
    "constant of Theorem 2": (lambda c: ntk.generalization(**SPHERE, normalize=True, constant=c), "constant", [-1e-9]),
    "width of Theorem 2": (lambda n: ntk.generalization(**SPHERE, normalize=True, width=n), "width", BELOW_1),
    "learning rate of Theorem 2": (lambda lr: ntk.generalization(**SPHERE, normalize=True, lr=lr), "lr", [0.0]),
    "initial scale of Theorem 2": (
        lambda s: ntk.generalization(**SPHERE, normalize=True, init_scale=s), "init_scale", [0.0],
    ),
    "clients of Theorem 2": (lambda n: ntk.generalization(**SPHERE, normalize=True, clients=[n]), "clients", [0, 5]),
    "samples of Theorem 2": (lambda n: ntk.generalization(**SPHERE, normalize=True, samples=[n]), "samples", [0, 3]),
    "samples of a bound": (gram.largest_informative_clients, "n_total", BELOW_1),
    "clients on the sphere": (lambda n: descent.gaussian(clients=n, n=2, d=3, n_test=0), "clients", BELOW_1),
    "test samples on the sphere": (lambda n: descent.gaussian(clients=2, n=2, d=3, n_test=n), "n_test", [-1]),
    "clients of digits": (lambda n: descent.digits(clients=n), "clients", BELOW_1),
    "samples of digits": (lambda n: descent.digits(n=n), "n", BELOW_1),
    "test samples of digits": (lambda n: descent.digits(n_test=n), "n_test", [-1]),
    "peaks": (lambda n: statistics.peaks(X, n), "n", BELOW_1),
    "draws of peaks": (lambda n: statistics.peaks(X, 1, draws=n), "draws", [-1]),
    "draws of a mixture": (lambda n: statistics.mixture(X, draws=n), "draws", BELOW_1),
    "halves of clients": (lambda n: statistics.halves(np.zeros(4, int), n), "replicates", BELOW_1),
    "steps of a spectrum": (lambda n: sim.recovery.spectrum(max_iter=n), "max_iter", [1]),
    "tol of a spectrum": (lambda tol: sim.recovery.spectrum(tol=tol), "tol", [-1e-9]),
    "steps of recovery": (lambda n: sim.recovery.recover(max_iter=n), "max_iter", [1]),
    "tol of recovery": (lambda tol: sim.recovery.recover(tol=tol), "tol", [-1e-9]),
    "replicates of recovery": (lambda n: sim.recovery.recover(replicates=n), "replicates", BELOW_1),
    "units of a forest": (lambda n: fedstat.plot.forest(fedstat.icc(W), units=n), "units", BELOW_1),
    "columns of panels": (lambda n: by_setting(pd.DataFrame({"scenario": []}), print, columns=n), "columns", BELOW_1),
    "rounds of an attack": (lambda n: rounds_of([n], [("run", 3)]), "rounds", [-1]),
    "a Dirichlet partition": (lambda a: partition_of(f"dirichlet:{a}"), "the number in partition", [0.0]),
    "validation samples of a study": (
        lambda v: study.Settings(test_fraction=0.4, validation_fraction=v), "validation_fraction", [-0.1, 0.6],
    ),
    "hidden units": (lambda n: nets.named("mlp", (4,), 2, hidden=n), "hidden", BELOW_1),
    "sizes of an MLP": (lambda n: nets.mlp([4, n, 2]), "sizes", BELOW_1),
    "clients of a plan": (
        lambda n: Plan(net=nets.mlp([4, 2]), algorithm=algorithms.fedavg(), training=TrainConfig(), clients=n),
        "clients", BELOW_1,
    ),
    **{
        f"classes of {name}": (lambda n, name=name: nets.named(name, (3, 32, 32), n), "outputs", BELOW_1)
        for name in ("cnn", "resnet10", "vgg16")
    },
}  # fmt: skip


@pytest.mark.parametrize("case", RANGES)
def test_a_number_beyond_its_range_is_refused_by_name(case: str) -> None:
    call, name, refused = RANGES[case]
    for value in refused:
        says = rf"^{name} must be (an integer|a finite number) .*, but got {re.escape(f'{value:g}')}\b"
        with pytest.raises(ValueError, match=says):
            call(value)
