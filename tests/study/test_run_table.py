"""What a run says in one row, against sums done by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from fl_stores import grid, write
from numpy.testing import assert_allclose

import fedstat
from fedstat import store
from fedstat.fl import algorithms, nets, train
from fedstat.study import collect, report, run_metrics, run_table
from fedstat.study.collect import origin


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedstat.open_run(write(tmp_path_factory.mktemp("runs") / "a.zarr")).load()


def test_accuracies_are_weighted_by_test_samples(run):
    accuracy, n = run["metrics/accuracy"].to_numpy(), run["metrics/n_test"].to_numpy()
    by_round = [float(np.dot(a, n) / n.sum()) for a in accuracy]
    windows = [np.mean(by_round[i : i + 10]) for i in range(15)]
    found = run_table.row(run)
    assert_allclose(found["best10"], max(windows))
    assert found["best10_round"] == int(np.argmax(windows)) + 10
    assert_allclose(found["last10"], np.mean(by_round[-10:]))


def test_the_validated_round_is_chosen_without_test_data(run):
    n, found = run["metrics/n_train"].to_numpy(), run_table.row(run)
    validation = run["metrics/validation_accuracy"].to_numpy() @ n / n.sum()
    assert found["validated_round"] == int(validation.argmax()) + 1
    assert_allclose(found["validation"], validation.max())
    at = run["metrics/accuracy"].to_numpy()[validation.argmax()]
    assert_allclose(found["validated"], np.average(at, weights=run["metrics/n_test"]))


def test_optimism_is_what_choosing_ten_rounds_on_test_data_gains(run):
    mean = run_metrics.weighted(run["metrics/accuracy"].to_numpy(), run["metrics/n_test"].to_numpy())
    validation = run_metrics.weighted(run["metrics/validation_accuracy"].to_numpy(), run["metrics/n_train"].to_numpy())
    windows = [slice(i, i + 10) for i in range(15)]
    chosen = max(windows, key=lambda w: validation[w].mean())
    found = run_table.row(run)["optimism"]
    assert_allclose(found, max(mean[w].mean() for w in windows) - mean[chosen].mean(), atol=1e-12)
    assert found >= 0


def test_clients_and_costs_are_summed_up(run):
    last = run["metrics/accuracy"].to_numpy()[-10:].mean(0)
    found = run_table.row(run)
    expected = [last.mean(), last.std(ddof=1), np.quantile(last, 0.1)]
    assert_allclose([found[name] for name in ("unweighted", "spread", "q10")], expected)
    assert found["bytes_up"] == 24 * 1000
    assert_allclose(found["seconds"], np.median(run["metrics/seconds"]))
    before = run["metrics/accuracy_before"].to_numpy()[-10:]
    n = np.where(np.isfinite(before), run["metrics/n_test"].to_numpy(), 0)
    assert_allclose(found["before"], np.mean(np.nansum(before * n, axis=1) / n.sum(1)))


def test_a_curve_weighs_active_clients_by_their_training_samples(run):
    loss, n = run["metrics/train_loss"].to_numpy(), run["metrics/n_train"].to_numpy()
    on = np.isfinite(loss[3])
    found = run_table.curve(run)
    assert_allclose(found["train_loss"][3], np.average(loss[3][on], weights=n[on]))


def test_rounds_that_were_not_evaluated_do_not_count(tmp_path):
    run = fedstat.open_run(write(tmp_path / "a.zarr", evaluate_every=5, rounds=25))
    mean = run_metrics.weighted(run["metrics/accuracy"].to_numpy(), run["metrics/n_test"].to_numpy())
    assert np.isfinite(mean).sum() == 5
    pairs = [(mean[i] + mean[i + 5]) / 2 for i in (4, 9, 14, 19)]
    assert_allclose(run_table.row(run)["best10"], max(pairs))
    assert_allclose(run_table.row(run)["last10"], pairs[-1])


def test_a_window_of_few_evaluations_is_not_picked():
    mean = np.full(30, 0.5)
    mean[:9], mean[9] = np.nan, 0.9
    assert run_table.best_window(mean)[0] == pytest.approx((0.9 + 8 * 0.5) / 9)  # nine of ten are enough, one is not
    assert np.isnan(run_table.best_window(np.full(3, np.nan))[0])


@pytest.mark.parametrize("rounds", [1, 6, 9])
def test_a_run_of_fewer_than_ten_rounds_is_judged_by_its_last_and_has_no_mean_of_ten(tmp_path, rounds):
    """The mean over all of its rounds holds the first ones, in which nothing is learned yet."""
    run = fedstat.open_run(write(tmp_path / "a.zarr", rounds=rounds))
    found = run_table.row(run)
    assert np.isnan([found["best10"], found["last10"], found["optimism"]]).all()
    last = run["metrics/accuracy"].to_numpy()[-1]
    assert_allclose(found["final"], np.average(last, weights=run["metrics/n_test"]))
    assert_allclose(found["unweighted"], last.mean())
    before, n = run["metrics/accuracy_before"].to_numpy()[-1], run["metrics/n_test"].to_numpy()
    there = np.isfinite(before)
    assert_allclose(found["before"], np.average(before[there], weights=n[there]))
    text = report.report(run)
    assert f"  {found['final']:.3f}  round {rounds}\n" in text
    assert f"Over clients, round {rounds}: mean" in text
    assert "mean of" not in text
    assert report.line(run).startswith(f"test accuracy {found['final']:.4f} (last round)")


def test_the_report_says_how_many_of_ten_rounds_were_evaluated(tmp_path):
    sparse = fedstat.open_run(write(tmp_path / "a.zarr", evaluate_every=5, rounds=25))
    assert "Means are over evaluated rounds only: 2 of the last 10" in report.report(sparse)
    assert "evaluated rounds" not in report.report(fedstat.open_run(write(tmp_path / "b.zarr")))


def test_without_validation_data_the_validated_accuracy_is_unknown(tmp_path):
    found = run_table.row(fedstat.open_run(write(tmp_path / "a.zarr", validation_fraction=0.0)))
    assert np.isnan([found["validated"], found["validation"], found["optimism"]]).all()
    assert np.isfinite(found["best10"])


def test_a_run_of_the_trainer_is_read(tmp_path):
    data = fedstat.sim.generate(clients=4, d=5, m=6, n_train=20, n_test=10)
    algorithm = algorithms.fedfac(["fc1"], kappa=0.7)
    train(data, nets.mlp([5, 6, 1]), algorithm, rounds=3, batch_size=5, out=tmp_path / "a.zarr")
    found = collect.collect([tmp_path / "a.zarr"]).table.iloc[0]
    assert (found["method"], found["layers"], found["kappa"], found["tau"]) == ("fedfac-dynamic", "fc1", 0.7, 0.5)
    assert found["rounds"] == 3
    assert 0 <= found["final"] <= 1


def test_a_grid_is_one_row_a_run_and_unfinished_runs_are_named(tmp_path):
    grid(tmp_path, seeds=2, methods=("fedavg", "fedfac-dynamic"))
    write(tmp_path / "half.zarr", finish=False, seed=9)
    found = collect.collect(tmp_path)
    assert len(found.table) == 8
    assert found.table.groupby(["scenario", "method"])["seed"].apply(list).tolist() == [[0, 1]] * 4
    assert found.unfinished == (str(tmp_path / "half.zarr"),)


def test_scales_are_not_mixed(tmp_path):
    write(tmp_path / "a.zarr")
    write(tmp_path / "b.zarr", rounds=12, lr=0.01, seed=1)
    with pytest.raises(ValueError, match=r"they differ in rounds \(24, 12\)"):
        collect.collect(tmp_path)
    write(tmp_path / "c.zarr", scenario="another", rounds=12)
    assert len(collect.collect([tmp_path / "a.zarr", tmp_path / "c.zarr"]).table) == 2


def test_each_method_has_one_learning_rate_which_is_named(tmp_path):
    write(tmp_path / "a.zarr")
    write(tmp_path / "b.zarr", algorithm="fedper", lr=0.01)
    found = collect.collect(tmp_path)
    assert "lr 0.001 (FedPer: 0.01)" in origin(found)[0]
    assert "lr 0.01;" in origin(collect.select(found, ["method=fedper"]))[0]
    write(tmp_path / "c.zarr", algorithm="fedper", lr=0.001, seed=1)
    with pytest.raises(
        ValueError, match=r"runs of fedper, .* cannot stand in one table: they differ in lr \(0.01, 0.001\)"
    ):
        collect.collect(tmp_path)


def test_what_is_not_a_run_of_the_trainer_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        collect.collect(tmp_path)
    store.create(tmp_path / "other.zarr", {}, store.provenance("other", {}, command="other")).finish()
    with pytest.raises(ValueError, match=r"other\.zarr: must be a run that"):
        collect.collect(tmp_path)


def test_of_equal_values_the_first_in_the_network_is_chosen():
    config = {"shapes": {"b.weight": [3, 2], "a.weight": [2, 3]}}
    rows = pd.DataFrame({"layers": ["a", "b", "b,a"], "tau": [0.5, 0.25, 0.75], "validation": [0.7, 0.7, 0.6]})
    assert run_table.chosen(rows, "layers", config) == "b"
    assert run_table.chosen(rows, "tau", config) == 0.25
    with pytest.raises(ValueError, match="tau is chosen on validation data, but these runs have none"):
        run_table.chosen(rows.assign(validation=np.nan), "tau", config)


def test_a_damaged_run_is_named_by_a_table_of_many(tmp_path):
    path = write(tmp_path / "a.zarr")
    chunk = path / "metrics" / "accuracy" / "c.0.0"
    for damaged in (chunk.read_bytes()[:9], chunk.read_bytes()[:-1] + b"?"):
        chunk.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"a.zarr is damaged.*emove it and run again"):
            collect.collect(tmp_path)


def test_a_method_that_a_store_names_by_a_file_is_not_executed(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("raise SystemExit('this file was run')\n", encoding="utf-8")
    assert collect.about(f"{mine}:method").title == "mine.py:method"
    assert collect.title_of(f"{mine}:method+") == "mine.py:method+"
