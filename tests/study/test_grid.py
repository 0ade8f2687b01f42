"""Grids of runs from a file, and tuning on validation samples."""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fl_runs import command
from small_runs import stopped

from fedstat import store
from fedstat.fl import loop
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.study import Settings, collect, grid, run_table
from fedstat.study.outcomes import FailedRunsError
from fedstat.study.tuning import tunable_runs, tune, tuning_groups, with_selected

GRID = """
clients = 8
participation = 0.5
max_samples = 40
validation_fraction = 0.2
kappa = 0.75
tau = 0.5
keep_weights = "none"

[tune]
tau = [0.25, 0.75]
kappa = [0.5, 0.8]
[tune.one]
kappa = [0.8]

[scale.one]
seeds = [0, 1]
rounds = 2
[scale.two]
rounds = 3

[[dataset]]
scenario = "a"
one = { max_samples = 30 }
[[dataset]]
scenario = "b"
partition = "iid"
rounds = 9
methods = ["fedavg"]

[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedfac-dynamic"
tau = 0.25
"""
RATES = GRID.replace(
    "[tune]\ntau = [0.25, 0.75]\nkappa = [0.5, 0.8]\n[tune.one]\nkappa = [0.8]",
    "[tune]\nlr = [0.01, 0.001]\nseeds = [0]",
)


@pytest.fixture
def grid_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of the six runs of scale "one"."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "grid.toml").write_text(GRID)
    list(grid.run_all(grid.cells(folder / "grid.toml", scale="one"), folder / "runs"))
    return folder / "runs"


@pytest.fixture
def runs_of_one(finished, tmp_path):
    """A copy of these runs, to be changed."""
    return shutil.copytree(finished, tmp_path / "runs")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Folder of the runs that tune the second cell of scale "one", and the steps."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "grid.toml").write_text(GRID)
    run = grid.cells(folder / "grid.toml", scale="one")[1]
    candidates = grid.tuning(folder / "grid.toml", scale="one").candidates
    return folder / "tune", list(tune(run, candidates, folder / "tune", seeds=(0, 1)))


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    """Folder of the runs that tune the learning rates over all data sets together, and what their command printed."""
    folder = tmp_path_factory.mktemp("rates")
    (folder / "grid.toml").write_text(RATES.replace("seeds = [0]", "seeds = [0]\ntogether = true"))
    assert grid.tuning(folder / "grid.toml") == ({"lr": [0.01, 0.001]}, [0], True, {})
    with redirect_stdout(StringIO()) as printed:
        how = ("--config", folder / "grid.toml", "--scale", "one", "--tune", "--out", folder / "runs")
        assert command(*how) == 0
    return folder / "runs", printed.getvalue()


def test_a_grid_crosses_data_sets_methods_and_seeds_and_each_level_overrides_the_one_above(grid_file):
    runs = grid.cells(grid_file, scale="one")
    assert [(r.name, r.algorithm, r.seed) for r in runs] == [
        (label, method, seed)
        for seed in (0, 1)
        for label, method in (("a", "fedavg"), ("a", "fedfac-dynamic"), ("b", "fedavg"))
    ]
    assert {r.rounds for r in runs} == {2}
    assert [r.max_samples for r in runs[:3]] == [30, 30, 40]
    assert [r.given for r in runs[:2]] == [{}, {"tau": 0.25, "kappa": 0.75}]
    assert [r.rounds for r in grid.cells(grid_file, scale="two")] == [3, 3, 3]
    assert [r.rounds for r in grid.cells(grid_file)] == [20, 20, 9]


def test_no_run_of_a_grid_is_made_twice_unless_other_code_made_it(grid_file, runs_of_one, monkeypatch):
    runs = grid.cells(grid_file, scale="one")
    assert [run.made for run in grid.run_all(runs, runs_of_one)] == [False] * 6
    monkeypatch.setattr(store, "code", lambda *_: "other")
    assert [run.made for run in grid.run_all(runs, runs_of_one)] == [False] * 6
    assert [run.made for run in grid.run_all(runs[:1], runs_of_one, repeat=True)] == [True]
    assert len(list(runs_of_one.iterdir())) == 6


MINE = """
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.algorithms import fedavg

def mine():
    def penalty(params, anchor):
        return {name: FACTOR * (p - anchor[name]) for name, p in params.items()}
    return Algorithm("mine", fedavg().init_mask, phases=(Phase(penalty=penalty),))
"""


def mine(file: Path, factor: float):
    """A user's algorithm, in a file or, without one, as in a notebook."""
    text, name = MINE.replace("FACTOR", str(factor)), "<cell>"
    if file.parent.is_dir():
        file.write_text(text)
        name = str(file)
    exec(compile(text, name, "exec"), found := {"__name__": "mine"})  # noqa: S102
    return found["mine"]


