"""Small runs of the commands that stream to a store, to be killed, cut off and damaged; and how to tell runs alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import scipy.signal
import scipy.special
import scipy.stats
import sklearn.datasets
import sklearn.metrics
import torch
import xarray as xr

import fedstat.store.files
from fedstat import motivation, sim, store
from fedstat.fl import algorithms, nets, train
from fedstat.store import Writer
from fedstat.store.journal import Journal

# What jobs import when they first need it: a forked child should not import it again.
IMPORTED = (scipy.signal, scipy.special, scipy.stats, sklearn.datasets, sklearn.metrics, torch, fedstat.store.files)
SIZES = {"clients": 3, "d": 4, "m": 6, "n_train": 12, "n_test": 6, "local_epochs": 1, "batch_size": 6}
ROUNDS = 5
TIMES = ("seconds", "started", "ended")


def study(out: Path, replicates: int = 2) -> None:
    """A simulation study of four runs."""
    sim.study(**SIZES, methods=["true", "dynamic"], rounds=3, replicates=replicates, out=out, resume=True, threads=1)


def trained(out: Path, rounds: int = ROUNDS) -> None:
    """One run of the trainer, with a split that moves, checkpoints and an ablation."""
    data = sim.generate(clients=4, d=5, m=8, n_train=12, n_test=6, seed=1)
    train(
        data, nets.mlp([5, 8, 1]), algorithms.fedfac(["fc1"], kappa=0.7), rounds=rounds, batch_size=6, lr=0.05,
        participation=0.75, optimizer="adam", optimizer_state="keep", checkpoints=(2,), ablation=2, threads=1,
        out=out, resume=True,
    )  # fmt: skip


def more(out: Path) -> None:
    """The study, finished with one replicate and made longer; what cut this off may have done so before or after."""
    store.settle(out)
    if not out.exists() or store.config_of(out)["replicates"] == 1:
        study(out, replicates=1)
    study(out)


def longer(out: Path) -> None:
    """The run of the trainer, finished after three rounds and made longer."""
    store.settle(out)
    if not out.exists() or store.config_of(out)["rounds"] == 3:
        trained(out, rounds=3)
    trained(out)


def motivating(out: Path) -> None:
    """The motivating study, of two cases."""
    motivation.study(clients=10, hidden=6, local_epochs=1, replicates=2, out=out, resume=True, threads=1)


def replaced(out: Path) -> None:
    """A result that takes the place of another."""
    attrs = store.provenance("second", {"number": 2}, command="made up")
    store.save(out, xr.DataTree.from_dict({"/a": RESULT + 1}), attrs, overwrite=True)


RESULT = xr.Dataset({"x": (("unit",), np.arange(6.0))}, {"unit": np.arange(6)})


def large() -> xr.Dataset:
    """A result of a megabyte, which does not compress."""
    return xr.Dataset({"x": (("unit",), np.random.default_rng(0).random(125_000))})


STREAMED: dict[str, Callable[[Path], None]] = {
    "sim": study, "fl": trained, "motivation": motivating, "sim, longer": more, "fl, longer": longer
}  # fmt: skip


SLOW = {"sim, longer", "fl, longer"}
"""Jobs whose kills and power cuts are tried in the slow tests alone."""


def at_every_turn() -> None:
    """Commit, and save the state, after every round: in these runs time must not decide."""
    import_module("fedstat.sim.experiment").__dict__["_COMMIT_SECONDS"] = -1.0
    import_module("fedstat.fl.ledger").__dict__.update(_COMMIT_SECONDS=-1.0, _SAVE_SECONDS=-1.0, _SAVE_FRACTION=1e9)


def quietly(job: Callable[[Path], None], out: Path) -> list[str]:
    """Do the job; the warnings of damage that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job(out)
    return [str(one.message) for one in caught if "damaged" in str(one.message)]


def values(path: Path) -> dict[str, np.ndarray]:
    """All that a store holds but times."""
    run = store.open_run(path, verify=True).load()
    found = {f"{node.path}/{name}": v.values for node in run.subtree for name, v in node.variables.items()}
    return {name: v for name, v in found.items() if name.rpartition("/")[2] not in TIMES}


def require_same(path: Path, expected: dict[str, np.ndarray]) -> None:
    """The store is complete and holds what an undisturbed run's does, and beside it stands nothing."""
    assert "ended" in store.open_run(path).attrs
    found = values(path)
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
    left = [p.relative_to(path.parent).as_posix() for p in path.parent.rglob("*") if not p.is_relative_to(path)]
    assert not left, left
    state = ["state"] if store.attributes(path)["command"] == "fedstat.fl" else []
    assert sorted(p.name for p in (path / "journal").iterdir()) == ["log", *state, "zarr.json"]


def held(writer: Writer) -> int:
    """Rounds, or cases, that a store holds."""
    for name in ("metrics/rounds_done", "outputs/done"):
        if name in writer._root:
            return int(writer.read(name).sum())
    return int(np.isfinite(writer.read("metrics/seconds")).sum())


def recovered(path: Path) -> int:
    """Rounds, or cases, of which a killed run's store has kept the numbers; 0 where there is no store."""
    store.settle(path)
    if not path.exists():
        return 0
    with Writer(path, Journal(path)) as writer:
        return held(writer)
