"""Estimates of grids: what they count, what a trial measures, and what the command prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fl_runs import SMALL, command

from fedstat.fl.__main__ import main
from fedstat.store import stores
from fedstat.study import estimate, experiment, grid
from fedstat.study.estimate import Trial

GRID = """
clients = 8
max_samples = 40
rounds = 4
seeds = [0, 1]
[[dataset]]
scenario = "a"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedprox"
lr = 0.01
"""


@pytest.fixture
def grid_file(tmp_path: Path) -> Path:
    (path := tmp_path / "grid.toml").write_text(GRID)
    return path


def test_runs_that_differ_in_their_seed_alone_are_one_kind(grid_file: Path) -> None:
    groups = estimate.kinds(grid.cells(grid_file))
    assert [(first.algorithm, [run.seed for run in group]) for first, group in groups.items()] == [
        ("fedavg", [0, 1]),
        ("fedprox", [0, 1]),
    ]


@pytest.mark.parametrize(("rounds", "every"), [(10, 1), (10, 3), (9, 3), (2, 5)])
def test_seconds_count_the_rounds_that_are_evaluated(rounds: int, every: int) -> None:
    trial = Trial(replace(SMALL, rounds=rounds, evaluate_every=every), fixed=100.0, evaluated=10.0, plain=1.0)
    is_evaluated = [number % every == 0 or number == rounds for number in range(1, rounds + 1)]
    for left in range(1, rounds + 1):
        assert trial.seconds(left) == 100 + sum(10 if flag else 1 for flag in is_evaluated[-left:])


def test_processes_take_the_next_run_when_they_are_free() -> None:
    rng = np.random.default_rng(0)
    durations = rng.uniform(1, 5, 20).tolist()
    assert estimate.span(durations, 1) == pytest.approx(sum(durations))
    ends = [0.0, 0.0, 0.0]
    for duration in durations:
        ends[int(np.argmin(ends))] += duration
    assert estimate.span(durations, 3) == pytest.approx(max(ends))


@pytest.mark.parametrize("every", [1, 2])
def test_a_trial_takes_times_apart(every: int) -> None:
    """The first round, which may be slower, belongs to what a run takes besides its rounds."""
    settings = replace(SMALL, rounds=40, evaluate_every=5)
    is_evaluated = [number % every == 0 or number == 6 for number in range(1, 7)]
    intervals = [9.0, *(3.0 if flag else 1.0 for flag in is_evaluated[1:])]
    times = estimate._Times(20.0 + sum(intervals), intervals, is_evaluated, {True: 600, False: 50})
    trial = estimate._trial_of(settings, times, start=2.0)
    assert (trial.evaluated, trial.plain) == (3.0, 1.0 if every == 2 else 3.0)
    assert trial.fixed == 20.0 + 9.0 - (3.0 if is_evaluated[0] else trial.plain)
    assert trial.disk == 50 + 600 * 40 / 6
    assert trial.seconds() == trial.fixed + 8 * trial.evaluated + 32 * trial.plain


def test_a_trial_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    settings = replace(SMALL, rounds=30, clients=20, max_samples=None)
    (trial,) = estimate.measure([settings], seconds=120, threads=1)
    assert trial.failure is None
    assert not trial.late
    assert min(trial.evaluated, trial.plain, trial.start) > 0
    experiment.run(settings, out=tmp_path / "run.zarr", threads=1)
    disk = sum(file.stat().st_size for file in (tmp_path / "run.zarr").rglob("*") if file.is_file())
    assert trial.disk == pytest.approx(disk, rel=0.1)
    assert 1e8 < trial.peak_memory < 4e9


def test_trials_that_fail_or_end_late_are_named() -> None:
    diverging = replace(SMALL, lr=1e30, optimizer="sgd")
    failed, late = estimate.measure([diverging], seconds=60) + estimate.measure([SMALL], seconds=0.05)
    assert "training diverged" in str(failed.failure)
    assert late.late


def test_the_command_estimates_and_trains_nothing(
    grid_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    list(grid.run_all(grid.cells(grid_file)[:1], runs))
    before = stores(runs)
    assert command("--config", grid_file, "--out", runs, "--dry-run", "--seconds", 60) == 0
    said = capsys.readouterr().out
    assert f"4 runs in {runs}, 3 to make, 1 finished\n" in said
    rows = [line.split()[:3] for line in said.splitlines() if line[:1].isdigit() and " a, " in line]
    assert sorted(rows) == [["1", "a,", "fedavg"], ["2", "a,", "fedprox,"]]
    assert "3 runs: about " in said
    assert stores(runs) == before
    assert command("--config", grid_file, "--out", runs) == 0
    capsys.readouterr()
    assert command("--config", grid_file, "--out", runs, "--dry-run") == 0
    assert capsys.readouterr().out.startswith(f"4 runs in {runs}, 0 to make, 4 finished\n")


def test_a_kind_that_fails_is_known_before_the_night(
    grid_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid_file.write_text(GRID.replace("lr = 0.01", "lr = 1e30").replace("seeds = [0, 1]", ""))
    assert main(["--config", str(grid_file), "--out", str(tmp_path / "runs"), "--dry-run", "--jobs", "2"]) == 1
    printed = capsys.readouterr()
    assert "Not estimated:\n  a, fedprox, lr=1e+30: training diverged in round 1" in printed.out
    assert "1 run, 2 at once: about " in printed.out
    assert "2/2 trials" in printed.err
    assert not (tmp_path / "runs").exists()
