"""Grids of which runs fail, diverge, are outdated or half made: the others are made, and nothing is lost."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from children import CHILDREN, parent
from dask_processes import two_processes  # noqa: F401
from fl_runs import command
from small_runs import same

import fedstat
from fedstat import store
from fedstat.study import collect, compare_runs, experiment, grid, outcomes
from fedstat.study.outcomes import FailedRunsError, Outcome

GRID = """
clients = 6
partition = "iid"
max_samples = 30
rounds = 3
local_epochs = 1
batch_size = 10
[[dataset]]
scenario = "a"
[[method]]
algorithm = "failing.py:failing"
[[method]]
algorithm = "stale.py:stale"
[[method]]
algorithm = "fedper"
lr = 1e30
[[method]]
algorithm = "fedprox"
[[method]]
algorithm = "fedavg"
"""
OWN = """
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.algorithms import fedavg

def NAME():
    def penalty(params, anchor):
        return {name: FACTOR * (p - anchor[name]) for name, p in params.items()}
    return Algorithm("NAME", fedavg().init_mask, phases=(Phase(penalty=penalty),))
"""
STATES = {"failing.py:failing": "failed", "stale.py:stale": "outdated", "fedper": "diverged", "fedprox": "made",
          "fedavg": "finished"}  # fmt: skip


def write(folder: Path, name: str, factor: str) -> None:
    (folder / f"{name}.py").write_text(OWN.replace("NAME", name).replace("FACTOR", factor))


def prepare(folder: Path) -> Path:
    """Make the folder: one run finished, one finished before its file was edited, one half made; return the grid."""
    file = folder / "grid.toml"
    file.write_text(GRID)
    write(folder, "failing", "(1 / 0)")
    write(folder, "stale", "0.1")
    runs = {run.algorithm.rpartition("/")[2]: run for run in grid.cells(file)}
    list(grid.run_all([runs["stale.py:stale"], runs["fedavg"]], folder / "runs"))
    half_made = folder / "runs" / f"{grid.name_of(runs['fedprox'])}.zarr"

    def stop(rounds: int) -> None:
        if rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(runs["fedprox"], out=half_made, progress=stop)
    write(folder, "stale", "0.2")
    return file


def run(file: Path, executor: Executor | None = None, **choices: bool) -> dict[str, Outcome]:
    """Return the outcomes by algorithm."""
    found = {}
    with pytest.raises(FailedRunsError) if not choices.pop("sound", False) else nullcontext():
        for outcome in grid.run_all(grid.cells(file), file.parent / "runs", executor=executor, threads=1, **choices):
            found[outcome.settings.algorithm.rpartition("/")[2]] = outcome
    return found


@pytest.fixture(params=["in this process", "in threads", "by Dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor | None]:
    if request.param == "by Dask":
        yield request.getfixturevalue("two_processes")
    elif request.param == "in threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
    else:
        yield None


def test_every_run_of_a_grid_ends_as_it_can(tmp_path: Path, executor: Executor | None) -> None:
    file = prepare(tmp_path)
    found = run(file, executor)
    assert {name: outcome.state for name, outcome in found.items()} == STATES
    failure = outcomes.recorded_failure(found["failing.py:failing"].path)
    assert failure is not None
    assert str(failure) == "failed, ZeroDivisionError: division by zero (failing.py, line 7)"
    assert 'failing.py", line 7, in' in failure.traceback
    assert found["stale.py:stale"].changed == ("stale.py",)
    half_made = store.open_run(found["fedprox"].path)
    assert half_made.attrs["run"] == store.attributes(found["fedprox"].path)["run"]
    again = run(file, executor)
    assert {name: (outcome.state, outcome.repeated) for name, outcome in again.items()} == {
        name: ("finished" if state == "made" else state, state not in ("failed", "diverged"))
        for name, state in STATES.items()
    }


def test_the_command_prints_each_failure_and_the_comparison_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = prepare(tmp_path)
    how = ("--config", file, "--out", tmp_path / "runs")
    assert command(*how) == 1
    said = capsys.readouterr().out
    first, second, *_ = said.splitlines()
    assert (
        first == "[1/5] a, failing.py:failing, seed 0: failed, ZeroDivisionError: division by zero (failing.py, line 7)"
    )
    assert second.startswith("[3/5] a, fedper, lr=1e+30, seed 0: training diverged in round 1: ")
    assert f"5 runs in {tmp_path / 'runs'}, 1 new, 1 finished, 1 failed, 1 diverged, 1 outdated\n" in said
    assert "Made with another version of stale.py:\n  a, stale.py:stale, seed 0\n" in said
    assert "--repeat makes them again, --accept compares them as they are." in " ".join(said.split())
    table = said.partition("Test accuracy")[2]
    assert "fedavg" in table
    assert "fedprox" in table
    named = (
        "Warning: 2 runs are not compared: a, failing.py:failing, seed 0: failed, ZeroDivisionError: division by zero"
    )
    assert named in " ".join(table.split())
    assert command(*how) == 1
    assert "failed before, not tried again" in " ".join(capsys.readouterr().out.split())


def test_a_mended_file_is_tried_again_and_retry_tries_without_a_change(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    path = run(file)["failing.py:failing"].path
    time = outcomes.recorded_failure(path).time  # type: ignore[union-attr]
    file.write_text(GRID.replace('[[method]]\nalgorithm = "fedper"\nlr = 1e30\n', ""))
    assert not run(file)["failing.py:failing"].repeated
    assert run(file, retry=True)["failing.py:failing"].repeated
    assert outcomes.recorded_failure(path).time >= time  # type: ignore[union-attr]
    write(tmp_path, "failing", "0.3")
    found = run(file, sound=True, repeat=True)
    assert found["failing.py:failing"].made
    assert [record.name.partition("-seed0")[0] for record in path.parent.glob("*.json")] == ["digits-iid-fedper"]
    (record,) = path.parent.glob("*.json")
    record.unlink()
    assert sorted(child.suffix for child in path.parent.iterdir()) == [".zarr"] * 4


def test_a_store_of_another_file_stays_until_its_successor_is_complete(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    write(tmp_path, "failing", "0.3")
    (cell,) = (cell for cell in grid.cells(file) if "failing" in cell.algorithm)
    path = tmp_path / "runs" / f"{grid.name_of(cell)}.zarr"

    def stop(rounds: int) -> None:
        if rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(cell, out=path, progress=stop)
    began = store.attributes(path)["run"]
    write(tmp_path, "failing", "(1 / 0)")
    with pytest.raises(FailedRunsError):
        list(grid.run_all([cell], path.parent))
    assert store.attributes(path)["run"] == began
    write(tmp_path, "failing", "0.3")  # as the store was begun: it goes on
    (outcome,) = grid.run_all([cell], path.parent)
    assert (outcome.made, store.attributes(path)["run"]) == (True, began)
    assert not list(path.parent.glob("*.repeat")), "what began beside it is removed"


def test_outdated_runs_are_made_again_or_accepted_and_this_is_recorded(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    folder, stale = tmp_path / "runs", "stale.py:stale"
    path = run(file)[stale].path
    began = store.attributes(path)["run"]
    assert run(file, accept=True)[stale].state == "accepted"
    assert run(file)[stale].state == "accepted", "it is recorded"
    (outdated,) = compare_runs(folder).outdated
    assert outdated == "a, stale.py:stale, seed 0 (stale.py)"
    named = "Caution: 1 run made with another version of the files in brackets: a, stale.py:stale, seed 0 (stale.py)"
    assert named in " ".join(repr(compare_runs(folder)).split())
    write(tmp_path, "stale", "0.4")
    assert run(file)[stale].state == "outdated", "another version was accepted"
    assert run(file, repeat=True)[stale].made
    assert store.attributes(path)["run"] != began
    assert run(file)[stale].state == "finished"
    assert not compare_runs(folder).outdated
    with pytest.raises(ValueError, match="repeat and accept exclude each other"):
        list(grid.run_all(grid.cells(file), folder, repeat=True, accept=True))


def test_folders_name_failed_and_unfinished_runs_also_those_without_a_store(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    folder = tmp_path / "runs"
    failed = run(file)["failing.py:failing"].path
    assert not failed.exists()
    compared = compare_runs(folder)
    assert [text.partition(":")[0] for text in compared.missing] == ["a, failing.py", "a, fedper, lr=1e+30, seed 0"]
    assert "Warning: 2 runs are not compared" in repr(compared)
    assert failed.name in {Path(path).name for path in collect.collect(folder).unfinished}
    assert any("excluded runs: a, failing.py" in note for note in collect.origin(collect.collect(folder)))
    report = fedstat.report(folder)
    assert "failing.py:failing, seed 0: failed, ZeroDivisionError" in report.html
    for path in store.stores(folder):
        store.remove(path)
    with pytest.raises(ValueError, match="there is no finished run: 2 runs are not compared: a, failing"):
        compare_runs(folder)


def test_means_over_fewer_seeds_are_marked(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    file.write_text(GRID.replace("[[dataset]]", "seeds = [0, 1]\n[[dataset]]"))
    cells = [cell for cell in grid.cells(file) if cell.algorithm in ("fedavg", "fedprox")]
    cells = [cell for cell in cells if (cell.algorithm, cell.seed) != ("fedprox", 1)]
    paths = [outcome.path for outcome in grid.run_all(cells, tmp_path / "runs")]
    rows = {line.split()[0]: line.split()[-3:] for line in repr(compare_runs(paths)).splitlines() if line.strip()}
    assert (rows["fedprox"], rows["fedavg"]) == (["1", "of", "2"], ["2", "of", "2"])


def test_a_full_disk_and_ctrl_c_stop_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = prepare(tmp_path)
    for error in (OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()):
        tried = []

        def fail(settings: object, error: BaseException = error, tried: list[object] = tried, **_: object) -> None:
            tried.append(settings)
            raise error

        monkeypatch.setattr(experiment, "run", fail)
        with pytest.raises(type(error)):
            list(grid.run_all(grid.cells(file), tmp_path / "runs"))
        assert len(tried) == 1
    assert not list((tmp_path / "runs").glob("*.json"))


def killed(file: Path, number: int) -> None:
    """Make the runs of a grid, and kill this process at a point: at the record of a failure, or after a round."""
    points = iter(range(number + 1))

    def kill_at(function):
        def wrapped(*arguments, **options):
            if next(points) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return wrapped

    for module, name in ((outcomes, "record_failure"), (outcomes, "forget_failure"), (store, "replace")):
        setattr(module, name, kill_at(getattr(module, name)))
    train = experiment.train
    experiment.train = lambda *a, **k: train(*a, **k | {"progress": kill_at(lambda _: None)})
    list(grid.run_all(grid.cells(file), file.parent / "runs", repeat=True))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run(prepare(tmp_path_factory.mktemp("whole")), repeat=True)


@pytest.mark.parametrize("number", [0, 1, 3, 6, 9, 12])
def test_a_grid_that_was_killed_goes_on_with_nothing_lost(
    number: int, tmp_path: Path, uninterrupted: dict[str, Outcome]
) -> None:
    file = prepare(tmp_path)
    parent()
    child = CHILDREN.Process(target=killed, args=(file, number))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    found = run(file, repeat=True)
    for name, state in STATES.items():
        if state in ("failed", "diverged"):
            assert found[name].state == state
        else:
            same(store.open_run(uninterrupted[name].path), store.open_run(found[name].path, verify=True))
    names = {path.name for path in (tmp_path / "runs").iterdir()}
    assert names == {
        outcome.path.with_suffix(outcomes.FAILED).name if outcome.failure else outcome.path.name
        for outcome in found.values()
    }


def test_a_repetition_that_fails_is_not_compared_with_its_old_numbers(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    write(tmp_path, "stale", "(1 / 0)")
    found = run(file, repeat=True)["stale.py:stale"]
    assert found.state == "failed"
    compared = compare_runs([found.path, *store.stores(tmp_path / "runs")[:2]])
    assert "a, stale.py:stale, seed 0: failed, ZeroDivisionError" in compared.missing[0]
    assert compared.missing[0].endswith("when it was repeated")
    assert "stale" not in compared.table["method"].tolist()
    assert run(file)["stale.py:stale"].state == "outdated"


def test_a_file_that_changes_while_the_grid_runs_makes_the_earlier_runs_outdated(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    head, _, rest = GRID.partition('[[method]]\nalgorithm = "failing.py:failing"\n')
    file.write_text(
        head.replace("[[dataset]]", "seeds = [0, 1]\n[[dataset]]")
        + rest.partition('[[method]]\nalgorithm = "fedper')[0]
    )
    write(tmp_path, "stale", "0.1")
    found = []
    for outcome in grid.run_all(grid.cells(file), tmp_path / "runs"):
        found.append(outcome)
        write(tmp_path, "stale", "0.2")
    assert [outcome.state for outcome in found] == ["made", "made"]
    assert [(outcome.state, outcome.changed) for outcome in map(grid.judge_again, found)] == [
        ("outdated", ("stale.py",)), ("made", ())
    ]  # fmt: skip


def test_two_files_of_one_name_are_refused_before_any_run(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for folder in (tmp_path, tmp_path / "sub"):
        write(folder, "stale", "0.1")
    file = tmp_path / "grid.toml"
    file.write_text(GRID.replace('"failing.py:failing"', '"sub/stale.py:stale"'))
    with pytest.raises(ValueError, match=r"sub/stale.py:stale and .*stale.py:stale, whose runs would have one name"):
        grid.cells(file)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EIO, "Input/output error")])
def test_errors_of_the_machine_are_tried_again(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = prepare(tmp_path)
    (cell,) = (cell for cell in grid.cells(file) if cell.algorithm == "fedprox")

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "run", fail)
        with pytest.raises(FailedRunsError):
            list(grid.run_all([cell], tmp_path / "runs"))
    (outcome,) = grid.run_all([cell], tmp_path / "runs")
    assert outcome.made


def test_any_message_is_printed_in_short(tmp_path: Path) -> None:
    (cell,) = (cell for cell in grid.cells(prepare(tmp_path)) if cell.algorithm == "fedprox")
    failure = outcomes.failure_of(RuntimeError("x\x1b[2J\udc80\n" * 10**5), cell)
    outcomes.record_failure(tmp_path / "a.zarr", failure)
    assert outcomes.recorded_failure(tmp_path / "a.zarr") == failure
    assert str(failure).isprintable()
    assert 250 < len(str(failure)) < 350


def test_a_damaged_record_keeps_no_run_from_being_made(tmp_path: Path) -> None:
    file = prepare(tmp_path)
    run(file)
    for record in (tmp_path / "runs").glob("*.json"):
        record.write_text("{")
    (tmp_path / "runs" / run(file)["stale.py:stale"].path.with_suffix(outcomes.ACCEPTED).name).write_text("")
    found = run(file)
    assert {name: outcome.state for name, outcome in found.items()} == STATES | {"fedprox": "finished"}
