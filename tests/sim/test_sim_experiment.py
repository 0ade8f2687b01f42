"""The main job: python -m fedstat.sim."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import xarray as xr
from prints import require_golden
from scipy import stats
from small_runs import same

from fedstat import sim, store
from fedstat.fl import algorithms, nets, train
from fedstat.reporting import report
from fedstat.sim import experiment
from fedstat.sim.__main__ import main
from fedstat.sim.experiment import METHODS, TITLES
from fedstat.sim.model8 import replicate_seed

SMALL = {"clients": 6, "d": 10, "m": 12, "n_train": 20, "n_test": 20, "rounds": 2, "replicates": 3}
FLAGS = [part for name, value in SMALL.items() for part in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def run():
    return sim.study(p=[0.25, 0.5], alpha=0.4, **SMALL)


def test_every_cell_is_there(run):
    accuracy = run["metrics/accuracy"]
    assert dict(accuracy.sizes) == {"p": 2, "alpha": 1, "method": 8, "replicate": 3, "round": 2, "client": 6}
    assert np.isfinite(accuracy).all()
    assert (run["metrics/rounds_done"] == 2).all()
    assert tuple(run["metrics"]["method"].values) == METHODS


def test_a_cell_is_what_the_trainer_gives_on_the_same_data(run):
    seed = replicate_seed(0, 2)
    data = sim.generate(clients=6, d=10, m=12, n_train=20, n_test=20, p=0.5, alpha=0.4, seed=seed)
    table = {
        "true": algorithms.fedsplit({"fc1": data["unit_shared"].values}),
        "dynamic": algorithms.fedfac(["fc1"], tau=0.5),
        "fedavg": algorithms.fedavg(),
    }
    for method, algorithm in table.items():
        alone = train(
            data, nets.mlp([10, 12, 1]), algorithm, rounds=2, local_epochs=5, batch_size=10, lr=0.05, seed=seed
        )
        cell = run["metrics/accuracy"].sel({"p": 0.5, "alpha": 0.4, "replicate": 2, "method": method})
        np.testing.assert_array_equal(cell, alone["metrics/accuracy"])


def test_studies_of_neighbouring_seeds_have_no_replicate_in_common():
    studies = [sim.Settings(seed=seed) for seed in range(100)]
    assert len({study.replicate_seed(r) for study in studies for r in range(100)}) == 10_000
    assert studies[7].replicate_seed(0) == 7, "the first is what generate(seed=7) draws"


def test_a_study_with_another_factoring_method_is_resumed_extended_and_reported(tmp_path, capsys):
    out, file = tmp_path / "run.zarr", tmp_path / "study.toml"
    small = SMALL | {"replicates": 1, "rounds": 1, "methods": ["true", "dynamic"]}
    sim.study(out=out, method="pc", **small)
    assert store.config_of(out)["method"] == "pc"
    file.write_text('method = "pc"\n' + "\n".join(f"{k} = {json.dumps(v)}" for k, v in small.items()))
    assert main(["--config", str(file), "--out", str(out), "--resume", "--replicates", "2", "--quiet"]) == 0
    assert main(["--out", str(out), "--resume", "--quiet"]) == 0
    assert "pc, kappa = 0.85" in capsys.readouterr().out
    alone = sim.study(method="pc", **small | {"replicates": 2})
    xr.testing.assert_equal(store.open_run(out)["metrics/accuracy"].load(), alone["metrics/accuracy"])
    with pytest.raises(ValueError, match=r"other settings \(method: 'pc' stored, 'pa' now\)"):
        sim.study(out=out, resume=True, method="pa", **small | {"replicates": 2})
    assert "--method pc" in report(out).html
    file.write_text('estimator = "pc"\n')
    with pytest.raises(SystemExit):
        main(["--config", str(file), "--out", str(tmp_path / "other.zarr")])
    assert "'estimator'" in capsys.readouterr().err


def test_every_split_has_the_true_size_and_its_limits(run):
    shared = run["split/fc1/shared"].sum("unit")
    for p, size in ((0.25, 3), (0.5, 6)):
        for method in METHODS[:6]:
            assert (shared.sel({"p": p, "method": method}) == size).all(), method
        assert (shared.sel({"p": p, "method": "fedavg"}) == 12).all()
        assert (shared.sel({"p": p, "method": "local"}) == 0).all()


def test_only_moving_splits_move(run):
    same = sim.prop_unchanged(run).mean(["p", "alpha", "replicate", "round"])
    for method in ("true", "oracle", "static", "random", "fedavg", "local"):
        assert same.sel({"method": method}) == 1
    assert same.sel({"method": "random-redrawn"}) < 0.9


def test_the_table_is_the_paired_comparison_scipy_makes(run):
    table = sim.summary(run).set_index(["p", "method"])
    values = run["metrics/accuracy"].isel(round=-1, alpha=0).mean("client").sel(p=0.5)
    fedavg, true = (values.sel({"method": m}).values for m in ("fedavg", "true"))
    row = table.loc[(0.5, "fedavg")]
    assert row["accuracy"] == pytest.approx(fedavg.mean())
    assert row["std_error"] == pytest.approx(stats.sem(fedavg), rel=1e-5)
    interval = stats.ttest_rel(fedavg, true).confidence_interval(0.95)
    assert row["difference_low"] == pytest.approx(interval.low, rel=1e-5)
    assert row["difference_high"] == pytest.approx(interval.high, rel=1e-5)
    assert row["replicates"] == 3


def test_the_oracle_column_is_that_of_recovery(run):
    table = sim.summary(run)
    found = sim.recover(p=[0.25, 0.5], kappa=0.85, methods="pa", clients=6, d=10, m=12, replicates=3)
    for p in (0.25, 0.5):
        mine = table[table["p"] == p]["auc"].unique()
        assert mine == pytest.approx(float(found["auc"].sel(p=p).mean()))


def test_the_report_fits_80_columns(run):
    text = experiment.report(run)
    assert max(map(len, text.splitlines())) <= 80
    for method in METHODS:
        assert f"\n  {TITLES[method]} " in text


def test_the_report_is_its_golden_file():
    run = sim.study(p=0.5, methods=["true", "oracle", "random-redrawn", "fedavg"], **SMALL | {"rounds": 4})
    accuracy = run["metrics/accuracy"].copy()
    values = np.random.default_rng(0).normal(0.8, 0.05, accuracy.shape).astype(np.float32)  # no training, no rounding
    values[:, :, 1] = values[:, :, 0]
    run["metrics/accuracy"] = accuracy.copy(data=values)
    require_golden("sim", experiment.report(run))
    run["metrics/rounds_done"] = run["metrics/rounds_done"].where(lambda done: done["replicate"] < 2, 0)
    assert "Incomplete: 2 of 3 replicates finished" in experiment.report(run)


def test_a_split_that_equals_the_true_one_in_every_replicate_has_no_interval(run):
    accuracy = run["metrics/accuracy"].copy()
    accuracy.loc[{"method": "oracle"}] = accuracy.sel({"method": "true"})
    accuracy.loc[{"method": "static", "p": 0.5}] = accuracy.sel({"method": "true", "p": 0.5}) + np.float32(0.01)
    alike = run.assign(metrics=xr.DataTree(run["metrics"].to_dataset().assign(accuracy=accuracy), children={}))
    table = sim.summary(alike).set_index(["p", "method"])
    assert table.loc[(0.5, "oracle"), "difference"] == 0
    assert table.loc[[(0.5, "oracle"), (0.25, "oracle"), (0.5, "static")], "equal"].all()
    assert table.loc[[(0.5, "oracle"), (0.5, "static")], ["difference_low", "difference_high"]].isna().all(axis=None)
    assert not table.loc[(0.5, "fedavg"), "equal"]
    assert np.isfinite(table.loc[(0.5, "fedavg"), "difference_low"])
    text = experiment.report(alike)
    assert "+0.000, equal in all replicates" in text
    assert "+0.010, equal in all replicates" in text
    assert "[+0.000, +0.000]" not in text


def test_one_replicate_has_no_standard_error():
    run = sim.study(p=0.5, methods=["true", "local"], **(SMALL | {"replicates": 1, "rounds": 1}))
    row = sim.summary(run).iloc[1]
    assert np.isfinite(row["difference"])
    assert np.isnan(row["std_error"])
    assert "nan" not in experiment.report(run)


def command(*flags, **options):
    env = os.environ | {"PYTHONWARNINGS": "error"}
    return subprocess.Popen(
        [sys.executable, "-m", "fedstat.sim", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options,
    )  # fmt: skip


def wait_for_rounds(path, at_least):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if store.open_run(path)["metrics/rounds_done"].sum() >= at_least:
                return
        except (FileNotFoundError, KeyError):
            pass
        time.sleep(0.05)
    raise TimeoutError


LONG = [*FLAGS, "--rounds", "40", "--methods", "true", "dynamic", "random-redrawn", "--p", "0.2", "0.5", "--quiet"]


@pytest.mark.slow  # torture kills a study of the same kind before every change to a file
def test_a_killed_study_resumes_to_the_numbers_of_an_uninterrupted_one(tmp_path, capsys):
    killed, whole = tmp_path / "killed.zarr", tmp_path / "whole.zarr"
    first = command(*LONG, "--out", str(killed))
    wait_for_rounds(killed, 50)
    with pytest.raises(SystemExit):
        main(["--out", str(killed), "--resume", "--quiet"])
    assert f"{killed} is being written by another process" in capsys.readouterr().err
    assert first.poll() is None, "the first goes on"
    first.send_signal(signal.SIGKILL)
    first.communicate()
    done = store.open_run(killed)["metrics/rounds_done"].values
    assert 0 < done.sum() < 40 * done.size
    finished = np.isfinite(store.open_run(killed)["metrics/accuracy"]).all("client").sum("round")
    assert (finished >= done).all()

    assert main([*LONG, "--out", str(whole)]) == 0
    assert main(["--out", str(killed), "--resume", "--quiet"]) == 0
    a, b = store.open_run(whole), store.open_run(killed)
    same(a, b)


def test_ctrl_c_leaves_with_130_and_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    out, plain, rounds = tmp_path / "run.zarr", experiment._run, itertools.count(1)

    def interrupted(job, n_rounds, index, writer, observers, tick):
        def tick_or_stop():
            tick()
            if next(rounds) == 5:
                raise KeyboardInterrupt

        plain(job, n_rounds, index, writer, observers, tick_or_stop)

    monkeypatch.setattr(experiment, "_run", interrupted)
    assert main([*LONG, "--rounds", "3", "--out", str(out)]) == 130
    assert f"--out {out} --resume" in capsys.readouterr().err
    assert store.open_run(out)["metrics/rounds_done"].values[0, 0].tolist() == [[3, 0, 0], [2, 0, 0], [0, 0, 0]]


def test_the_command_prints_the_table_and_where_the_run_is(tmp_path, capsys):
    out, plot = tmp_path / "run.zarr", tmp_path / "run.png"
    assert main([*FLAGS, "--replicates", "2", "--out", str(out), "--plot", str(plot), "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "Oracle (split from the true weights): AUC" in text
    assert f"fedstat.open_run('{out}')" in text
    assert plot.stat().st_size > 10_000
    config = json.loads(store.open_run(out).attrs["config"])
    assert config["clients"] == 6
    assert config["rounds"] == 2


def test_settings_come_from_a_file_and_the_command_line_wins(tmp_path, capsys):
    toml = tmp_path / "study.toml"
    base = "clients = 4\nd = 8\nm = 8\nmethods = ['true']\nreplicates = 1\n"
    toml.write_text(base + "[tiny]\nrounds = 1\n[long]\nrounds = 9\n")
    out = tmp_path / "run.zarr"
    flags = ["--config", str(toml), "--scale", "tiny", "--clients", "3", "--out", str(out), "--quiet"]
    assert main(flags) == 0
    config = store.config_of(out)
    assert (config["clients"], config["d"], config["rounds"], config["methods"]) == (3, 8, 1, ["true"])
    capsys.readouterr()
    for bad, where, message in (
        (["--scale", "huge"], "new.zarr", "--scale must be one of 'tiny', 'long', but got 'huge'"),
        (["--scale", "tiny", "--resume"], "run.zarr", "other settings (clients: 3 stored, 4 now)"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["--config", str(toml), *bad, "--out", str(tmp_path / where)])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_an_existing_store_is_not_overwritten(tmp_path, capsys):
    sim.study(**SMALL | {"rounds": 1, "replicates": 1, "methods": ["true"]}, out=tmp_path / "run.zarr")
    (tmp_path / "folder").mkdir()
    for name, says in (("run.zarr", "Add --resume, choose another path"), ("folder", "it is left as it is")):
        with pytest.raises(SystemExit):
            main(["--out", str(tmp_path / name)])
        assert f"{name} exists already" in (said := capsys.readouterr().err)
        assert says in said


def test_a_study_that_diverges_at_once_says_so_and_leaves_nothing(tmp_path, capsys):
    out = tmp_path / "run.zarr"
    assert main([*FLAGS, "--lr", "1e30", "--out", str(out), "--quiet"]) == 1
    said = capsys.readouterr().err
    assert "training diverged in round 1" in said
    assert "Nothing is written." in said
    assert not out.exists()


def test_thread_count_is_left_as_it_was():
    before = torch.get_num_threads()
    sim.study(p=0.5, methods=["fedavg"], threads=2, client_chunk=2, **(SMALL | {"replicates": 1, "rounds": 1}))
    assert torch.get_num_threads() == before
