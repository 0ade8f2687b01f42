"""What guarding costs: reading a run beside xarray, which checks nothing; of weights bench_read_weights.py says it."""

from __future__ import annotations

import matplotlib as mpl
import pytest
import xarray as xr

import fedstat
from fedstat import sim
from fedstat.fl import algorithms, nets, train

mpl.use("Agg")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A run of 1,000 rounds."""
    data, path = sim.generate(clients=20, d=20, m=20, n_test=10, seed=0), tmp_path_factory.mktemp("files") / "run.zarr"
    settings = {"rounds": 1000, "local_epochs": 1, "batch_size": 10, "lr": 0.05, "threads": 1}
    train(data, nets.mlp([20, 10, 1]), algorithms.fedavg(), **settings, out=path)
    return path


def bench_open_a_run_of_1000_rounds(compare, path):
    def plain():
        return xr.open_datatree(path, engine="zarr", consolidated=False).load()

    compare("open_run and load", lambda: fedstat.open_run(path).load(), plain, "xarray.open_datatree", rounds=15)


def bench_report_of_a_run_of_1000_rounds(compare, path):
    tree = fedstat.open_run(path).load()
    compare("report", lambda: fedstat.report(path), lambda: fedstat.report(tree), "of a run in memory", rounds=5)
