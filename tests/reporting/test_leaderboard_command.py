"""The command leaderboard: it trains what is missing, adds users' algorithms, and says what its tables lack and why."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from fedstat import open_run
from fedstat.reporting.leaderboard import main, name_methods
from fedstat.study import Settings, experiment, grid

COMMON = """
clients = 6
max_samples = 30
rounds = 3
validation_fraction = 0.2
unseen_fraction = 0.2
keep_weights = "none"
net_options = ["hidden=8"]
"""
GRID = (
    COMMON
    + """
seeds = [0, 1]
[tune]
lr = [0.03, 0.3]
seeds = [0]
[[dataset]]
scenario = "skewed"
[[dataset]]
scenario = "even"
partition = "iid"
[[method]]
sweep = { algorithm = ["fedavg", "fedavg+"] }
"""
)
ALONE = COMMON + '[[method]]\nsweep = { algorithm = ["fedavg", "ditto"] }\n'
OWN = """
import torch
from fedstat.fl.algorithm import About, Algorithm, SharedMask

def biases(*, strength=1.0):
    def init_mask(context):
        return SharedMask({name: torch.tensor(not name.endswith("bias")) for name in context.net.shapes})
    return Algorithm("biases", init_mask, settings={"strength": strength})

def titled():
    return Algorithm("titled", about=About("Averaging of mine"))

def twin():
    return Algorithm("twin", about=About("Averaging of mine"))

def fedavg_again():
    return Algorithm("again", about=About("FedAvg"))

def broken():
    def init_mask(context):
        raise RuntimeError("no mask today")
    return Algorithm("broken", init_mask)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(GRID)
    (tmp_path / "alone.toml").write_text(ALONE)
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def run(*arguments, status=0):
    assert main([*map(str, arguments), "--quiet"]) == status


def stores(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("*.zarr/zarr.json")}


def test_the_command_trains_what_is_missing_and_adds_algorithms_later(folder, capsys):
    run("--config", "own.toml")
    said = capsys.readouterr().out
    assert "With the tuned settings:\n8 runs in runs/own, 4 new, 4 finished\n" in said
    assert "no test of ranks: it needs 2 settings and 3 methods" in said
    assert max(map(len, said.splitlines())) <= 80
    before = stores(folder / "runs/own")
    assert len(before) == 2 * 2 * 2 + 4  # two candidates of the first seed, and the best one of the second
    run("--config", "own.toml", "--tables", "t/board")
    assert "8 runs in runs/own, 0 new, 8 finished\n" in capsys.readouterr().out
    assert stores(folder / "runs/own") == before
    added = ["--add", "own.py:biases", "--add", "own.py:titled"]
    run("--config", "own.toml", *added, "--tables", "t/board", "--plot", "board.png", "--reference", "own.py:titled")
    said = " ".join(capsys.readouterr().out.split())
    after = stores(folder / "runs/own")
    assert (before.items() <= after.items(), len(after)) == (True, 24)
    assert "Friedman's test over 2 settings" in said
    assert said.count("lr, the best of 2 (0.03, 0.3)") == 1, "a note stands once"
    assert "Less Averaging of mine" in said
    assert (folder / "board.png").stat().st_size > 10_000
    tables = {name: pd.read_csv(f"t/board-{name}.csv") for name in ("ranks", "settings", "pairs")}
    assert "own.py:biases" in (folder / "t/board-settings.md").read_text()
    settings = tables["settings"]
    assert list(settings["method"].unique()) == ["fedavg", "fedavg+", "Averaging of mine", "own.py:biases"]
    for row in settings.to_dict("records"):
        algorithm = {"Averaging of mine": "titled", "own.py:biases": "biases"}.get(row["method"], row["method"])
        scores = [best_on_validation(path.parent) for path in after if is_run(path.parent, algorithm, row)]
        assert len(scores) == 2
        assert row["accuracy"] == pytest.approx(np.mean(scores))
    wide = settings.pivot(index="scenario", columns="method", values="accuracy")
    ranks = tables["ranks"].set_index("method")["mean_rank"]
    expected = scipy.stats.rankdata(-wide.to_numpy(), axis=1).mean(0)
    assert ranks[wide.columns].tolist() == pytest.approx(expected.tolist())
    assert set(tables["pairs"]["reference"]) == {"Averaging of mine"}


