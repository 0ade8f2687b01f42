"""What it costs that nothing is lost: runs with a journal beside the same runs with plain zarr, which syncs nothing."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import xarray as xr
import zarr

from fedstat import sim, store
from fedstat.fl import algorithms, nets, train
from fedstat.store import write

pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


class Plain:
    """A writer that leaves all to zarr and the operating system: the state is written beside the store and renamed."""

    finished, damaged, states = False, (), ()

    def __init__(self, path, groups, attrs):
        write.lay_out(path, groups, attrs)
        shutil.rmtree(path / "journal")
        self.path, self._root, self._arrays = path, zarr.open_group(path, mode="r+"), {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def write(self, name, where, values):
        if name not in self._arrays:
            self._arrays[name] = self._root[name]
        self._arrays[name][where] = values

    def read(self, name):
        return np.asarray(self._root[name])

    def write_state(self):
        return self.path.with_suffix(".state").open("wb")

    def commit(self):
        pass

    def finish(self):
        self._root.attrs.update({"ended": store.now()})


def mlp(out):
    """100 clients, 40 rounds of about a tenth of a second."""
    data = sim.generate(seed=0, n_test=20)
    net = nets.mlp([100, 200, 1])
    train(data, net, algorithms.fedfac(["fc1"]), rounds=40, local_epochs=5, batch_size=10, lr=0.05, threads=1, out=out)


def cnn(out):
    """20 clients, a network of 0.4 million weights, 30 rounds of a quarter of a second, a checkpoint in each ten."""
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 60, 1, 16, 16), np.float32), rng.integers(0, 10, (20, 60))
    data = xr.Dataset(
        {"x": (("client", "sample", "channel", "row", "column"), x), "y": (("client", "sample"), y)},
        coords={"split": ("sample", ["train"] * 50 + ["test"] * 10)},
    )
    net = nets.named("cnn", (1, 16, 16), 10, width=0.5)
    settings = {"rounds": 30, "local_epochs": 1, "batch_size": 25, "checkpoints": (10, 20), "lr": 0.01, "threads": 1}
    train(data, net, algorithms.fedavg(), **settings, out=out)


def study(out):
    """Sixteen short runs in one store."""
    sim.study(clients=20, d=20, m=40, methods=("true", "dynamic"), rounds=15, replicates=8, threads=1, out=out)


@pytest.mark.parametrize("work", [mlp, cnn, study])
def bench_durability(compare, work, monkeypatch):
    def journaled():
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            work(Path(folder) / "run.zarr")

    def plain():
        with monkeypatch.context() as patch:
            patch.setattr(store, "create", lambda path, groups, attrs: Plain(Path(path), groups, attrs))
            journaled()

    compare(f"run with a journal, {work.__name__}", journaled, plain, "plain zarr", rounds=5)


def bench_a_late_round_against_an_early_one(benchmark, capsys, tmp_path):
    """Rounds of a small network, all written: whether a store of many rounds takes longer to write to."""
    data = sim.generate(clients=20, d=20, m=20, n_test=10, seed=0)
    times = []

    def run():
        train(
            data, nets.mlp([20, 10, 1]), algorithms.fedavg(), rounds=2000, local_epochs=1, batch_size=10,
            lr=0.05, threads=1, out=tmp_path / "run.zarr", progress=lambda _: times.append(perf_counter()),
        )  # fmt: skip

    benchmark.pedantic(run, rounds=1)
    each = np.diff(times)
    early, late = (1e3 * each[low : low + 400].mean() for low in (100, 1600))
    with capsys.disabled():
        print(f"\nrounds 100 to 500: {early:.2f} ms each; 1600 to 2000: {late:.2f} ms each; ratio {late / early:.2f}")
