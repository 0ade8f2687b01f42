"""A small result of every class, whose units, clients, runs and methods have names that break tables if left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import numpy as np
import pandas as pd
import xarray as xr
from layers import weights

import fedstat
from fedstat.ntk import descent
from fedstat.results import LeakageResult
from fedstat.results.base import Result

NAMES = ["<b>bold</b>", "u_1", "50 %", "a & b", "c|d", r"5$ \frac{", "*f*", "<script>alert(1)</script>"]
W = xr.DataArray(weights(), dims=("client", "unit", "weight"), coords={"unit": NAMES, "client": NAMES[2:]})
DATA = descent.gaussian(clients=2, n=3, d=4, n_test=4)
TABLE = pd.DataFrame({"method": ["a", "b", "c"] * 3, "seed": np.repeat([0, 1, 2], 3)}).assign(
    accuracy=[5, 7, 8.2, 7, 9.1, 10, 6, 8, 9.1]
)
HOSTILE_TABLE = TABLE.assign(method=TABLE["method"].map(dict(zip("abc", NAMES, strict=False))))


def outputs() -> xr.DataArray:
    """Samples of six series, of which one has an atom."""
    x = xr.DataArray(np.random.default_rng(0).normal(size=(30, 6)), dims=("client", "unit"))
    x[:12, 2] = 0
    return x.assign_coords(unit=list("abcdef"))


def leaked() -> xr.Dataset:
    """What two runs leak in two rounds, drawn at random."""
    rng = np.random.default_rng(0)
    five = ("run", "round", "labels", "client", "image")
    size = {"run": 2, "round": 2, "labels": 1, "client": 4, "image": 2}
    data = {name: (five, rng.normal(12, 1, size=[*size.values()])) for name in ("psnr", "other", "distance")}
    image = ("channel", "row", "column")
    return xr.Dataset(
        data
        | {
            "label_right": (five, np.ones([*size.values()], bool)),
            "class_mean_psnr": (five[3:], np.full((4, 2), 12.0)),
            "recovered": ((*five, *image), rng.uniform(size=(*size.values(), 3, 2, 2))),
            "original": ((*five[3:], *image), rng.uniform(size=(4, 2, 3, 2, 2))),
        },
        {"run": NAMES[:2], "labels": ["given"], "round": [10, 20]},
    )


def replicated() -> xr.DataArray:
    """The weights with a second model of every client."""
    noise = xr.zeros_like(W) + np.random.default_rng(1).normal(size=W.shape)
    return xr.concat([W, W + noise], "replicate")


def trained(seed: int, mu: float) -> xr.DataTree:
    """A run of one round."""
    data = fedstat.sim.generate(clients=3, d=4, m=5, n_train=8, n_test=4)
    net, method = fedstat.fl.nets.mlp([4, 5, 1]), fedstat.fl.algorithms.fedprox(mu=mu)
    return fedstat.fl.train(data, net, method, rounds=1, seed=seed)


def split_while_trained() -> xr.DataTree:
    """A run of two rounds that splits its hidden layer."""
    data = fedstat.sim.generate(clients=4, d=4, m=6, n_train=8, n_test=4)
    net, method = fedstat.fl.nets.mlp([4, 6, 1]), fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.5)
    return fedstat.fl.train(data, net, method, rounds=2)


MADE: dict[str, Callable[[], Result]] = {
    "BootstrapResult": lambda: fedstat.bootstrap(W, n_factors=2, n_boot=5),
    "ClientClustersResult": lambda: fedstat.client_clusters(W, n_clusters=2, groups=list("aabbcc"), n_permutations=9),
    "ComparisonResult": lambda: fedstat.compare(HOSTILE_TABLE, reference=NAMES[0]),
    "ComponentsResult": lambda: fedstat.variance_components(replicated()),
    "ConvergenceResult": lambda: fedstat.ntk.convergence(DATA, widths=[8], rounds=2, replicates=2),
    "EffectiveRankResult": lambda: fedstat.effective_rank(W),
    "EntropyResult": lambda: fedstat.knn_entropy(outputs(), ties="atoms"),
    "ExtremeEigenvalues": lambda: fedstat.ntk.extreme_eigenvalues(fedstat.ntk.kernel(np.eye(3))),
    "FactorResult": lambda: fedstat.fa(fedstat.layer_matrix(W), n_factors=2),
    "GeneralizationResult": lambda: fedstat.ntk.generalization(DATA, width=8, rounds=2, replicates=2),
    "GroupIccResult": lambda: fedstat.icc(W, groups=np.repeat(NAMES[:3], 2), claim="these groups"),
    "IccResult": lambda: fedstat.icc(W),
    "JackknifeResult": lambda: fedstat.jackknife(W, n_factors=2),
    "LeakageResult": lambda: LeakageResult(leaked()),
    "NFactorsResult": lambda: fedstat.n_factors(fedstat.layer_matrix(W), draws=2),
    "PermutationResult": lambda: fedstat.permutation_test(W, n_factors=2, n_permutations=5),
    "RunsResult": lambda: fedstat.study.compare_runs([trained(seed, mu) for seed in range(2) for mu in (0.1, 1.0)]),
    "SplitMapResult": lambda: fedstat.split_map(W, kappas=(0.5, 0.75), methods=("pa", "pc", "icc")),
    "SplitResult": lambda: fedstat.split(W, n_factors=2),
    "StoredSplitResult": lambda: fedstat.split(split_while_trained(), layer="fc1"),
    "SensitivityResult": lambda: fedstat.sensitivity(W, n_starts=0, kappas=(0.5,)),
}


@cache
def made(name: str) -> Result:
    """A result of the class of this name; results never change, so one serves all tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return MADE[name]()
