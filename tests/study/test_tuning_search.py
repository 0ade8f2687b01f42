"""Search of settings by Optuna: budgets, replays, executors, edges of ranges, and wrong ranges."""

from __future__ import annotations

import logging
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
from fl_runs import SMALL, command
from small_runs import stopped

from fedstat import store
from fedstat.fl import loop
from fedstat.study import run_table
from fedstat.study import search as searches
from fedstat.study.outcomes import FailedRunsError
from fedstat.study.search import Range, check_range
from fedstat.study.tuning import check, tune

optuna = pytest.importorskip("optuna")

START = SMALL.but(
    algorithm="fedavg", validation_fraction=0.2, rounds=1, clients=6, keep_weights="none", optimizer="sgd"
)
LR = {"low": 0.001, "high": 1.0, "log": True}
SPACE = {"lr": LR, "server_lr": [0.5, 1.0]}
ROW = run_table.row


def search(settings, folder, candidates=SPACE, budget=12, **how):
    (step,) = tune(settings, candidates, folder, search="optuna", budget=budget, **how)
    return step


def of_scores(monkeypatch, score, candidates, budget, settings=START, measure="accuracy"):
    """The step of a search whose trials are not trained, but have the validation score of their settings."""

    def rows_of(tried, *_, first):
        scores = [float(score(settings)) for (settings,) in tried]
        rows = pd.DataFrame({"candidate": range(first, first + len(tried)), "validation": scores})
        return rows.assign(seed=0, validated=0.5, measure=measure)

    monkeypatch.setattr(searches, "rows_of", rows_of)
    return searches.trials([settings], candidates, [0], budget, lambda _: iter(()))


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """A folder of a search with two seeds, and its step."""
    folder = tmp_path_factory.mktemp("search")
    return folder, search(START, folder, seeds=(0, 1))


def test_a_search_has_as_many_trials_as_its_budget_and_selects_the_best_on_validation_samples(searched):
    folder, step = searched
    table = step.table
    assert table["trial"].tolist() == list(range(12))
    assert step.name == "lr, server_lr"
    assert set(table["server_lr"]) == {"0.5", "1.0"}
    rates = table["lr"].astype(float)
    assert ((rates >= 0.001) & (rates <= 1)).all()
    assert all(float(f"{x:.3g}") == x for x in rates)
    stored = pd.DataFrame([ROW(store.open_run(path)) | store.config_of(path) for path in folder.glob("*.zarr")])
    means = stored.groupby(["lr", "server_lr"])["validation"].agg(["mean", "sem"])
    of_trial = [means.loc[(float(x["lr"]), float(x["server_lr"]))] for x in table.to_dict("records")]
    pd.testing.assert_series_equal(table["validation"], pd.Series([x["mean"] for x in of_trial]), check_names=False)
    pd.testing.assert_series_equal(table["std_error"], pd.Series([x["sem"] for x in of_trial]), check_names=False)
    best = table["validation"].idxmax()
    assert table["chosen"].tolist() == [i == best for i in range(12)]
    assert step.values == {name: table[name][best] for name in SPACE}
    assert (step.settings[0].lr, step.settings[0].server_lr) == tuple(float(x) for x in step.values.values())
    assert f"(trial {best})." in " ".join(step.summary().split())
    assert max(map(len, step.summary().splitlines())) <= 80


def test_the_later_trials_learn_from_the_earlier_ones(monkeypatch):
    step = of_scores(monkeypatch, lambda settings: -settings.lr, {"lr": LR}, 30)
    rates = step.table["lr"].astype(float)
    assert rates[10:].median() < rates[:10].median() / 3


def test_a_repeated_search_replays_its_trials_and_makes_no_run(searched, monkeypatch):
    folder, step = searched
    monkeypatch.setattr(loop, "run_round", None)
    again = search(START, folder, seeds=(0, 1))
    assert again.table.equals(step.table)