def is_run(path, algorithm, row):
    config = experiment.settings_of(path)
    return (config["algorithm"].rpartition(":")[2], config["scenario"], config["lr"]) == (
        algorithm, row["scenario"], row["lr"]
    )  # fmt: skip


def best_on_validation(path):
    """Mean test accuracy over clients, weighted by samples, in the best round on validation samples, by hand."""
    metrics = open_run(path)["metrics"].to_dataset()
    means = {
        name: (metrics[name] * metrics[n]).sum("client") / metrics[n].sum()
        for name, n in (("accuracy", "n_test"), ("validation_accuracy", "n_validation"))
    }
    return float(means["accuracy"][means["validation_accuracy"].to_numpy().argmax()])


@pytest.mark.usefixtures("folder")
def test_a_grid_of_one_seed_and_one_data_set_without_tuning_says_what_is_missing(capsys):
    run("--config", "alone.toml", "--add", "own.py:titled", "--out", "single")
    said = " ".join(capsys.readouterr().out.split())
    assert "3 runs in single, 3 new" in said
    assert (
        "no test of ranks: it needs 2 settings and 3 methods, and ranks that differ, but the grid has 1 setting" in said
    )
    assert "no setting was tuned: every method has the settings of the grid's file" in said
    assert "Add a table [tune]" in said
    assert "one seed, so no standard error" in said
    assert "fewer than 3 pairs, so no interval and no test: ditto, Averaging of mine" in said
    assert "Less FedAvg" in said
    with pytest.raises(SystemExit, match="2"):
        run("--config", "alone.toml", "--plot", "x.png")
    assert "--plot draws mean ranks of at least 3 methods over 2 scenarios, but alone.toml has 2 and 1" in (
        capsys.readouterr().err
    )


def test_runs_that_fail_or_diverge_are_named_and_the_others_are_compared(folder, capsys):
    (folder / "alone.toml").write_text(f'{ALONE}[[method]]\nalgorithm = "fedprox"\nlr = 1e30\n')
    run("--config", "alone.toml", "--add", "own.py:broken", "--add", "own.py:titled", "--out", "single", status=1)
    shown = capsys.readouterr()
    said = " ".join(shown.out.split())
    assert "own.py:broken, seed 0: failed, RuntimeError: no mask today (own.py, line 21)" in said
    missing = "missing runs: FedProx diverged in digits, dirichlet:0.1, seed 0; own.py:broken failed in digits"
    assert missing in said
    ranking = said[said.index("Best first") : said.index("mean rank: over")]
    assert all(name in ranking for name in ("FedAvg", "Ditto", "Averaging of mine"))
    assert "FedProx" not in ranking
    (folder / "alone.toml").write_text(f'{COMMON}[[method]]\nalgorithm = "own.py:broken"\n')
    with pytest.raises(SystemExit, match="2"):
        run("--config", "alone.toml", "--out", "none")
    assert (
        "no run of the grid can be compared: own.py:broken failed in digits, dirichlet:0.1, seed 0"
        in capsys.readouterr().err
    )


def test_methods_of_which_all_candidates_diverge_are_named(folder, capsys):
    tuned = f"{ALONE}[[method]]\nalgorithm = 'fedprox'\nmu = 1e30\n[tune]\nlr = [0.1, 0.3]\n"
    (folder / "alone.toml").write_text(tuned)
    run("--config", "alone.toml", "--out", "single", status=1)
    said = " ".join(capsys.readouterr().out.split())
    assert "missing runs: FedProx all candidates failed in digits, dirichlet:0.1, seed 0" in said