@pytest.mark.parametrize("where", ["in a file", "in a notebook"])
def test_a_changed_algorithm_of_a_users_own_is_other_code(where, grid_file, tmp_path, monkeypatch, capsys):
    file = (tmp_path if where == "in a file" else tmp_path / "none") / "mine.py"
    monkeypatch.setitem(ALGORITHMS, "mine", mine(file, 0.1))
    text = grid_file.read_text().replace('algorithm = "fedavg"', 'algorithm = "mine"').replace('["fedavg"]', '["mine"]')
    text = text.replace("seeds = [0, 1]", "seeds = [0]")
    grid_file.write_text(text.removesuffix('[[method]]\nalgorithm = "fedfac-dynamic"\ntau = 0.25\n'))
    (run,) = [one for one in grid.cells(grid_file, scale="one") if one.algorithm == "mine"][:1]
    folder = tmp_path / "runs"
    (first,) = grid.run_all([run], folder)
    path = first.path
    assert store.open_run(path).attrs["code"].startswith(f"{store.code()}+")
    assert [run.made for run in grid.run_all([run], folder, repeat=True)] == [False]
    command("--config", grid_file, "--scale", "one", "--out", folder)
    said = capsys.readouterr().out
    assert f"2 runs in {folder}, 1 new, 1 finished\n" in said
    assert "another version" not in said
    monkeypatch.setitem(ALGORITHMS, "mine", mine(file, 0.2))
    command("--config", grid_file, "--scale", "one", "--out", folder)
    said = capsys.readouterr().out
    assert f"2 runs in {folder}, 0 new, 2 outdated\n\nMade with another version of mine:\n  all 2 runs" in said
    assert [run.made for run in grid.run_all([run], folder, repeat=True)] == [True]


def test_algorithms_of_the_package_have_the_packages_code_alone():
    settings = {"fedsplit": {"shared": {"fc1": [True, False]}}}
    for name, make in ALGORITHMS.items():
        assert store.code(make(**settings.get(name, {}))) == store.code(), name


def test_a_repetition_that_was_cut_off_goes_on_beside_the_run_whose_place_it_takes(grid_file, runs_of_one, monkeypatch):
    run = grid.cells(grid_file, scale="one")[0]
    path = runs_of_one / f"{grid.name_of(run)}.zarr"
    first = store.open_run(path).attrs["run"]
    monkeypatch.setattr(store, "code", lambda *_: "other")
    with stopped(before=1):
        list(grid.run_all([run], runs_of_one, repeat=True))
    assert store.open_run(path).attrs["run"] == first
    assert [run.made for run in grid.run_all([run], runs_of_one, repeat=True)] == [True]
    assert store.open_run(path).attrs["run"] != first
    assert len(list(runs_of_one.iterdir())) == 6


def test_a_damaged_run_of_a_grid_is_made_again(grid_file, runs_of_one):
    run = grid.cells(grid_file, scale="one")[0]
    path = runs_of_one / f"{grid.name_of(run)}.zarr"
    before = store.open_run(path)["metrics/accuracy"].values
    chunk = path / "metrics" / "accuracy" / "c.0.0"
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    with pytest.warns(UserWarning, match="accuracy has another checksum than when it was written"):
        assert [run.made for run in grid.run_all([run], runs_of_one)] == [True]
    np.testing.assert_array_equal(store.open_run(path, verify=True)["metrics/accuracy"], before)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("tau = 0.25\n", "tua = 0.25\n", r"\[\[method\]\] cannot hold the key 'tua'. Did you mean 'tau'"),
        ("tau = 0.25\n", "tau = 1.25\n", "data set 'a', method 'fedfac-dynamic': tau"),
    ],
)
def test_what_is_wrong_in_a_grid_is_said_with_its_place(old, new, says, grid_file):
    head, _, tail = GRID.rpartition(old)
    grid_file.write_text(head + new + tail)
    with pytest.raises(ValueError, match=says):
        grid.cells(grid_file, scale="one")


def test_a_run_that_diverges_does_not_keep_a_grid_from_the_others(grid_file, runs_of_one, monkeypatch, capsys):
    for run in grid.cells(grid_file, scale="one")[:3]:  # of seed 0
        shutil.rmtree(runs_of_one / f"{grid.name_of(run)}.zarr")
    round_of = loop.run_round

    def diverge(job, state, cohort):
        if job.algorithm.name == "fedavg" and job.seed == 0:
            raise FloatingPointError("training diverged in round 1.")
        return round_of(job, state, cohort)

    monkeypatch.setattr(loop, "run_round", diverge)
    assert command("--config", grid_file, "--scale", "one", "--out", runs_of_one) == 1
    said = capsys.readouterr().out
    assert "a, fedavg, seed 0: training diverged in round 1." in said
    assert "] b, fedavg" in said
    assert "2 runs are not compared: a, fedavg, seed 0: diverged; b, fedavg" in said.replace("\n", " ")
    assert len(collect.collect(runs_of_one).table) == 4


