"""Logs of runs: what the programs that they are for read from them; resumed, killed, failing."""

from __future__ import annotations

import csv
import os
import shutil
import signal

import killed_run
import pytest
from children import together
from dask_processes import two_processes  # noqa: F401
from fl_runs import command
from read_logs import READERS, of_csv
from small_runs import NET, SETTINGS, dense, interrupt

from fedstat.fl import algorithms, logs, train, watch
from fedstat.fl.__main__ import main
from fedstat.fl.logs.csv_log import CsvLog
from fedstat.study import Settings, grid

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the packages


def go(out, **options):
    return train(dense(), NET, algorithms.fedavg(), out=out, **SETTINGS | {"rounds": 4, "evaluate_every": 2} | options)


def need(name):
    if package := logs.LOGS[name].package:
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'fedstat[{name}]'")


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """Offline, with no setting of the user's."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "of-wandb"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr(watch, "_opened", set())
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def ends():
    """Rounds as a callback gets them."""
    seen = []
    go(None, on_round_end=seen.append)
    return seen


def assert_rounds(logged, ends):
    """A log has these rounds, each once."""
    assert [number for number, _ in logged.rounds] == [end.round for end in ends]
    for (_, metrics), end in zip(logged.rounds, ends, strict=True):
        assert metrics.keys() == end.metrics.keys()
        for name in metrics.keys() - {"seconds"}:
            assert metrics[name] == pytest.approx(end.metrics[name], rel=1e-6)


@pytest.mark.parametrize("name", logs.LOGS)
def test_a_run_that_was_interrupted_and_resumed_has_every_round_once_and_its_settings(name, tmp_path, ends):
    need(name)
    out = tmp_path / "runs" / "a run: №1 #100%.zarr"
    interrupt(go, after=3, out=out, log=name)
    earlier = shutil.copytree(out, tmp_path / "earlier")
    go(out, resume=True, log=[name, name])
    logged = READERS[name](out)
    assert_rounds(logged, ends)
    assert logged.name == out.stem
    if name != "csv":
        assert logged.settings["algorithm"] == "fedavg"
        assert float(logged.settings["lr"]) == 0.1
    if name != "wandb":  # which knows only online what was logged before
        shutil.rmtree(out)
        earlier.rename(out)  # as if the process had been killed before it stored the last rounds
        go(out, resume=True, log=name)
        assert_rounds(READERS[name](out), ends)
    assert "wandb" in name or not (tmp_path / "wandb").exists()


def test_tensorboard_shows_a_line_for_each_run_of_a_folder(tmp_path):
    need("tensorboard")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    for seed in (0, 1):
        go(tmp_path / f"seed{seed}.zarr", seed=seed, log="tensorboard")
    runs = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "tensorboard")).Reload().Runs()
    assert runs.keys() == {"seed0", "seed1"}
    assert all("accuracy" in tags["scalars"] for tags in runs.values())


def test_a_killed_run_has_the_lines_of_all_rounds_of_its_store_and_repeats_none(tmp_path, ends):
    out = tmp_path / "run.zarr"
    assert together(1, killed_run.with_a_csv_log, out, folder=tmp_path)[0] == [-signal.SIGKILL]
    lines = out.with_suffix(".csv").read_text().split("\n")
    assert [line.partition(",")[0] for line in lines] == ["round", "1", "2", "3", "4", ""]  # round 4 is not committed
    with out.with_suffix(".csv").open("a") as file:
        file.write("\0\0\n5,1,")  # as after a power cut
    go(out, resume=True, log="csv")
    assert_rounds(of_csv(out), ends)


def test_another_file_in_the_place_of_a_log_stays_and_nothing_is_trained(tmp_path):
    out, file = tmp_path / "run.zarr", tmp_path / "run.csv"
    file.write_text("client,age\n1,30\n")
    with pytest.raises(ValueError, match=r"log='csv' cannot be opened: .*run\.csv exists, but is not a log of"):
        go(out, log="csv")
    assert file.read_text() == "client,age\n1,30\n"
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"cannot be opened: .*run\.csv is a folder\. Move it\. No round was trained"):
        go(out, log="csv")
    assert not out.exists()


def test_a_log_that_fails_ends_with_one_warning_and_the_run_is_complete(tmp_path, monkeypatch):
    write, closed = CsvLog.write, []

    def fail_in_the_third_round(self, end):
        if end.round == 3:
            raise OSError(28, "No space left on device")
        write(self, end)

    monkeypatch.setattr(CsvLog, "write", fail_in_the_third_round)
    monkeypatch.setattr(CsvLog, "close", lambda self, *, failed: closed.append(failed) or self._file.close())
    with pytest.warns(UserWarning, match=r"log='csv' failed: OSError: .*No space.* It ends before round 3") as seen:
        run = go(tmp_path / "run.zarr", log="csv")
    assert len(seen) == 1
    assert closed == [True]
    assert "ended" in run.attrs
    assert run["metrics"].sizes["round"] == 4
    assert [number for number, _ in of_csv(tmp_path / "run.zarr").rounds] == [1, 2]


def test_a_log_that_cannot_be_closed_is_a_warning(tmp_path, monkeypatch):
    def fail(self, *, failed):
        self._file.close()
        raise ConnectionError(f"no network, {failed}")

    monkeypatch.setattr(CsvLog, "close", fail)
    with pytest.warns(UserWarning, match="ConnectionError: no network, False. It may lack the last rounds"):
        assert "ended" in go(tmp_path / "run.zarr", log="csv").attrs


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "find_spec", lambda _: None)
    message = rf"log='{name}' needs {name}, which is not installed: pip install 'fedstat\[{name}\]'"
    with pytest.raises(ValueError, match=message):
        go(tmp_path / "run.zarr", log=name)
    with pytest.raises(SystemExit):
        main(["--log", name, "--out", str(tmp_path / "run.zarr")])
    assert f"error: log='{name}' needs {name}, which is not installed" in capsys.readouterr().err
    assert [*tmp_path.glob("*.zarr")] == []


def test_a_folder_of_the_name_of_a_package_is_none(tmp_path, monkeypatch):
    (tmp_path / "of_no_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(logs.LOGS, "wandb", logs.Kind("x", "X", "of_no_package"))
    with pytest.raises(ValueError, match="which is not installed"):
        logs.names_of("wandb")


def test_wrong_logs_are_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"log must be one of 'csv', .* but got 'cvs'\. Did you mean 'csv'"):
        go(tmp_path / "run.zarr", log="cvs")
    with pytest.raises(ValueError, match=r"log='csv' writes beside the store of a run, but out is missing"):
        go(None, log="csv")


def test_the_runs_of_a_grid_have_logs_also_by_other_processes(tmp_path, two_processes):  # noqa: F811
    runs = [Settings.of(clients=5, rounds=2, max_samples=20, algorithm="fedavg", seed=seed) for seed in (0, 1)]
    options = {"threads": 1, "log": "csv", "executor": two_processes}
    for _ in range(2):  # the second time they are finished
        paths = [run[1] for run in grid.run_all(runs, tmp_path / "runs", **options)]
        assert sorted(path.stem for path in (tmp_path / "runs").glob("*.csv")) == sorted(path.stem for path in paths)
        for path in paths:
            assert [number for number, _ in of_csv(path).rounds] == [1, 2]


def test_a_repeated_run_replaces_the_csv_log_of_its_name(tmp_path):
    for name in ("run.zarr", "run.repeat"):
        go(tmp_path / name, log="csv")
    assert [path.name for path in tmp_path.glob("*.csv")] == ["run.csv"]
    assert [number for number, _ in of_csv(tmp_path / "run.zarr").rounds] == [1, 2, 3, 4]


def test_a_log_that_opened_before_and_no_longer_opens_costs_no_run(tmp_path):
    go(tmp_path / "first.zarr", log="csv")
    (tmp_path / "second.csv").mkdir()
    message = r"log='csv' cannot be opened: .*second\.csv is a folder.* The run second is trained without it"
    with pytest.warns(UserWarning, match=message):
        assert "ended" in go(tmp_path / "second.zarr", log="csv").attrs


def test_the_command_logs_and_continues_a_log(tmp_path):
    out = tmp_path / "run.zarr"
    options = ["--out", out, "--log", "csv"]
    assert command("--clients", 5, "--max-samples", 20, "--rounds", 2, "--partition", "iid", *options) == 0
    assert command("--rounds", 3, "--resume", *options) == 0
    with (tmp_path / "run.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["1", "2", "3"]
