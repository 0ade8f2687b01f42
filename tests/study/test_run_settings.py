"""The aggregator by name, and private runs: settings, commands, grids, tuning, comparison, several processes."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from children import together
from fl_runs import SMALL, command
from small_runs import same

from fedstat import open_run, study
from fedstat.attack import experiment as attacked
from fedstat.fl import aggregate, private_training
from fedstat.fl.job import ComputeConfig
from fedstat.study import collect, experiment, grid, leaderboard, run_settings
from fedstat.study.run_settings import Settings

PRIVATE = {"clip": 0.5, "noise_multiplier": 1.5, "sampling": "poisson"}

ARGUMENTS = ("--algorithm", "fedper", "--clients", 8, "--max-samples", 30, "--participation", 0.5, "--width", 0.2,
             "--batch-size", 8)  # fmt: skip
GRID = """
clients = 8
max_samples = 30
rounds = 2
participation = 0.5
width = 0.2
keep_weights = "none"
[tune]
aggregator = ["median", "mean"]
[[dataset]]
validation_fraction = 0.2
[[method]]
algorithm = "fedper"
[[method]]
algorithm = "fedavg"
sweep = { aggregator = ["mean", "median", "trimmed-mean:.25"] }
"""


@pytest.fixture(scope="module")
def grid_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("grid") / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def runs(grid_file):
    folder = grid_file.parent / "runs"
    assert all(run.made for run in grid.run_all(grid.cells(grid_file), folder))
    return folder


def test_the_default_has_its_name_and_is_not_printed(tmp_path, capsys):
    plain, named, other = SMALL, SMALL.but(aggregator="mean"), SMALL.but(aggregator="median")
    assert grid.name_of(plain) == grid.name_of(named) != grid.name_of(other)
    command(*ARGUMENTS, "--rounds", 1, "--out", tmp_path / "run.zarr")
    assert "ggregator" not in capsys.readouterr().out
    attrs = open_run(tmp_path / "run.zarr").attrs
    assert json.loads(attrs["about"])["aggregator"] == "mean"
    assert json.loads(attrs["config"])["aggregator"] == "weighted mean"
    assert command("--out", tmp_path / "run.zarr", "--resume", "--rounds", 2, "--aggregator", "mean") == 0


def test_a_command_says_its_aggregator_and_continues_with_it(tmp_path, capsys):
    whole, part = tmp_path / "whole.zarr", tmp_path / "part.zarr"
    for path, rounds in ((whole, 2), (part, 1)):
        assert command(*ARGUMENTS, "--aggregator", "trimmed-mean:.25", "--rounds", rounds, "--out", path) == 0
        assert "\nAggregator: trimmed-mean:0.25\n" in capsys.readouterr().out
    assert command("--out", part, "--resume", "--rounds", 2) == 0
    same(open_run(part), open_run(whole))
    with pytest.raises(SystemExit):
        command("--out", part, "--resume", "--aggregator", "median")
    assert "aggregator: 'trimmed-mean:0.25' stored, 'median' now" in capsys.readouterr().err


def test_two_processes_give_the_bits_of_one(tmp_path):
    given = (*ARGUMENTS, "--client-chunk", 1, "--rounds", 2, "--aggregator", "median", "--out")
    one, two = tmp_path / "1", tmp_path / "2"
    assert command(*given, one) == 0
    ended, printed = together(2, _command, *given, two, folder=tmp_path)
    assert ended == [0, 0], printed
    assert "Aggregator: median" in printed[0]
    same(open_run(one), open_run(two))


def _command(*arguments):
    """The same command in a process among several."""
    sys.exit(command(*arguments))


def test_a_grid_has_the_aggregator_as_an_axis(grid_file, runs):
    assert [one.aggregator for one in grid.cells(grid_file)] == ["mean", "mean", "median", "trimmed-mean:0.25"]
    assert grid.tuning(grid_file).candidates == {"aggregator": ["median", "mean"]}
    assert set(study.compare_runs(runs).table["method"]) == {
        "fedper", "fedavg, aggregator=median", "fedavg, aggregator=trimmed-mean:0.25",
        "fedavg, aggregator=weighted mean",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"runs of fedavg, .* differ in aggregator \(.weighted mean., "):
        collect.collect(runs)
    found = collect.collect(runs, differ=run_settings.OF_AGGREGATOR)
    assert len(leaderboard.planned(found, grid_file).grid.table) == 4


def test_a_grid_finds_two_forms_of_one_aggregator(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace('"median", "trimmed', '"trimmed-mean:0.250", "trimmed'))
    with pytest.raises(ValueError, match=r"has the run .* twice"):
        grid.cells(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"aggregator": "medain"}, "aggregator must be one of mean, median, .* Did you mean 'median'"),
        ({"aggregator": 1}, "aggregator must be a string, but got 1"),
        ({"aggregator": "median", "clip": 1.0}, "clip=1 makes a run private by noise on a sum .* Remove clip"),
        ({"clip": 1.0}, "clip=1 makes a run private, but noise_multiplier is missing"),
        ({"clip": 1.0, "noise_multiplier": 0.0}, "noise_multiplier must be a finite number"),
        ({"sampling": "coin"}, "sampling must be one of 'fixed', 'poisson'"),
        ({"aggregator": "median", "algorithm": "fedcac"}, r"algorithm 'fedcac' weights them \(mixing_weights\)"),
    ],
)
def test_wrong_settings_are_refused_before_the_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


@pytest.fixture
def without_accountant(monkeypatch):
    """ε is another file's subject; importing Opacus takes seconds."""
    monkeypatch.setattr(private_training, "_rdp", lambda: None)
    monkeypatch.setattr(private_training, "epsilon", lambda _, rounds: 1.5 * rounds)