def test_a_layer_that_a_net_lacks_is_named_with_its_run(grid_file, tmp_path):
    grid_file.write_text(GRID.replace("tau = 0.25\n", 'layers = "fc9"\n'))
    with pytest.raises(ValueError, match=r"data set 'a', method 'fedfac-dynamic': .*fc9"):
        grid.cells(grid_file, scale="one")
    grid_file.write_text(GRID)
    run = replace(grid.cells(grid_file, scale="two")[1], participation=0.01)
    with pytest.raises(
        FailedRunsError, match=r"a, fedfac-dynamic, .*seed 0: failed, ValueError: participation=.* selects none of "
    ):
        list(grid.run_all([run], tmp_path))


def test_an_interrupted_run_of_a_grid_goes_on(grid_file, finished, tmp_path):
    run = grid.cells(grid_file, scale="one")[0]
    with stopped(before=1):
        list(grid.run_all([run], tmp_path))
    (outcome,) = grid.run_all([run], tmp_path)
    path = outcome.path
    for name in ("accuracy", "train_loss"):
        without_cut = store.open_run(finished / path.name)[f"metrics/{name}"]
        np.testing.assert_array_equal(store.open_run(path)[f"metrics/{name}"], without_cut)


def test_tuning_takes_the_best_on_validation_samples_step_by_step(grid_file, tuned, tmp_path):
    run = grid.cells(grid_file, scale="one")[1]
    candidates, seeds, together, procedure = grid.tuning(grid_file, scale="one")
    assert (candidates, seeds, together, procedure) == ({"tau": [0.25, 0.75], "kappa": [0.8]}, None, False, {})
    folder, steps = tuned
    assert [step.name for step in steps] == ["tau", "kappa"]
    table = steps[0].table
    assert table["chosen"].sum() == 1
    best = table["value"][table["validation"].idxmax()]
    (first,), (second,) = (step.settings for step in steps)
    assert str(first.given["tau"]) == str(second.given["tau"]) == best
    assert sorted(steps[1].table["value"]) == ["0.75", "0.8"]
    assert len(list(folder.iterdir())) == 6
    with pytest.raises(ValueError, match="tuning needs validation samples"):
        list(tune(replace(run, validation_fraction=0.0), candidates, tmp_path))
    with pytest.raises(ValueError, match="fedavg does not take tau"):
        list(tune(run.but(algorithm="fedavg", tau=None, kappa=None), candidates, tmp_path))


def test_tuning_does_not_look_at_test_samples(grid_file, tuned, monkeypatch):
    run = grid.cells(grid_file, scale="one")[1]
    row = run_table.row

    for rank in ({"0.25": 0.9, "0.75": 0.1}, {"0.25": 0.1, "0.75": 0.9}):

        def against(tree, rank=rank):
            """Test accuracies that rank the other way round."""
            by_tau = rank[json.loads(tree.attrs["config"])["algorithm_settings"]["tau"]]
            others = dict.fromkeys(("validated", "best10", "last10"), 1 - by_tau)
            return row(tree) | {"validation": by_tau} | others

        monkeypatch.setattr(run_table, "row", against)
        (step,) = tune(run, {"tau": [0.25, 0.75]}, tuned[0], seeds=(0,))
        assert str(step.settings[0].given["tau"]) == max(rank, key=rank.__getitem__)


def test_a_method_has_settings_of_its_own_at_a_scale(grid_file):
    grid_file.write_text(GRID + "one = { tau = 0.9, lr = 0.01 }\n")
    for scale, expected in (("one", (0.9, 0.01)), ("two", (0.25, Settings.lr))):
        (run, *_) = (r for r in grid.cells(grid_file, scale=scale) if r.algorithm == "fedfac-dynamic")
        assert (run.given["tau"], run.lr) == expected
        assert all(r.lr == Settings.lr for r in grid.cells(grid_file, scale=scale) if r.algorithm == "fedavg")


def test_the_command_tunes_the_methods_that_take_what_is_tuned(grid_file, tuned, capsys):
    how = ("--config", grid_file, "--scale", "one", "--tune", "--out", tuned[0])
    assert command(*how) == 0
    said = capsys.readouterr().out
    headings = [line for line in said.splitlines() if line.endswith("seeds 0, 1")]
    assert headings == [f"a, fedfac-dynamic: {step}, seeds 0, 1" for step in ("tau", "kappa")]
    assert said.count("True") == 2
    grid_file.write_text(GRID.replace('"fedfac-dynamic"\ntau = 0.25', '"fedper"'))
    with pytest.raises(SystemExit):
        command(*how)
    assert (
        "takes tau, kappa as settings to tune. Settings of algorithms can be tuned, and lr" in capsys.readouterr().err
    )


