"""Real-valued targets in settings, grids, tuning, comparisons, reports, leaderboard: the smallest error is best."""

from __future__ import annotations

import contextlib
import io
import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import fedstat
from fedstat import plot, store
from fedstat.fl import __main__ as cli
from fedstat.study import (
    Settings,
    collect,
    compare_runs,
    experiment,
    federation,
    grid,
    leaderboard,
    run,
    run_metrics,
    run_table,
)

GRID = """
data = "own.csv"
target = "price"
client_column = "hospital"
standardize = true
validation_fraction = 0.2
unseen_fraction = 0.2
net_options = "hidden=8"
rounds = 3
seeds = [0, 1]
[tune]
lr = [0.00001, 0.05]
seeds = [0]
[[dataset]]
scenario = "natural"
partition = "natural"
[[dataset]]
scenario = "deciles"
partition = "dirichlet:0.5"
clients = 6
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "ditto"
[[method]]
algorithm = "fedper"
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = np.random.default_rng(0)
    x, hospital = rng.normal(size=(240, 4)) * [1, 10, 100, 1], rng.integers(0, 6, 240)
    price = 100 + 20 * (x / [1, 10, 100, 1] @ rng.normal(size=4) + 0.5 * hospital + 0.1 * rng.normal(size=240))
    path = tmp_path_factory.mktemp("table") / "own.csv"
    frame = pd.DataFrame(x, columns=list("abcd")).assign(price=price, hospital=[f"h{k}" for k in hospital])
    frame.to_csv(path, index=False)
    return path


OWN = {"target": ["price"], "client_column": "hospital", "partition": "natural", "rounds": 2, "net_options": "hidden=8"}


@pytest.fixture(scope="module")
def runs(table):
    """The folder of a tuned grid, made by the command, and what the command printed."""
    file, out, printed = table.parent / "grid.toml", table.parent / "runs", io.StringIO()
    file.write_text(GRID)
    with contextlib.redirect_stdout(printed):
        assert cli.main(["--config", str(file), "--tuned", "--out", str(out), "--quiet"]) == 0
    return file, out, printed.getvalue()


def test_features_and_targets_are_standardized_by_the_training_samples(table):
    settings = Settings.of(data=str(table), standardize=True, validation_fraction=0.2, **OWN)
    plain, _ = experiment.federated(settings.but(standardize=False))
    fed, _ = experiment.federated(settings)
    train = fed.isel(sample=np.flatnonzero(fed["split"] == "train"))
    for name in ("x", "y"):
        values = train[name].to_numpy()
        np.testing.assert_allclose(values.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(values.std(0), 1, atol=1e-5)
        back = fed[name].to_numpy() * fed[name].attrs["sd"] + fed[name].attrs["mean"]
        np.testing.assert_allclose(back, plain[name], rtol=1e-4, atol=1e-4)
    stored = run(settings.but(store_predictions=True))
    np.testing.assert_allclose(
        stored["predictions/y"][stored["predictions/client"] == "h0"],
        plain["y"][((plain["client"] == 0) & (plain["split"] == "test")).to_numpy()], rtol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("value", [7.5, 3.3])
def test_a_column_that_does_not_vary_becomes_zero(value, table, tmp_path):
    pd.read_csv(table).assign(e=value).to_csv(path := tmp_path / "own.csv", index=False)
    fed, _ = experiment.federated(Settings.of(data=str(path), standardize=True, **OWN))
    assert not fed["x"].sel(feature="e").to_numpy().any()


def test_unseen_clients_do_not_enter_the_scaling(table):
    settings = Settings.of(data=str(table), standardize=True, unseen_fraction=0.4, **OWN)
    fed, unseen = experiment.federated(settings)
    train = fed.isel(sample=np.flatnonzero(fed["split"] == "train"))
    np.testing.assert_allclose([float(train["y"].mean()), float(train["y"].std())], [0, 1], atol=1e-6)
    assert unseen["y"].attrs == fed["y"].attrs
    whole = run(settings.but(data=str(table)))
    assert np.isfinite(whole["unseen_clients/rmse"]).all()


def test_features_far_from_zero_keep_their_digits(table, tmp_path):
    frame = pd.read_csv(table)
    moved = {}
    for shift in (0.0, 1.7e9):
        frame.assign(a=frame["a"] + shift).to_csv(path := tmp_path / "own.csv", index=False)
        moved[shift] = experiment.federated(Settings.of(data=str(path), standardize=True, **OWN))[0]["x"].to_numpy()
    np.testing.assert_allclose(moved[1.7e9], moved[0.0], atol=1e-5)


def test_two_values_are_real_targets_after_scaling_too(table, tmp_path):
    frame = pd.read_csv(table)
    frame.assign(price=np.where(frame["price"] > 100, 1.5, 0.5)).to_csv(path := tmp_path / "own.csv", index=False)
    stored = run(Settings.of(data=str(path), standardize=True, **OWN))
    assert np.isfinite(stored["metrics/rmse"]).all()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_errors_are_printed_with_four_digits_at_every_scale(scale, table, tmp_path):
    frame = pd.read_csv(table)
    frame.assign(price=frame["price"] * scale).to_csv(path := tmp_path / "own.csv", index=False)
    runs = [run(Settings.of(data=str(path), standardize=True, algorithm=a, seed=s, **OWN))
            for a in ("fedavg", "fedper") for s in (0, 1)]  # fmt: skip
    text = repr(compare_runs(runs))
    assert max(map(len, text.splitlines())) <= 80
    divisor = {1e-6: "RMSE / 1e-6", 1.0: "RMSE  ", 1e6: "RMSE / 1e6"}[scale]
    assert divisor in text
    shown = [float(number) for number in re.findall(r"([\d.]+) ± ", text)]
    means = [float(np.mean([run_table.row(r)["final"] for r in runs[i : i + 2]])) for i in (0, 2)]
    np.testing.assert_allclose(shown, np.array(means) / scale, rtol=1e-3)


def test_clients_differ_in_deciles_of_the_target_as_they_do_in_classes(table):
    settings = {"data": str(table), "target": ["price"], "clients": 6, "rounds": 1, "seed": 1}
    spread = {}
    for partition in ("iid", "dirichlet:0.05", "pathological:2", "one-class"):
        settings |= {"clients": 10} if partition == "one-class" else {}
        fed, _ = experiment.federated(Settings.of(partition=partition, **{**settings, "client_column": "hospital"}))
        means = [float(fed["y"][fed["client"] == c].mean()) for c in np.unique(fed["client"])]
        spread[partition] = np.std(means)
    assert spread["iid"] < min(spread["dirichlet:0.05"], spread["pathological:2"], spread["one-class"]) / 2
    stratified, _ = experiment.federated(
        Settings.of(partition="iid", stratify=True, client_column="hospital", **settings)
    )
    decile = pd.qcut(stratified["y"].to_numpy(), 10, labels=False)
    counts = pd.DataFrame({"client": stratified["client"], "decile": decile, "test": stratified["split"] == "test"})
    of_cell = counts.groupby(["client", "decile"])["test"].agg(["sum", "size"])
    assert (abs(of_cell["sum"] - 0.2 * of_cell["size"]) < 1.1).all()


def test_tuning_selects_the_smallest_validation_error(runs):
    _, out, printed = runs
    assert "validation, std_error: mean validation RMSE over seeds, which decides, and\nits SE; rmse:" in printed
    rows = [line.split() for line in printed.splitlines() if line.split()[-1:] in (["True"], ["False"])]
    assert len(rows) == 12
    for low, high in zip(rows[::2], rows[1::2], strict=True):
        assert (low[-1], high[-1]) == ("False", "True")
        assert float(low[1]) > float(high[1])
    assert "With the tuned settings:\n12 runs in " in printed
    assert len(store_paths(out)) == 18


def store_paths(out):
    return sorted(path for path in out.iterdir() if path.suffix == ".zarr")


def test_the_row_of_a_run_takes_the_smallest_errors(runs):
    tree = fedstat.open_run(store_paths(runs[1])[0])
    row, metrics = run_table.row(tree), tree["metrics"].to_dataset()
    weights, size = metrics["n_test"].to_numpy(), metrics["n_validation"].to_numpy()
    mean = np.array([np.average(v, weights=weights) for v in metrics["rmse"].to_numpy()])
    validation = np.array([np.average(v, weights=size) for v in metrics["validation_rmse"].to_numpy()])
    assert row["measure"] == "rmse"
    assert row["validated_round"] == validation.argmin() + 1
    assert row["validated"] == pytest.approx(mean[validation.argmin()])
    assert row["final"] == pytest.approx(mean[-1])
    last = metrics["rmse"].to_numpy()[-1]
    assert row["q10"] == pytest.approx(np.quantile(last.astype(float), 0.9))
    assert row["r2"] == pytest.approx(np.average(metrics["r2"][-1], weights=weights))


def test_the_best_ten_rounds_of_errors_are_the_smallest():
    mean = np.r_[np.linspace(3, 1, 12), np.linspace(1, 2, 8)]
    metrics = {"rmse": ("round client", mean[:, None])}
    data = xr.Dataset({"rmse": (("round", "client"), metrics["rmse"][1])}, {"round": np.arange(1, 21), "client": [0]})
    score = run_metrics.SCORES["regression"]
    by_rule = run_table._by_rules(data, mean, "rmse", score)
    windows = np.lib.stride_tricks.sliding_window_view(mean, 10).mean(1)
    assert by_rule["best10"] == pytest.approx(windows.min())
    assert by_rule["best10_round"] == windows.argmin() + 10


def test_methods_are_compared_by_their_errors(runs):
    paths = [path for path in store_paths(runs[1]) if store.config_of(path)["lr"] == 0.05]
    found = compare_runs(paths)
    assert found.measure == "rmse"
    text = repr(found)
    assert "Test RMSE (smaller is better), the last evaluated round" in text
    assert "10 % above: RMSE that a tenth of the clients exceed" in text
    assert {"mae", "r2"} <= set(run_metrics.measures(fedstat.open_run(paths[0])))
    assert compare_runs(paths, measure="r2").measure == "r2"
    with pytest.raises(ValueError, match="'auc' is of classes, but the targets are real numbers"):
        compare_runs(paths, measure="auc")
    classes = run(Settings.of(data="digits", clients=5, rounds=1, algorithm="fedavg"))
    with pytest.raises(ValueError, match="runs must have one score"):
        compare_runs([*paths, classes])


def test_the_leaderboard_ranks_the_smallest_error_first(runs):
    table = leaderboard.chosen_rates(collect.collect(runs[1], differ=("lr",)), [0])
    assert set(table.table["lr"]) == {0.05}
    found, courses = leaderboard.measure(table)
    assert {"rmse", "worst", "unseen", "optimism"} <= set(found)
    assert (found["worst"] > found["rmse"]).all()
    assert (found["optimism"] >= 0).all()
    wide, test, _ = leaderboard.ranked(found)
    assert np.array_equal(test.mean_ranks, wide.rank(axis=1).mean().to_numpy())
    targets = {str(s): float(courses.loc[courses["scenario"] == s, "rmse"].max()) for s in wide.index}
    first = leaderboard.to_reach(courses, targets, "bytes")
    assert (first["reached"] == first["seeds"]).all()
    never = leaderboard.to_reach(courses, dict.fromkeys(targets, 0.0), "bytes")
    assert never["bytes"].isna().all()
    plot.critical_difference(wide, value="RMSE")
    for x in ("round", "bytes", "elapsed"):
        assert plot.by_setting(courses, plot.method_courses, x=x).axes[0].get_ylabel() == "test RMSE"
    assert plot.by_setting(found, plot.trade_off, x="worst").axes[0].get_xlabel() == "90% quantile of RMSE over clients"
    plt.close("all")


def test_reports_and_plots_name_the_error(runs):
    paths = [path for path in store_paths(runs[1]) if store.config_of(path)["lr"] == 0.05]
    one = [path for path in paths if store.config_of(path)["scenario"] == "natural"]
    page = fedstat.report(one).html
    assert "Test RMSE" in page
    assert "ccuracy" not in page.split("References")[0].replace("Validation accuracy", "")
    single = fedstat.report(one[0]).html
    assert "RMSE by client" in single
    assert "Targets were real numbers; the loss was the squared error." in single
    assert "Wilson" not in single
    trees = {path.name: fedstat.open_run(path) for path in one[:2]}
    assert plot.score_curves(trees).get_ylabel() == "test RMSE"
    assert plot.client_boxplot(trees).get_xlabel() == "test RMSE of a client"
    assert plot.client_lines(fedstat.open_run(one[0])).get_ylabel() == "test RMSE of a client"
    assert plot.differences(compare_runs(one)).get_ylabel() == "difference in test RMSE"
    with pytest.raises(ValueError, match="the run counts no classes, as its targets are real numbers"):
        plot.partition(fedstat.open_run(one[0]))
    settings = Settings(**experiment.settings_of(one[0]))
    assert plot.partition(experiment.federated(settings)[0]).get_xlabel() == "decile of the target, from 0"
    plt.close("all")


WRONG = {
    "target of no table": ({"data": "digits", "target": ["price"]}, "target has no effect with data digits"),
    "clients of no table": (
        {"data": "digits", "client_column": "user"},
        "client_column has no effect with data digits",
    ),
    "classes": ({"data": "digits", "task": "regression"}, "task='regression' needs real-valued targets, but digits"),
    "unknown column": ({"target": ["prise"]}, "Did you mean 'price'"),
    "unknown loss": ({"loss": "hubert"}, "Did you mean 'huber'"),
    "network of texts": ({"net": "lstm"}, "holds features. Choose mlp"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_without_effect_are_refused(case, table):
    changed, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        Settings.of(**{"data": str(table), "rounds": 1} | ({} if "data" in changed else OWN) | changed)


def test_standardizing_images_is_refused():
    with pytest.raises(ValueError, match="standardize has no effect"):
        experiment.federated(Settings.of(data="digits", standardize=True, rounds=1))


def test_algorithms_that_need_classes_are_refused_by_their_name(table):
    with pytest.raises(ValueError, match="fedrod needs classes, for its balanced softmax"):
        run(Settings.of(data=str(table), algorithm="fedrod", **OWN))


def test_whole_numbers_need_a_task(table, tmp_path):
    frame = pd.read_csv(table)
    frame.assign(price=frame["price"].round()).to_csv(path := tmp_path / "own.csv", index=False)
    with pytest.raises(ValueError, match="whole numbers as float64"):
        Settings.of(data=str(path), **OWN)
    stored = run(Settings.of(data=str(path), task="regression", standardize=True, **OWN))
    assert math.isfinite(float(stored["metrics/rmse"][-1].mean()))


def test_grids_and_options_know_the_settings(runs):
    cells = grid.cells(runs[0])
    assert {(cell.target, cell.client_column, cell.standardize) for cell in cells} == {(("price",), "hospital", True)}
    assert federation.file_options(cells[0]) == (("y", "price"), ("client", "hospital"))