def test_private_runs_have_other_names():
    assert experiment.about(SMALL.but(**PRIVATE)).items() >= PRIVATE.items()
    assert grid.name_of(SMALL.but(**PRIVATE)) != grid.name_of(SMALL)


@pytest.mark.usefixtures("without_accountant")
def test_a_private_run_by_command_says_so_and_can_be_made_again(tmp_path, capsys):
    path = tmp_path / "run.zarr"
    command("--clients", 8, "--rounds", 2, "--max-samples", 30, "--clip", 0.5, "--noise-multiplier", 1.5,
            "--delta", 0.001, "--sampling", "poisson", "--participation", 0.5, "--algorithm", "fedavg",
            "--out", path)  # fmt: skip
    assert "Client-level differential privacy: ε = 3 at δ = 0.001" in capsys.readouterr().out
    run = attacked.read_run(path)
    np.testing.assert_array_equal(run.tree["metrics/epsilon"], [1.5, 3.0])
    assert json.loads(run.tree.attrs["config"])["privacy"]["delta"] == 0.001
    job, _ = attacked.job_of(run, None, ComputeConfig())
    assert job.aggregator.privacy == aggregate.private(0.5, 1.5, delta=0.001).privacy
    assert [number for number, _ in attacked.states(run, job, [2])] == [2], "warns unless the losses are the same"


@pytest.mark.usefixtures("without_accountant")
def test_a_grid_crosses_private_and_plain_methods_and_tells_their_runs_apart(tmp_path):
    file = tmp_path / "grid.toml"
    file.write_text(
        'clients = 6\nmax_samples = 20\nrounds = 1\nparticipation = 0.9\nsampling = "poisson"\ndelta = 1e-3\n'
        'seeds = [0]\nkeep_weights = "none"\n[[dataset]]\ndata = "digits"\n[[method]]\nalgorithm = "fedavg"\n'
        '[[method]]\nalgorithm = "fedavg"\nclip = 0.5\nsweep = { noise_multiplier = [1.0, 2.0] }\n'
    )
    cells = grid.cells(file)
    assert [(one.clip, one.noise_multiplier, one.delta) for one in cells] == [
        (None, None, None), (0.5, 1.0, 1e-3), (0.5, 2.0, 1e-3)
    ]  # fmt: skip
    assert all(run.made for run in grid.run_all(cells, tmp_path / "runs"))
    with pytest.raises(ValueError, match=r"runs of fedavg, .* differ in clip .*; noise_multiplier"):
        collect.collect(tmp_path / "runs")
    found = collect.collect(tmp_path / "runs", differ=run_settings.OF_AGGREGATOR)
    assert len(leaderboard.planned(found, file).grid.table) == 3