def test_learning_rates_of_all_methods_are_tuned_over_all_data_sets_together(rates):
    folder, said = rates
    headings = [line for line in said.splitlines() if line.endswith("lr, seed 0")]
    assert headings == [f"all data sets, {method}: lr, seed 0" for method in ("fedavg", "fedfac-dynamic")]
    rows = [run_table.row(store.open_run(path)) for path in sorted(folder.iterdir())]
    assert len(rows) == 2 * (2 + 1)
    for method in ("fedavg", "fedfac-dynamic"):
        mean = {
            lr: np.mean([r["validation"] for r in rows if (r["method"], r["lr"]) == (method, lr)])
            for lr in (0.01, 0.001)
        }
        block = said.partition(f"{method}: lr")[2].split("\n\n")[0]
        (chosen,) = (line for line in block.splitlines() if line.endswith("True"))
        assert chosen.split()[0] == str(max(mean, key=mean.__getitem__))
        assert float(chosen.split()[1]) == pytest.approx(max(mean.values()), abs=1e-4)


def test_runs_are_grouped_by_what_is_tuned_at_once_and_take_what_their_group_selected():
    runs = [
        Settings(data=data, algorithm=algorithm, seed=seed, validation_fraction=0.1)
        for data in ("mnist", "digits")
        for algorithm in ("fedprox", "fedavg")
        for seed in (3, 4)
    ]
    tunable = tunable_runs(runs, {"mu": [0.1, 1.0]})
    assert tunable == [run for run in runs if run.algorithm == "fedprox"]
    mnist, digits = (next(run for run in runs if run.data == data) for data in ("mnist", "digits"))
    assert tuning_groups(tunable) == {(mnist.name, "fedprox"): [mnist], (digits.name, "fedprox"): [digits]}
    assert tuning_groups(tunable, together=True) == {("all data sets", "fedprox"): [mnist, digits]}
    selected = {(mnist.name, "fedprox"): mnist.but(mu=1.0), (digits.name, "fedprox"): None}
    assert with_selected(runs, selected, ["mu"]) == [
        run.but(mu=1.0) if run.algorithm == "fedprox" else run
        for run in runs
        if run not in tunable or run.data == "mnist"
    ]
    with pytest.raises(ValueError, match="no method of the grid takes tau"):
        tunable_runs(tunable, {"tau": [0.5]})


def test_tuned_makes_the_runs_of_all_seeds_with_what_was_chosen_and_none_twice(grid_file, rates, tmp_path, capsys):
    grid_file.write_text(RATES)
    out = shutil.copytree(rates[0], tmp_path / "runs")
    how = ("--config", grid_file, "--scale", "one", "--tuned", "--out", out)
    assert command(*how) == 0
    capsys.readouterr()
    rows = pd.DataFrame([run_table.row(store.open_run(path)) for path in out.glob("*.zarr")])
    for _, own in rows.groupby(["scenario", "method"]):
        best = own[own["seed"] == 0].set_index("lr")["validation"].idxmax()
        assert set(own.loc[own["seed"] == 1, "lr"]) == {best}, "the other seed has only what was chosen"
    assert len(rows) == 3 * (2 + 1)
    assert command(*how) == 0
    assert f"With the tuned settings:\n6 runs in {out}, 0 new, 6 finished\n" in capsys.readouterr().out


def test_a_candidate_that_diverges_is_not_chosen(grid_file, tmp_path):
    run = grid.cells(grid_file, scale="one")[0].but(optimizer="sgd")
    (step,) = tune(run, {"lr": [1e30, 0.01]}, tmp_path / "tune")
    assert step.settings[0].lr == 0.01
    assert step.table["chosen"].tolist() == [False, True]
    assert step.table["validation"].isna().tolist() == [True, False]
    with pytest.raises(FailedRunsError, match="diverged"):
        list(tune(run, {"lr": [1e30]}, tmp_path / "tune"))


@pytest.mark.parametrize(
    ("line", "said"), [('seeds = ["a"]', "seeds in"), ("seeds = []", "seeds in"), ('together = "yes"', "together of")]
)
def test_a_table_of_tuning_is_checked(line, said, grid_file):
    grid_file.write_text(GRID.replace("[tune]", f"[tune]\n{line}"))
    with pytest.raises(ValueError, match=said):
        grid.tuning(grid_file)
