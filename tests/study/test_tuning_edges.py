"""Tuning says what was selected: edges of candidates, candidates that are added, and candidates that are as good."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fl_runs import SMALL, command
from scipy import stats

from fedstat import store
from fedstat.fl import loop
from fedstat.study import Settings, grid, run_table
from fedstat.study.candidates import beyond, edge_of, is_geometric, number
from fedstat.study.tuning import check, tune

START = SMALL.but(
    algorithm="fedavg", validation_fraction=0.2, rounds=1, clients=6, keep_weights="none", optimizer="sgd"
)
FEDFAC = START.but(algorithm="fedfac-dynamic")
ROW = run_table.row


def scored(monkeypatch, score):
    """Give runs the validation score of their settings, so that a test knows which candidate is best."""

    def row(tree):
        made = ROW(tree)
        return made | {"validation": score(made)}

    monkeypatch.setattr(run_table, "row", row)


def values(step):
    return step.table["value"].tolist()


@pytest.mark.parametrize(
    ("numbers", "edge", "expected"),
    [
        ([0.001, 0.01], "largest", [0.1, 0.0316, 0.0178]),
        ([0.001, 0.01], "smallest", [0.0001, 0.000316, 0.000562]),
        ([0.01, 0.03, 0.1], "largest", [0.333, 0.183, 0.135]),
        ([0.25, 0.5, 0.75], "largest", [1.0, 0.875, 0.812]),
        ([0.0, 0.5], "smallest", [-0.5, -0.25, -0.125]),
        ([1, 2, 4], "largest", [8, 6, 5]),
        ([1, 2, 3], "largest", [4, 4, 4]),
        ([1, 2], "smallest", [0, 0, 0]),
        ([1, 20], "smallest", [0, 0, 0]),
        ([0.5, 2.0, 40.0], "largest", [800.0, 179.0, 84.6]),
        ([1, 7, 8], "largest", [9, 9, 9]),
    ],
)
def test_the_next_value_continues_ratios_or_differences_and_then_comes_nearer(numbers, edge, expected):
    found = list(beyond(numbers, edge, geometric=is_geometric(numbers)))
    assert found[:3] == expected
    assert all(isinstance(x, type(numbers[0])) for x in found)


def test_no_next_value_is_infinite_or_as_near_as_its_digits():
    assert list(beyond([1e-290, 1e290], "largest", geometric=True)) == []
    assert list(beyond([0.99921, 0.99922], "largest", geometric=False)) == []


def test_words_layers_infinity_and_truth_values_have_no_edge():
    settings = Settings.of(layers=[1, 2], tau="mean", warm_start=True)
    assert [number(name, settings) for name in ("layers", "tau", "warm_start", "estimator")] == [None] * 4
    assert number("tau", settings.but(tau=float("inf"))) is None
    assert (number("kappa", settings), number("lr", settings), number("clip", settings)) == (0.85, 0.1, None)
    assert isinstance(number("lr", settings.but(lr=1)), float)
    assert isinstance(number("components", Settings(algorithm="fedem")), int)
    assert edge_of(None, [1, 2]) is None


def test_a_number_at_the_edge_of_its_candidates_has_a_caution(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: row["lr"])
    (step,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path)
    assert (step.values, step.edge, step.near) == ({"lr": "0.1"}, {"lr": "largest"}, ())
    text = " ".join(step.summary().split())
    assert "Selected: lr = 0.1. One seed: differences between candidates have no SE. Caution: lr = 0.1 is" in text
    assert text.endswith("the largest candidate: larger values may do better; add some, or set extend = true")
    assert "added" not in text.split("Selected")[0]
    scored(monkeypatch, lambda row: -row["lr"])
    (step,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path)
    assert step.edge == {"lr": "smallest"}
    assert "smaller values may do better" in str(step.cautions[0])
    scored(monkeypatch, lambda row: -abs(row["lr"] - 0.1))
    (step,) = tune(START, {"lr": [1.0, 0.01, 0.1]}, tmp_path)
    assert (step.edge, step.cautions) == ({}, ())


def test_at_the_bound_of_a_setting_or_without_numbers_there_is_no_caution(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: row["kappa"])
    (step,) = tune(FEDFAC, {"kappa": [0.5, 1.0]}, tmp_path)
    assert (step.values, step.edge) == ({"kappa": "1.0"}, {})
    (step,) = tune(FEDFAC, {"kappa": [0.5, 0.9]}, tmp_path)
    assert step.edge == {"kappa": "largest"}  # 0.9² / 0.5 is invalid, but values between 0.9 and 1 are not
    (step,) = tune(FEDFAC, {"kappa": [0.9]}, tmp_path, extend=True)
    assert (step.edge, values(step)) == ({}, ["0.9"])
    (step,) = tune(FEDFAC, {"layers": [["fc1"]]}, tmp_path, extend=True)
    assert (step.edge, step.cautions) == ({}, ())
    scored(monkeypatch, lambda row: float(row["tau"] == "mean"))
    (step,) = tune(FEDFAC, {"tau": [0.25, 0.75, "mean"]}, tmp_path, extend=True)
    assert (step.values, step.edge) == ({"tau": "mean"}, {})


def test_the_defaults_value_is_a_number_and_is_said(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: row["kappa"])
    first, second = tune(FEDFAC, {"lr": [0.1], "kappa": [0.25, 0.5]}, tmp_path)
    assert first.edge == {}
    assert (second.values, second.edge) == ({"kappa": "default (0.85)"}, {"kappa": "largest"})


def test_candidates_are_added_until_the_best_is_interior(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: -abs(np.log10(row["lr"]) - 0))
    (step,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path, extend=True)
    assert values(step) == ["0.01", "0.1", "1.0", "10.0"]
    assert step.table["added"].tolist() == [False, False, True, True]
    assert (step.values, step.edge, step.settings[0].lr) == ({"lr": "1.0"}, {}, 1.0)
    assert "added" in " ".join(step.summary().split()).splitlines()[0]
    assert {run.lr for run in step.runs} == {0.01, 0.1, 1.0, 10.0}
    paths = sorted(tmp_path.iterdir())
    times = [path.stat().st_mtime_ns for path in paths]
    (again,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path, extend=True)
    assert again.table.equals(step.table)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.iterdir())] == times
    with ThreadPoolExecutor(2) as pool:
        (apart,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path / "apart", extend=True, executor=pool, threads=1)
    assert apart.table.equals(step.table)


def test_as_many_are_added_as_there_were_and_the_caution_stays(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: -row["lr"])
    (step,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path, extend=True)
    assert values(step) == ["0.01", "0.1", "0.001", "0.0001"]
    assert str(step.cautions[0]) == (
        "Caution: lr = 0.0001 is the smallest candidate after 2 were added: smaller values may do better; add some"
    )


def test_no_candidate_is_added_beyond_what_is_valid_or_diverged(tmp_path, monkeypatch):
    scored(monkeypatch, lambda row: row["lr"])
    (step,) = tune(START.but(algorithm="fedrep"), {"body_epochs": [1, 2]}, tmp_path, extend=True)
    assert (step.values, step.edge) == ({"body_epochs": "1"}, {})  # the first of equals, and no epoch is none
    assert values(step) == ["1", "2"]

    step_of = loop.run_round

    def diverge(job, state, cohort):
        if job.optimizer.lr > 0.5:
            raise FloatingPointError("training diverged")
        return step_of(job, state, cohort)

    monkeypatch.setattr(loop, "run_round", diverge)
    scored(monkeypatch, lambda row: row["lr"])
    (step,) = tune(START, {"lr": [0.01, 0.1]}, tmp_path, extend=True)
    assert values(step) == ["0.01", "0.1", "1.0"]
    assert (step.values, step.edge) == ({"lr": "0.1"}, {})
    assert "Failed or diverged, not selected: 1.0." in " ".join(step.summary().split())


def test_candidates_as_good_as_the_best_differ_by_at_most_one_se_within_seeds(tmp_path):
    rates, seeds = [0.05, 0.2, 0.4, 1.0], range(3)
    (step,) = tune(START, {"lr": rates}, tmp_path, seeds=seeds)
    scores = {lr: [0.0] * 3 for lr in rates}
    for path in tmp_path.glob("*.zarr"):
        tree = store.open_run(path)
        metrics, config = tree["metrics"].to_dataset(), store.config_of(path)
        clients = np.average(metrics["validation_accuracy"], weights=metrics["n_validation"], axis=1)
        scores[config["lr"]][config["seed"]] = clients.max()
    best = max(rates, key=lambda lr: np.mean(scores[lr]))
    others = [lr for lr in rates if lr != best]
    expected = [str(lr) for lr in others if abs(stats.ttest_rel(scores[best], scores[lr]).statistic) <= 1]
    assert step.settings[0].lr == best
    assert list(step.near) == expected
    np.testing.assert_allclose(step.table["std_error"], [stats.sem(scores[lr]) for lr in rates], atol=1e-7)


def test_near_candidates_are_named_in_the_sentence_and_those_worse_in_every_seed_are_not(tmp_path, monkeypatch):
    by_lr = {0.01: 0.5, 0.1: 0.59, 1.0: 0.6}
    noise = {(1.0, 1): 0.05, (1.0, 0): -0.05}
    scored(monkeypatch, lambda row: by_lr[row["lr"]] + 0.3 * row["seed"] + noise.get((row["lr"], row["seed"]), 0))
    (step,) = tune(START, {"lr": [0.01, 0.1, 1.0]}, tmp_path, seeds=(0, 1))
    # The SE of each score, 0.15 and more, would count 0.01 as near: it is from differences between seeds.
    assert step.near == ("0.1",)
    text = " ".join(step.summary().split())
    assert "Selected: lr = 1.0. Within 1 SE of its score (of differences within seeds): 0.1." in text


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"extend": 1}, "extend must be true or false, but got 1"),
        ({"budget": 3}, "budget=3 is for a search. Add search = 'optuna', or remove budget"),
    ],
)
def test_a_wrong_procedure_is_named(how, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(START, {"lr": [0.1, 1.0]}, **how)


def test_the_command_extends_as_its_file_says(tmp_path, capsys, monkeypatch):
    scored(monkeypatch, lambda row: row["lr"])
    settings = "clients = 6\nvalidation_fraction = 0.2\nmax_samples = 40\nkeep_weights = 'none'\nrounds = 1\n"
    file = tmp_path / "grid.toml"
    file.write_text(f"{settings}[tune]\nlr = [0.01, 0.1]\nextend = true\n[[method]]\nalgorithm = 'fedavg'\n")
    assert grid.tuning(file).procedure == {"extend": True}
    assert command("--config", file, "--tune", "--out", tmp_path / "runs") == 0
    printed = capsys.readouterr().out
    rows = list(itertools.takewhile(lambda line: "Selected" not in line, printed.splitlines()[2:]))
    assert [row.split()[0] for row in rows] == ["0.01", "0.1", "1.0", "10.0"]
    assert [row.split()[-2] for row in rows] == ["False", "False", "True", "True"]
    assert "Caution: lr = 10.0 is the largest candidate after 2 were added" in printed
    assert max(map(len, printed.splitlines())) <= 80
