"""What data of one's own may be, and what is said of the rest, wherever they are used."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import xarray as xr
from fl_runs import command

import fedstat
from fedstat.data import partition
from fedstat.fl import algorithms, nets
from fedstat.study import Settings, experiment

matplotlib.use("Agg")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
CLIENT, SPLIT = np.repeat(np.arange(4), 10), np.array((["train"] * 8 + ["test"] * 2) * 4, object)
NET = nets.mlp([3, 4, 2])


def samples(y: np.ndarray, **coords: Any) -> xr.Dataset:
    """Samples of four clients, whose y may have a second dim."""
    dims = ("sample", "target")[: y.ndim]
    return xr.Dataset({"x": (("sample", "feature"), X), "y": (dims, y)}, {k: ("sample", v) for k, v in coords.items()})


def dealt(y: np.ndarray) -> xr.Dataset:
    return samples(y, client=CLIENT, split=SPLIT)


def dense(y: np.ndarray) -> xr.Dataset:
    shaped = y.reshape(4, 10, *y.shape[1:])
    data = xr.Dataset({"x": (("client", "sample", "feature"), X.reshape(4, 10, 3))}, {"split": ("sample", SPLIT[:10])})
    return data.assign(y=(("client", "sample", "target")[: shaped.ndim], shaped))


def own_file(y: np.ndarray, folder: Path) -> str:
    np.savez(folder / "own.npz", x=X, y=y, client=CLIENT)
    return str(folder / "own.npz")


QUICK: dict[str, Any] = {"rounds": 1, "participation": 1.0}
SMALL: dict[str, Any] = {**QUICK, "algorithm": "fedavg", "clients": 2, "min_size": 2, "partition": "iid"}
USERS: dict[str, Callable[[np.ndarray, Path], Any]] = {
    "train": lambda y, _: fedstat.fl.train(dealt(y), NET, algorithms.fedavg(), rounds=1),
    "train, dense": lambda y, _: fedstat.fl.train(dense(y), NET, algorithms.fedavg(), rounds=1),
    "train, new clients": lambda y, _: fedstat.fl.train(
        dealt(CLIENT % 2), NET, algorithms.fedavg(), rounds=1, new=dealt(y)
    ),
    "load": lambda y, folder: fedstat.data.load(own_file(y, folder)),
    "run": lambda y, folder: experiment.run(Settings.of(**SMALL, data=own_file(y, folder))),
    "plot.partition": lambda y, _: fedstat.plot.partition(dealt(y)),
    "plot.partition, dense": lambda y, _: fedstat.plot.partition(dense(y)),
    "one_class": lambda y, _: partition.one_class(samples(y), clients=4),
    "pathological": lambda y, _: partition.pathological(samples(y), clients=4, classes_per_client=1),
    "dirichlet": lambda y, _: partition.dirichlet(samples(y), clients=4, concentration=1.0, below="move"),
    "dirichlet_equal": lambda y, _: partition.dirichlet_equal(
        samples(y, split=["train"] * 40), clients=2, concentration=1.0, n_train=2, n_test=0
    ),
    "domains": lambda y, _: partition.domains(
        samples(y, coarse=CLIENT), groups={"a": [0, 1], "b": [2, 3]}, clients_per_domain=1
    ),
    "permute_labels": lambda y, _: partition.permute_labels(dealt(y)),
    "label_table": lambda y, _: partition.label_table(dealt(y)),
}
WITHOUT_Y = {"iid", "natural", "hold_out", "limit", "train_test"}
SAYS = r"must hold class numbers 0, 1, \.\.\., but got 0\.37\. Targets that are real numbers are not supported\. Group"
TARGETS: dict[str, tuple[np.ndarray, str]] = {
    "real": (np.where(np.arange(40) == 5, 0.37, 1.0), SAYS),
    "real, as objects": (np.where(np.arange(40) == 5, 0.37, 1).astype(object), SAYS),
    "two targets": (
        np.eye(2)[CLIENT % 2],
        r"one class for each sample, with the dims .*sample, but .*one-hot classes pass|must have shape \(40,\), a value",
    ),
}  # fmt: skip


def test_every_partition_has_a_row() -> None:
    made = {name for name in partition.__all__ if inspect.isfunction(getattr(partition, name))}
    assert made == {name for name in USERS if hasattr(partition, name)} | WITHOUT_Y


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("use", USERS)
def test_targets_that_are_no_classes_are_refused(use: str, target: str, tmp_path: Path) -> None:
    y, says = TARGETS[target]
    if target.endswith("objects") and use in ("load", "run"):
        says = "cannot be read .*[Oo]bject arrays"
    with pytest.raises(ValueError, match=says):
        USERS[use](y, tmp_path)


@pytest.mark.parametrize("use", USERS)
def test_classes_may_be_whole_numbers_of_any_kind(use: str, tmp_path: Path) -> None:
    for kind in (np.int8, np.float64, bool):
        USERS[use]((CLIENT % 2).astype(kind), tmp_path)


def test_the_command_refuses_real_targets_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = own_file(RNG.normal(size=40), tmp_path)
    with pytest.raises(SystemExit) as ends:
        command("--data", path, "--algorithm", "fedavg", "--clients", 2, "--rounds", 1, "--out", tmp_path / "run.zarr")
    assert ends.value.code == 2
    assert re.search(r"y in .*own\.npz must hold class numbers 0, 1, \.\.\., but got ", capsys.readouterr().err)