def test_methods_that_do_not_take_the_tuned_setting_stand_beside_those_that_do(folder, capsys):
    sweep = 'algorithm = ["fedavg", "fedprox"]'
    text = COMMON + f"[tune]\nmu = [0.1, 1.0]\ntogether = true\n[[method]]\nsweep = {{ {sweep} }}\n"
    (folder / "alone.toml").write_text(text)
    run("--config", "alone.toml", "--add", "own.py:biases", "--add", "own.py:broken", "--out", "single", status=1)
    shown = capsys.readouterr()
    said = " ".join(shown.out.split())
    assert "own.py:broken, seed 0: failed, RuntimeError: no mask today (own.py, line 21)" in said
    assert "every method but FedAvg, own.py:biases, own.py:broken, which lack the setting, is tuned for all" in said
    assert "mu, the best of 2 (0.1, 1)" in said
    (folder / "alone.toml").write_text(text.replace("mu = [0.1, 1.0]", "kappa = [0.5, 0.9]"))
    with pytest.raises(SystemExit, match="2"):
        run("--config", "alone.toml", "--out", "none")
    assert "no method of the grid takes kappa" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "options", "says"), [
    (("validation_fraction = 0.2", ""), [], "alone.toml must set validation_fraction, because validation samples"),
    (("", ""), ["--reference", "fedprox"], "--reference must be one of 'fedavg', 'ditto', but got 'fedprox'"),
    (("", ""), ["--add", "own.py:twins"], "what follows own.py: in algorithm must be one of"),
    (("", ""), ["--scale", "paper"], "scale must be one of"),
    (('[[method]]', '[[method]]\nalgorithm = "local"\nparticipation = 0.5\n[[method]]'), [],
     "cannot stand in one table: they differ in participation"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused_before_training(folder, capsys, change, options, says):
    text = (folder / "alone.toml").read_text()
    (folder / "alone.toml").write_text(text.replace(*change, 1))
    with pytest.raises(SystemExit, match="2"):
        run("--config", "alone.toml", *options, "--out", "single")
    assert says in capsys.readouterr().err
    assert not (folder / "single").exists()


def test_algorithms_are_added_to_all_data_sets_once(folder):
    (folder / "grid.toml").write_text(
        '[[dataset]]\nmethods = ["fedavg"]\nstudies = ["a"]\n[[dataset]]\npartition = "iid"\n'
        '[[method]]\nalgorithm = "fedavg"\nstudies = ["a"]\n[[method]]\nsweep = {algorithm = ["own.py:titled"]}\n'
    )
    added = grid.cells(folder / "grid.toml", add=["own.py:biases", "own.py:titled", "own.py:biases"])
    plain = grid.cells(folder / "grid.toml")
    assert set(plain) < set(added)
    new = [run for run in added if run not in plain]
    assert [(run.partition, run.algorithm.rpartition(":")[2], run.options) for run in new] == [
        ("dirichlet:0.1", "titled", ()), ("dirichlet:0.1", "biases", ()),
        ("iid", "biases", ()),
    ]  # fmt: skip
    of_study = grid.cells(folder / "grid.toml", study="a", add=["own.py:biases"])
    assert {run.algorithm.rpartition(":")[2] for run in of_study} == {"fedavg", "titled", "biases"}


@pytest.mark.usefixtures("folder")
def test_methods_have_titles_that_no_other_method_has():
    def names(*algorithms, **options):
        return name_methods([Settings.of(algorithm=name, **options) for name in algorithms])

    assert names("fedavg", "own.py:titled", "own.py:biases") == ["fedavg", "Averaging of mine", "own.py:biases"]
    assert names("own.py:titled", "own.py:twin") == ["own.py:titled", "own.py:twin"]
    assert names("fedavg", "own.py:fedavg_again") == ["fedavg", "own.py:fedavg_again"]
    assert names("own.py:titled+") == ["Averaging of mine+"]
    rates = [Settings.of(algorithm="own.py:titled", lr=lr, seed=seed) for seed in (0, 1) for lr in (0.1, 0.2)]
    assert name_methods(rates) == ["Averaging of mine, lr=0.1", "Averaging of mine, lr=0.2"] * 2
    strengths = [Settings.of(algorithm="own.py:biases", strength=value) for value in (1.0, 2.0)]
    assert name_methods(strengths) == ["own.py:biases, strength=1.0", "own.py:biases, strength=2.0"]
