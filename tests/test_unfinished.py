"""Readers of unfinished runs and studies say so and how to continue, and reports hold what is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from small_runs import NET, SETTINGS, dense

import fedstat
from fedstat import _cli, fl, motivation, plot, sim, store
from fedstat.fl import algorithms
from fedstat.motivation.findings import report
from fedstat.plot import papers, simulation


@pytest.fixture(autouse=True)
def no_open_figures() -> Any:
    yield
    plt.close("all")


def unfinished(run: xr.DataTree, **missing: Any) -> xr.DataTree:
    """The run as it is before the parts with these labels are done: numbers are NaN, and flags False."""
    run = run.copy(deep=True)
    for node in run.subtree:
        for name, values in list(node.data_vars.items()):
            for dim, labels in missing.items():
                if dim in values.dims:
                    fill = np.nan if values.dtype.kind == "f" else 0
                    kept = values.where(~values[dim].isin(labels), fill).astype(values.dtype)
                    node[name] = kept.transpose(*values.dims)
    del run.attrs["ended"]
    return run


@pytest.fixture(scope="module")
def outputs() -> xr.DataTree:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return motivation.study(clients=10, hidden=6, local_epochs=1, common_samples=20, replicates=2)


MOTIVATION: dict[str, Callable[[Any], Any]] = {
    "summary": motivation.summary,
    "correlations": motivation.correlations,
    "fig1": papers.fig1,
    "fig2": papers.fig2,
    "motivation_grid": papers.motivation_grid,
    "entropies": plot.entropies,
    "relation": lambda run: papers.relation(run, case="one-class"),
}


@pytest.mark.parametrize("reader", MOTIVATION)
@pytest.mark.parametrize("missing", [["one-class"], ["iid", "one-class"]])
def test_an_unfinished_motivating_study_is_named(outputs: xr.DataTree, reader: str, missing: list[str]) -> None:
    words = f"the study is not finished: it lacks the results of {', '.join(missing)}. Continue it with resume=True"
    with pytest.raises(ValueError, match=words):
        MOTIVATION[reader](unfinished(outputs, case=missing))


def test_a_report_of_an_unfinished_motivating_study_has_the_cases_that_are_done(outputs: xr.DataTree) -> None:
    part = unfinished(outputs, case=["one-class"])
    assert "iid" in report(part, draws=9)
    assert "one-class" not in report(part, draws=9)
    for run, images in ((part, 1), (unfinished(outputs, case=["iid", "one-class"]), 0)):
        made = fedstat.report(run)
        assert made.html.count("<img ") == images
        assert "Not in this report" not in {caution.title for caution in made.cautions}


def test_a_simulation_study_without_a_finished_run_is_named() -> None:
    options = {"p": (0.5,), "methods": ("true", "fedavg"), "clients": 4, "d": 8, "m": 10, "n_train": 20}
    study = sim.study(**options, rounds=2, replicates=2, threads=1)
    nothing, part = unfinished(study, replicate=[0, 1]), unfinished(study, replicate=[1])
    for reader in (sim.summary, papers.accuracy, simulation.study_dataset, papers.study_grid):
        with pytest.raises(
            ValueError, match=r"the study is not finished: no run is done. Continue it with resume=True"
        ):
            reader(nothing)
        reader(part)
    assert sim.summary(part)["replicates"].tolist() == [1, 1]
    assert {section.title for section in fedstat.report(part).parts[0].sections} == {"Figures"}
    assert not fedstat.report(nothing).parts[0].sections


RUNS: dict[str, Callable[[Any], Any]] = {
    "split": lambda run: fedstat.split(run, kappa=0.5, stage="aggregated"),
    "icc": lambda run: fedstat.icc(run, stage="trained"),
    "effective_rank": fedstat.effective_rank,
    "client_weights": lambda run: fl.client_weights(run, "fc1"),
    "state_dict": lambda run: fl.state_dict(run, 0),
    "plot.weights": lambda run: plot.weights(run, layer="fc1"),
}


@pytest.fixture(scope="module")
def run() -> xr.DataTree:
    options = {"rounds": 3, "checkpoints": [1], "probe": "trained-weights"}
    return unfinished(fl.train(dense(), NET, algorithms.local(), **SETTINGS, **options), round=[2, 3], checkpoint=[3])


@pytest.mark.parametrize("reader", RUNS)
def test_weights_of_a_round_that_is_not_done_are_named(run: xr.DataTree, reader: str) -> None:
    with pytest.raises(
        ValueError, match=r"the run is not finished: it lacks the weights of round 3. Continue it with res"
    ):
        RUNS[reader](run)


def test_weights_of_a_round_that_is_done_are_read(run: xr.DataTree) -> None:
    assert np.isfinite(fl.client_weights(run, "fc1", checkpoint=1)).all()
    assert fedstat.icc(run, layer="fc1", stage="trained", checkpoint=1).agreement.shape


def test_a_box_plot_without_accuracies_says_why(run: xr.DataTree) -> None:
    with pytest.raises(ValueError, match=r"no accuracy in the last rounds. Continue unfinished runs with resume=True"):
        plot.client_boxplot(run)


def test_scripts_name_the_command_that_continues_a_store(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    attrs = store.provenance("t", {}, command="mine")
    store.create(path, {"outputs": store.group({"x": range(2)}, y=("x", "float64"))}, attrs).__exit__(None, None, None)
    with pytest.raises(ValueError, match=f"{path} is not finished: continue it with python -m mine --out "):
        _cli.open_store(path, "mine")