@pytest.mark.parametrize("number", [3, 21])
def test_an_interrupted_search_goes_on_with_the_same_trials(number, searched, tmp_path):
    folder, step = searched
    names = {path.name for path in folder.glob("*.zarr")}
    step_of, rounds = loop.run_round, iter(range(100))

    def interrupt(job, state, cohort):
        if next(rounds) == number:
            raise KeyboardInterrupt
        return step_of(job, state, cohort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "run_round", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(START, tmp_path, seeds=(0, 1))
    before = {path.name for path in tmp_path.glob("*.zarr") if "ended" in store.attributes(path)}
    assert len(before) == number
    assert before < names
    again = search(START, tmp_path, seeds=(0, 1))
    assert again.table.equals(step.table)
    assert {path.name for path in tmp_path.glob("*.zarr")} == names


def test_an_executor_gives_the_same_trials(searched, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        apart = search(START, tmp_path, seeds=(0, 1), executor=pool, threads=1)
    assert apart.table.equals(searched[1].table)


def test_a_trial_that_diverges_is_told_as_failed_and_not_selected(tmp_path, monkeypatch):
    step_of = loop.run_round

    def diverge(job, state, cohort):
        if job.optimizer.lr > 0.1:
            raise FloatingPointError("training diverged in round 1.")
        return step_of(job, state, cohort)

    told = []
    tell = optuna.Study.tell
    monkeypatch.setattr(optuna.Study, "tell", lambda *args, **how: told.append(how) or tell(*args, **how))
    monkeypatch.setattr(loop, "run_round", diverge)
    step = search(START, tmp_path, {"lr": LR})
    rates, missing = step.table["lr"].astype(float), step.table["validation"].isna()
    assert missing.tolist() == (rates > 0.1).tolist()
    assert 0 < missing.sum() < 12
    assert [how.get("state") for how in told] == [
        optuna.trial.TrialState.FAIL if is_missing else None for is_missing in missing
    ]
    assert step.settings[0].lr <= 0.1
    with pytest.raises(FailedRunsError):
        search(START, tmp_path, {"lr": {"low": 0.2, "high": 1.0}}, budget=2)


def test_errors_are_minimized(monkeypatch):
    step = of_scores(monkeypatch, lambda settings: abs(settings.lr - 0.03), {"lr": LR}, 30, measure="rmse")
    assert step.table["validation"].idxmin() == step.table["chosen"].idxmax()
    assert "rmse" in step.table
    errors = step.table["validation"]
    assert errors[10:].median() < errors[:10].median()


@pytest.mark.parametrize(
    ("candidates", "score", "edge", "said"),
    [
        ({"lr": LR}, lambda s: s.lr, {"lr": "largest"}, "of the high end of its range, 1.0: larger values may"),
        ({"lr": LR}, lambda s: -s.lr, {"lr": "smallest"}, "low end of its range, 0.001: smaller values may"),
        ({"lr": LR}, lambda s: -abs(s.lr - 0.03), {}, ""),
        ({"kappa": {"low": 0.5, "high": 1.0}}, lambda s: s.given["kappa"], {}, ""),
        ({"kappa": {"low": 0.5, "high": 0.9}}, lambda s: s.given["kappa"], {"kappa": "largest"}, "raise high"),
        ({"kappa": {"low": 0.5, "high": 0.9, "step": 0.1}}, lambda s: -s.given["kappa"], {"kappa": "smallest"}, "low"),
        ({"kappa": [0.9, 0.5]}, lambda s: s.given["kappa"], {"kappa": "largest"}, "is the largest candidate"),
        ({"kappa": [1.0, 0.5]}, lambda s: s.given["kappa"], {}, ""),
        ({"layers": [["fc1"], ["fc2"]]}, lambda s: s.given["layers"] == "fc2", {}, ""),
    ],
)  # fmt: skip
def test_a_number_near_the_end_of_its_range_has_a_caution(candidates, score, edge, said, monkeypatch):
    algorithm = "fedavg" if "lr" in candidates else "fedfac-dynamic"
    step = of_scores(monkeypatch, score, candidates, 25, START.but(algorithm=algorithm))
    assert step.edge == edge
    assert len(step.cautions) == len(edge)
    assert said in " ".join(step.summary().split())


def test_ranges_of_integers_hold_integers_and_steps_are_kept(tmp_path):
    candidates = {"body_epochs": {"low": 1, "high": 3}, "lr": {"low": 0.1, "high": 0.4, "step": 0.1}}
    step = search(START.but(algorithm="fedrep"), tmp_path, candidates, budget=6)
    assert set(step.table["body_epochs"]) <= {"1", "2", "3"}
    assert set(step.table["lr"]) <= {"0.1", "0.2", "0.3", "0.4"}
    assert {run.given["body_epochs"] for run in step.runs} <= {1, 2, 3}
    assert check_range(START, "lr", {"low": 1, "high": 2}) == Range(1.0, 2.0)


def test_settings_that_exclude_each_other_are_named_with_their_trial(tmp_path):
    settings = START.but(algorithm="fedfac-static", estimator="icc")
    candidates = {"tau": [0.5, "test"], "estimator": ["icc", "pa"]}
    with pytest.raises(ValueError, match=r"trial \d of the search combines tau=test, estimator=pa, which exclude each"):
        search(settings, tmp_path, candidates)


WRONG = {
    "lr = { low = 1.0, high = 0.1 }": "low of the range of lr must be less than high, but got 1.0 and 0.1",
    "lr = { low = 0.1, high = 0.1 }": "low of the range of lr must be less than high",
    "lr = { low = 0, high = 0.1, log = true }": "low of the range of lr is 0. Raise low, or remove log",
    "lr = { low = 0, high = 0.1 }": "lr must be a finite number in (0, inf), but got 0",
    "lr = { low = 0.1 }": "the range of lr needs high, such as lr = { low = 0.001",
    "lr = { high = 0.1 }": "the range of lr needs low",
    "lr = { low = 0.1, hihg = 1.0 }": "the range of lr cannot hold the key 'hihg', but low, high, log, step. Did you",
    "lr = { low = 'a', high = 1.0 }": "low of the range of lr must be a finite number in (-inf, inf), but got 'a'",
    "lr = { low = 0.1, high = inf }": "high of the range of lr must be a finite number in (-inf, inf), but got inf",
    "lr = { low = 0.1, high = 1.0, log = 1 }": "log of the range of lr must be true or false, but got 1",
    "lr = { low = 0.1, high = 1.0, step = 0 }": "step of the range of lr must be a finite number in (0, inf)",
    "lr = { low = 0.1, high = 1.0, step = 0.4 }": "high of the range of lr must be low plus a multiple of step",
    "lr = { low = 0.1, high = 1.0, step = 1e-320 }": "high of the range of lr must be low plus a multiple of step",
    "lr = { low = 0.1, high = 1.0, step = 0.1, log = true }": "log and step, which exclude each other",
    "lr = []": "needs a list of candidates, but lr has []",
    "lr = [0.1, 0.1]": "twice",
    "lr = {}": "the range of lr needs low",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_ranges_are_named_before_any_run(line, tmp_path, capsys):
    refused(f"search = 'optuna'\nbudget = 3\n{line}", WRONG[line], tmp_path, capsys)


PROCEDURES = {
    "lr = [0.1]\nsearch = 'optuna'": "needs a budget, the number of trials per method. Add budget = 20",
    "lr = [0.1]\nsearch = 'optuna'\nbudget = 0": "budget must be an integer >= 1, but got 0",
    "lr = [0.1]\nsearch = 'optuna'\nbudget = 2.5": "budget must be an integer >= 1, but got 2.5",
    "lr = [0.1]\nsearch = 'optunna'\nbudget = 2": "search must be one of 'optuna', but got 'optunna'. Did you mean",
    "lr = [0.1]\nsearch = true\nbudget = 2": "search must be one of 'optuna', but got True",
    "lr = [0.1]\nsearch = 'optuna'\nbudget = 2\nextend = true": "extend is for lists of candidates",
    "lr = [0.1]\nbudget = 2": "budget=2 is for a search",
    "lr = { low = 0.1, high = 1.0 }": "lr has a range of candidates, {'low': 0.1, 'high': 1.0}, which needs search",
    "lr = [0.1]\nserach = 'optuna'": "cannot hold the key 'serach'. Did you mean 'search'",
    "lr = [0.1]\nbudgt = 2": "cannot hold the key 'budgt'. Did you mean 'budget'",
}


@pytest.mark.parametrize("lines", PROCEDURES)
def test_wrong_searches_are_named_before_any_run(lines, tmp_path, capsys):
    refused(lines, PROCEDURES[lines], tmp_path, capsys)


def test_without_the_package_one_line_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = "search = 'optuna' needs Optuna, which is not installed"
    line = refused("lr = [0.1]\nsearch = 'optuna'\nbudget = 2", said, tmp_path, capsys)
    assert line.endswith("pip install 'fedstat[optuna]'")
    check(START, {"lr": [0.1]})  # lists need no package


def grid_file(folder, tune_table):
    settings = "clients = 6\nvalidation_fraction = 0.2\nmax_samples = 40\nkeep_weights = 'none'\nrounds = 1\n"
    methods = "[[method]]\nalgorithm = 'fedavg'\n[[method]]\nalgorithm = 'fedper'\n"
    (folder / "grid.toml").write_text(f"{settings}[tune]\n{tune_table}\n{methods}")
    return folder / "grid.toml"


def refused(tune_table, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command("--config", grid_file(tmp_path, tune_table), "--tune", "--out", tmp_path / "runs")
    assert ended.value.code == 2
    assert not (tmp_path / "runs").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    return line


@pytest.mark.parametrize("together", [False, True])
def test_the_command_gives_every_method_the_same_budget(together, tmp_path, capsys, caplog):
    optuna.logging.enable_propagation()
    verbosity = optuna.logging.get_verbosity()
    data = "[[dataset]]\nscenario = 'a'\n[[dataset]]\nscenario = 'b'\npartition = 'iid'\n"
    table = f"search = 'optuna'\nbudget = 4\nseeds = [0, 1]\ntogether = {str(together).lower()}\n"
    file = grid_file(tmp_path, f"{table}lr = {{ low = 0.01, high = 1.0, log = true }}\n{data}")
    try:
        with caplog.at_level(logging.INFO):
            assert command("--config", file, "--tuned", "--out", tmp_path / "runs") == 0
    finally:
        optuna.logging.disable_propagation()
    out, err = capsys.readouterr()
    assert not err
    assert not caplog.records
    assert optuna.logging.get_verbosity() == verbosity
    blocks = out.split("\n\n")[: 2 if together else 4]
    assert [len(re.findall(r"^ *\d ", block, re.MULTILINE)) for block in blocks] == [4] * len(blocks)
    places = ["all data sets"] if together else ["a", "b"]
    heads = [f"{place}, {name}: lr, seeds 0, 1" for place in places for name in ("fedavg", "fedper")]
    assert sorted(block.splitlines()[0] for block in blocks) == sorted(heads)
    runs = pd.DataFrame([store.config_of(path) for path in (tmp_path / "runs").glob("*.zarr")])
    assert (runs.groupby(["scenario", "algorithm"])["lr"].nunique() == 4).all()
    assert (runs.groupby(["scenario", "algorithm"]).size() == 8).all()


def test_a_run_of_a_search_that_was_cut_off_is_continued(tmp_path):
    longer = START.but(rounds=2)
    with stopped(before=1):
        search(longer, tmp_path, {"lr": LR}, budget=2)
    assert len(list(tmp_path.glob("*.zarr"))) == 1
    step = search(longer, tmp_path, {"lr": LR}, budget=2)
    assert len(list(tmp_path.glob("*.zarr"))) == 2
    assert step.table["validation"].notna().all()
