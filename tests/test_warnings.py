"""Warnings point to the line that called the package, however deep in it they arise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from layers import weights

import fedstat
from fedstat.data import partition
from fedstat.ntk import convergence

W = weights()
ONE = {"a": {"fc1.weight": W[0], "fc2.weight": W[0, :, :8]}}
SEVERAL = {f"client{i}": {"fc1.weight": w, "fc2.weight": w[:, :8]} for i, w in enumerate(W)}
ORDERED = [xr.DataArray(w, dims=("unit", "weight"), coords={"unit": np.roll(np.arange(8), i)}) for i, w in enumerate(W)]
REPLICATES = np.stack([W, W + np.random.default_rng(1).normal(size=W.shape) * (np.arange(6) > 0)[:, None, None]], 1)
SAMPLES = xr.Dataset(
    {"x": (("sample", "feature"), np.eye(4) * 2), "y": ("sample", np.arange(4.0))},
    {"client": ("sample", [0, 0, 1, 1])},
)
CLASSES = xr.Dataset({"x": (("sample", "feature"), np.zeros((60, 1))), "y": ("sample", np.arange(60) % 3)})
CLASSES = CLASSES.assign_coords(split=("sample", np.full(60, "train")))
DATA = fedstat.sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)


def update() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = fedstat.split(W, max_iter=1)
    return lambda: fedstat.update(before, W[::-1] ** 3)


CALLS: dict[str, Callable[[], Any]] = {
    "fa": lambda: fedstat.fa(W, max_iter=1),
    "fa of a matrix": lambda: fedstat.fa(fedstat.layer_matrix(W), max_iter=1),
    "split": lambda: fedstat.split(W, max_iter=1),
    "split of layers": lambda: fedstat.split(SEVERAL, max_iter=1),
    "update": update(),
    "split_map": lambda: fedstat.split_map(W[:1], methods=("pc",)),
    "bootstrap": lambda: fedstat.bootstrap(W, n_boot=2, max_iter=1),
    "permutation_test": lambda: fedstat.permutation_test(W, n_permutations=2, max_iter=1),
    "stability": lambda: fedstat.sensitivity(W[:1], method="pc"),
    "one client": lambda: fedstat.split(ONE, n_factors=1),
    "lists of arrays": lambda: fedstat.icc(ORDERED),
    "variance_components": lambda: fedstat.variance_components(REPLICATES),
    "knn_entropy": lambda: fedstat.knn_entropy(np.repeat(np.arange(20.0), 2)),
    "read_weights": lambda: fedstat.read_weights([{"q.lora_A.weight": w} for w in W]),
    "training": lambda: fedstat.fl.train(DATA, fedstat.fl.nets.mlp([8, 3, 1]), fedstat.fl.algorithms.fedbn(), rounds=1),
    "ntk": lambda: convergence(SAMPLES, widths=(8,), rounds=1, replicates=1),
    "simulation": lambda: fedstat.sim.generate(clients=3, d=4, m=6, n_train=10, n_test=5),
    "partition": lambda: partition.dirichlet_equal(CLASSES, clients=5, concentration=0.01, n_train=11, n_test=0),
}


MANAGER = """
from contextlib import contextmanager
from fedstat._utils import check

@contextmanager
def manager():
    check.warn("at the start")
    yield
    check.warn("at the end")

def use():
    with manager():
        check.warn("inside")
"""


def test_a_warning_of_a_context_manager_points_to_the_with_of_the_user() -> None:
    package: dict[str, Any] = {}
    exec(compile(MANAGER, str(Path(fedstat.__file__).parent / "manager.py"), "exec"), package)  # noqa: S102
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with package["manager"]():
            fedstat.fa(W, max_iter=1)
        package["use"]()
    assert [str(one.message)[:12] for one in said[:1]] == ["at the start"]
    assert len(said) == 6
    assert {Path(one.filename) for one in said} == {Path(__file__)}
    lines = Path(__file__).read_text().splitlines()
    assert ["with package" in lines[one.lineno - 1] for one in said] == [True, False, True, False, False, False]


@pytest.mark.parametrize("name", CALLS)
def test_a_warning_points_to_the_line_that_called_the_package(name: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        CALLS[name]()
    assert said
    assert {Path(one.filename) for one in said} == {Path(__file__)}
