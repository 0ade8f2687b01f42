"""Grids and studies whose cells are made by other processes: equal numbers, nothing twice, nothing lost."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from dask_processes import two_processes  # noqa: F401
from fl_runs import SMALL, command
from small_runs import same

from fedstat import _cli, sim, store
from fedstat._utils.loops import as_done
from fedstat.fl.__main__ import main as grid_main
from fedstat.sim.__main__ import main as sim_main
from fedstat.store import journal
from fedstat.study import experiment, grid, outcomes
from fedstat.study.outcomes import FailedRunsError
from fedstat.study.tuning import tune

GRID = """
clients = 8
participation = 0.5
max_samples = 40
rounds = 3
[[dataset]]
scenario = "a"
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedfac-dynamic"
tau = 0.5
"""
TINY = {"clients": 5, "d": 8, "m": 10, "n_train": 20, "n_test": 20, "rounds": 3, "replicates": 2, "p": 0.5}
METHODS = ("true", "dynamic", "random-redrawn")


@pytest.fixture
def grid_file(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return path


@pytest.fixture(scope="module")
def plain():
    """The study of a plain loop."""
    return sim.study(methods=METHODS, threads=1, **TINY)


@pytest.fixture
def address(two_processes):  # noqa: F811
    return two_processes._client.scheduler.address


def test_a_grid_by_dask_has_the_numbers_of_the_plain_loop_and_prints_its_lines(grid_file, tmp_path, address, capsys):
    plain, apart = tmp_path / "plain", tmp_path / "apart"
    assert command("--config", grid_file, "--threads", 1, "--out", plain) == 0
    capsys.readouterr()
    dask = ["--config", str(grid_file), "--dask", address, "--out", str(apart)]
    assert grid_main(dask) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines[:2]] == ["[1/2,", "[2/2,"]
    assert {line.partition("] ")[2].partition(":")[0] for line in lines[:2]} == {
        f"a, {method}, seed 0" for method in ("fedavg", "fedfac-dynamic, tau=0.5")
    }
    assert lines[2] == f"2 runs in {apart}, 2 new"
    names = sorted(path.name for path in plain.iterdir())
    assert sorted(path.name for path in apart.iterdir()) == names
    for name in names:
        same(store.open_run(plain / name), store.open_run(apart / name))
    assert grid_main(dask) == 0
    assert capsys.readouterr().out.startswith(f"2 runs in {apart}, 0 new, 2 finished\n\nTest accuracy")


def test_a_killed_workers_run_is_done_again_and_no_store_is_made_twice(tmp_path, two_processes):  # noqa: F811
    runs = [SMALL.but(rounds=40, algorithm="fedavg", seed=seed) for seed in range(3)]
    paths = [tmp_path / "apart" / f"{grid.name_of(one)}.zarr" for one in runs]
    pids = list(two_processes._client.run(os.getpid).values())
    cut_off = {}

    def begun():
        return [path for path in paths if path.exists() and "ended" not in store.attributes(path)]

    def kill_amid_its_run():
        """Kills a worker while both stand still, each in the middle of a run that has a store."""
        while not cut_off and working.is_set():
            time.sleep(0.01)
            if len(begun()) < 2:
                continue
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            if len(begun()) == 2:
                cut_off.update({path: path.stat().st_ino for path in begun()})
                os.kill(pids[0], signal.SIGKILL)
            for pid in pids[1:] if cut_off else pids:
                os.kill(pid, signal.SIGCONT)

    working = threading.Event()
    working.set()
    killer = threading.Thread(target=kill_amid_its_run)
    killer.start()
    try:
        found = grid.run_all(runs, tmp_path / "apart", threads=1, executor=two_processes)
        done = [(run.settings.seed, run.made) for run in found]
    finally:
        working.clear()
        killer.join()
    assert len(cut_off) == 2, "no moment was seen at which both workers were in a run"
    assert sorted(done) == [(seed, True) for seed in range(3)]
    assert pids[0] not in two_processes._client.run(os.getpid).values()
    assert {path: path.stat().st_ino for path in cut_off} == cut_off
    assert sorted(tmp_path.joinpath("apart").iterdir()) == sorted(paths)
    for run in grid.run_all(runs, tmp_path / "plain", threads=1):
        assert run.made
        same(store.open_run(run.path), store.open_run(tmp_path / "apart" / run.path.name, verify=True))


def once(folder):
    """Ends its own process the first time, and notes every time."""
    mark = folder / str(len(list(folder.iterdir())))
    mark.touch()
    if mark.name == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return mark.name


def test_work_that_ends_its_worker_is_done_once_more(tmp_path, two_processes):  # noqa: F811
    ((_, result),) = as_done(two_processes, once, [tmp_path])
    assert result() == "1"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_study_by_dask_has_the_numbers_of_the_plain_loop(plain, tmp_path, address, capsys):
    out = tmp_path / "s.zarr"
    flags = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    begun = [*flags, "--methods", *METHODS, "--out", str(out), "--quiet"]
    assert sim_main([*begun, "--dask", address, "--replicates", "1"]) == 0
    assert sim_main(["--out", str(out), "--quiet", "--resume", "--replicates", "2", "--dask", address]) == 0
    same(plain, store.open_run(out, verify=True))
    assert capsys.readouterr().err == ""


def test_a_study_that_is_cut_off_keeps_the_cells_that_came_back(plain, tmp_path):
    out = tmp_path / "s.zarr"

    class Cut(ThreadPoolExecutor):
        left = 2

        def submit(self, *args, **kwargs):
            self.left -= 1
            return super().submit(*args, **kwargs) if self.left >= 0 else super().submit(interrupted)

    def interrupted():
        raise KeyboardInterrupt

    with Cut(1) as cut, pytest.raises(KeyboardInterrupt):
        sim.study(methods=METHODS, threads=1, executor=cut, out=out, **TINY)
    assert (store.open_run(out)["metrics/rounds_done"] == 3).sum() == 2
    with ThreadPoolExecutor(2) as pool:
        whole = sim.study(methods=METHODS, threads=1, executor=pool, out=out, resume=True, **TINY)
    same(plain, whole)


def test_runs_that_diverge_or_are_locked_are_named_after_all_others(tmp_path):
    good = [SMALL.but(algorithm="fedavg", seed=seed) for seed in range(2)]
    diverging, locked = good[0].but(lr=1e30, optimizer="sgd"), good[1].but(rounds=5)
    path = tmp_path / f"{grid.name_of(locked)}.zarr"

    def stop(rounds):
        if rounds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.run(locked, out=path, progress=stop)
    lock = journal.hold(path)
    with (
        ThreadPoolExecutor(2) as pool,
        pytest.raises(FailedRunsError) as error,
    ):
        list(grid.run_all([diverging, locked, *good], tmp_path, executor=pool, threads=1))
    lock.release()
    first, second = sorted(str(error.value).splitlines())
    assert re.search(r"fedavg, .*seed 1: failed, BlockingIOError: .* by another process", first)
    assert re.search(r"fedavg, lr=1e\+30, seed 0: training diverged", second)
    records = [grid.name_of(diverging) + outcomes.FAILED]
    assert [path.name for path in tmp_path.glob("*.json")] == records, "a run of another process has not failed"
    assert {path.name for path in tmp_path.iterdir()} >= {f"{grid.name_of(one)}.zarr" for one in good}
    assert [run.made for run in grid.run_all([*good, locked], tmp_path, threads=1)] == [False, False, True]


def test_tuning_by_an_executor_chooses_the_same(tmp_path):
    start = SMALL.but(algorithm="fedavg", validation_fraction=0.2, rounds=1)
    (plain,) = tune(start, {"lr": [0.01, 0.001]}, tmp_path / "plain", threads=1)
    with ThreadPoolExecutor(2) as pool:
        (apart,) = tune(start, {"lr": [0.01, 0.001]}, tmp_path / "apart", threads=1, executor=pool)
    assert plain.table.equals(apart.table)


def test_what_keeps_dask_from_working_is_said_in_one_line_before_anything_runs(
    grid_file, tmp_path, capsys, monkeypatch
):
    pytest.importorskip("distributed")

    def refused(*arguments):
        with pytest.raises(SystemExit) as ended:
            grid_main([*map(str, arguments), "--out", str(tmp_path / "none")])
        assert ended.value.code == 2
        assert not (tmp_path / "none").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "--jobs needs --config, the file of a grid" in refused("--jobs", 2)
    assert "unknown" in refused("--config", grid_file, "--dask", "bogus://somewhere")
    monkeypatch.setattr(_cli, "_PATIENCE", 0.5)
    line = refused("--config", grid_file, "--dask", "tcp://127.0.0.1:1")
    assert "must be the address of a Dask scheduler, but tcp://127.0.0.1:1 does not answer" in line
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    assert "pip install 'fedstat[sweep]'" in refused("--config", grid_file, "--jobs", 2)


def test_work_that_ends_every_worker_is_given_up_with_its_name_and_a_lost_scheduler_is_told(address):
    distributed = pytest.importorskip("distributed")
    given_up = distributed.KilledWorker("part-0", None, 3)
    given_up.add_note("a, fedavg, seed 0")
    with (
        pytest.raises(ConnectionError, match=r"gave up a task \(a, fedavg, seed 0\) after 4 workers were lost"),
        _cli.dask_executor(address, None),
    ):
        raise given_up
    with (
        pytest.raises(ConnectionError, match=f"the scheduler at {address} was lost"),
        _cli.dask_executor(address, None),
    ):
        raise CancelledError


def test_workers_with_another_fedstat_are_refused(grid_file, tmp_path, address, capsys, monkeypatch):
    monkeypatch.setattr("fedstat.store.code", lambda *_: "0.0+other")
    with pytest.raises(SystemExit):
        grid_main(["--config", str(grid_file), "--dask", address, "--out", str(tmp_path / "none")])
    assert "must have fedstat 0.0+other, but has" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
