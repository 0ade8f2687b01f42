"""The setting ``aggregator``: commands, grids, tuning, comparison, stored runs, several processes."""

from __future__ import annotations

import json
import sys

import pytest
from children import together
from fl_runs import SMALL, command
from small_runs import same

from fedstat import open_run, study
from fedstat.study import collect, grid, leaderboard, run_settings
from fedstat.study.run_settings import Settings

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
    assert all(made for *_, made in grid.run_all(grid.cells(grid_file), folder))
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
        ({"aggregator": "median", "noise_multiplier": 1.0}, "noise_multiplier has no effect without clip"),
        ({"aggregator": "median", "algorithm": "fedcac"}, r"algorithm 'fedcac' weights them \(mixing_weights\)"),
    ],
)
def test_wrong_settings_are_refused_before_the_data_are_read(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)
