"""Runs side by side, against the package's own comparison of a table that is put together by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from fl_stores import write
from small_runs import dense

import fedstat
from fedstat import fl, study
from fedstat.fl import algorithms, nets
from fedstat.fl.metrics import METRICS
from fedstat.study import run_metrics, run_table

SEEDS = range(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    for seed in SEEDS:
        for label in "AB":
            write(path / f"{label}-fedavg-{seed}.zarr", seed=seed, scenario=label)
            write(path / f"{label}-fedper-{seed}.zarr", seed=seed, scenario=label, algorithm="fedper")
        write(path / f"A-fedper-slow-{seed}.zarr", seed=seed, scenario="A", algorithm="fedper", lr=0.0001, gain=0.03)
    write(path / "A-unfinished.zarr", seed=7, scenario="A", finish=False)
    return path


def test_a_folder_is_compared_within_seeds_as_the_table_of_its_runs_is(folder):
    found = study.compare_runs(folder)
    rows = pd.DataFrame(
        run_table.row(fedstat.open_run(path)) | {"name": path.stem} for path in sorted(folder.glob("A-fed*.zarr"))
    )
    rows["method"] = rows["name"].str.extract("A-(.*)-")[0].map(
        {"fedavg": "fedavg", "fedper": "fedper, lr=0.001", "fedper-slow": "fedper, lr=0.0001"}
    )  # fmt: skip
    expected = fedstat.compare(rows, reference="fedavg", value="last10").table.set_index("method")
    one = found.scenarios["A"]
    pd.testing.assert_frame_equal(one.table.set_index("method").loc[expected.index], expected, rtol=1e-12)
    assert list(one.table["method"]) == ["fedavg", "fedper, lr=0.0001", "fedper, lr=0.001"]
    means = rows.groupby("method")[["q10", "bytes_up", "bytes_down", "seconds"]].mean()
    costs = found.costs[found.costs["scenario"] == "A"].set_index("method")
    np.testing.assert_allclose(costs.loc[means.index, means.columns], means)
    counts = found.table.set_index("method").loc["fedper, lr=0.001", ["n", "n_pairs"]]
    assert counts.tolist() == [3, 6], "seeds, each a mean over the settings"
    assert found.missing == ("A-unfinished.zarr: unfinished",)
    assert "Warning: 1 run is not compared: A-unfinished.zarr" in repr(found)
    text = repr(found)
    assert "difference from fedavg within seeds [95 %" in text
    assert f"{expected.loc['fedper, lr=0.001', 'difference']:+.4f}" in text


def test_labels_paths_and_runs_in_memory_mean_the_same(folder):
    names = ("fedavg", "fedper")
    paths = {name: [folder / f"A-{name}-{seed}.zarr" for seed in SEEDS] for name in names}
    mixed = {name: [fedstat.open_run(own[0]), *map(str, own[1:])] for name, own in paths.items()}
    every = [path for own in paths.values() for path in own]
    expected = study.compare_runs(paths, reference="fedper").table.set_index("method")
    for runs in (mixed, dict(reversed(mixed.items())), every):
        found = study.compare_runs(runs, reference="fedper")
        pd.testing.assert_frame_equal(found.table.set_index("method").loc[list(names)], expected)
    named = study.compare_runs({"ours": paths["fedper"][:1], "theirs": paths["fedavg"][:1]})
    assert (named.reference, list(named.table["method"])) == ("ours", ["ours", "theirs"])
    alone = study.compare_runs(paths["fedper"][0])
    assert alone.glance()["n_methods"].item() == 0
    assert "A (1 seed)" in repr(alone)


def test_two_settings_of_a_method_are_told_apart_by_what_differs():
    data = dense()
    how = {"rounds": 1, "batch_size": 8}
    runs = [fl.train(data, nets.mlp([6, 4, 1]), algorithms.fedprox(mu=mu), lr=lr, **how)
            for mu, lr in ((1.0, 0.1), (0.1, 0.1), (0.1, 0.2))]  # fmt: skip
    assert study.compare_runs(runs).table["method"].tolist() == [
        "fedprox, mu=0.1, lr=0.1", "fedprox, mu=0.1, lr=0.2", "fedprox, mu=1.0, lr=0.1"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"several runs of fedprox, run, seed 0.*Give them labels"):
        study.compare_runs([runs[0], runs[0]])
    other = fl.train(dense(seed=1), nets.mlp([6, 4, 1]), algorithms.fedavg(), **how)
    with pytest.raises(ValueError, match="run 1 and run 4 have the seed 0 but other samples"):
        study.compare_runs([*runs, other])


def test_what_cannot_be_compared_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match=r"reference must be one of 'fedavg', .*Did you mean 'fedavg'"):
        study.compare_runs(folder, reference="fedavgg")
    with pytest.raises(
        ValueError, match=r"there is no finished run: 1 run is not compared: A-unfinished\.zarr: unfinished"
    ):
        study.compare_runs(folder / "A-unfinished.zarr")
    with pytest.raises(FileNotFoundError):
        study.compare_runs(tmp_path)
    with pytest.raises(ValueError, match=r"paths or what fedstat.fl.train returned, but got int"):
        study.compare_runs(3)


@pytest.fixture(scope="module")
def measured():
    """Runs with metrics; test samples of the last client are of one class."""
    data = dense()
    y = data.y.to_numpy()
    y[-1, 24:] = 1
    data["y"] = data.y.dims, y
    how = {"rounds": 3, "batch_size": 8, "metrics": [*METRICS]}
    return [
        fl.train(data, nets.mlp([6, 4, 1]), method, seed=seed, **how)
        for method in (algorithms.fedavg(), algorithms.fedper()) for seed in SEEDS
    ]  # fmt: skip


@pytest.mark.parametrize("measure", ["balanced_accuracy", "macro_f1", "auc", "class_accuracy_1"])
def test_any_measure_is_compared_as_in_the_table_of_runs(measured, measure):
    rows = pd.DataFrame(map(run_table.row, measured))
    for run, value in zip(measured, rows[measure], strict=True):
        last, weight = run["metrics"].to_dataset().isel(round=-1), run["metrics/n_test"]
        if measure == "class_accuracy_1":
            last, weight = last["class_accuracy"].sel({"class": 1}), run["clients/n_test"].sel({"class": 1})
        else:
            last = last[measure]
        is_defined = np.isfinite(last)
        np.testing.assert_allclose(value, np.average(last[is_defined], weights=weight[is_defined]), rtol=1e-6)
    expected = fedstat.compare(rows, reference="fedavg", value=measure).table
    found = study.compare_runs(measured, measure=measure)
    pd.testing.assert_frame_equal(found.table, expected, rtol=1e-12)
    clients = run_table.clients(measured[0], measure)[measure].dropna()
    assert len(clients) == (4 if measure == "auc" else 5)
    by_method = found.costs.set_index("method")["q10"]
    assert by_method["fedavg"] == pytest.approx(
        np.mean([run_table.clients(run, measure)[measure].quantile(0.1) for run in measured[:3]])
    )
    title = run_metrics.title_of(measure)
    assert str(found).startswith(f"{title[0].upper()}{title[1:]}, the last evaluated round: mean ± standard error")
    assert ("AUC is undefined for 1 client of a run" in " ".join(found.summary().split())) == (measure == "auc")
    assert all(len(line) <= 90 for line in str(found).split("\n"))


def test_a_measure_that_runs_lack_is_refused(measured, folder):
    with pytest.raises(ValueError, match=r"run 1: measure must be one of 'accuracy'.*Did you mean 'macro_f1'"):
        study.compare_runs(measured, measure="f1_macro")
    with pytest.raises(ValueError, match=r"Did you mean 'class_accuracy_0' or 'class_accuracy_1'"):
        study.compare_runs(measured, measure="class_accuracy")
    for measure in ("auc", "class_accuracy_1"):
        with pytest.raises(ValueError, match=r"did not measure '(auc|class_accuracy)', but accuracy. Train with"):
            study.compare_runs(folder, measure=measure)
    one_class = dense(clients=2)
    one_class["y"] = one_class.y * 0
    run = fl.train(one_class, nets.mlp([6, 4, 1]), algorithms.fedavg(), rounds=1, metrics="auc")
    with pytest.raises(ValueError, match=r"auc is undefined for all 2 clients"):
        study.compare_runs(run, measure="auc")
