"""Prints of runs of made-up numbers, as golden files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from fl_stores import write
from prints import require_golden

import fedstat
from fedstat.study.report import report


def made_up(folder: Path) -> xr.DataTree:
    """A run with a split layer, as ``python -m fedstat.fl`` names it."""
    label = "digits, dirichlet:0.1"
    return fedstat.open_run(
        write(folder / "run.zarr", algorithm="fedfac-dynamic", scenario=label, weights=True, new=True, ablation=True)
    ).load()


def probed(folder: Path) -> xr.DataTree:
    """A short run, evaluated in every other round, with a probe of split halves, other rules and a choice of B."""
    run = fedstat.open_run(
        write(folder / "run.zarr", algorithm="fedavg-shrunken", rounds=12, evaluate_every=2, participation=1)
    ).load()
    rng, clients, layers = np.random.default_rng(0), run["metrics"].sizes["client"], ["fc1", "fc2"]
    coords = {"round": range(1, 13), "client": range(clients), "layer": layers}
    squares = {name: (tuple(coords), rng.chisquare(40, (12, clients, 2)) * scale) for name, scale in (
        ("between", [0.6, 3.0]), ("within", [0.5, 0.5]))}  # fmt: skip
    sizes = {"n_train": ("client", run["metrics/n_train"].to_numpy().astype(int)), "n_weights": ("layer", [40, 12])}
    run["probe"] = xr.DataTree(xr.Dataset(squares | sizes, coords))
    run["choice"] = xr.DataTree(xr.Dataset({"step": (("round", "layer"), np.full((12, 2), [0.25, 1.0]))}, {
        "round": range(1, 13), "layer": layers}))  # fmt: skip
    accuracy, step = (
        rng.uniform(0.6, 0.8, (2, clients)),
        np.broadcast_to([[[1.0, 1.0]], [[0.25, 1.0]]], (2, clients, 2)),
    )
    run["prediction_rules"] = xr.DataTree(
        xr.Dataset(
            {"accuracy": (("rule", "client"), accuracy), "step": (("rule", "client", "layer"), step)},
            {"rule": ["fedavg+", "fedavg-shrunken:by=layer"], "client": range(clients), "layer": layers},
        )
    )
    return run


@pytest.mark.parametrize(("name", "make"), [("fl", made_up), ("fl-probes", probed)])
def test_a_run_prints_its_golden_file(name, make, tmp_path):
    require_golden(name, report(make(tmp_path)))
