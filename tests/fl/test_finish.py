"""An interrupted run that is finished where it stands is the run that was planned with as many rounds."""

from __future__ import annotations

import errno
import json
import signal
from functools import cache
from pathlib import Path

import killed_run
import numpy as np
import pytest
import xarray as xr
from children import together
from small_runs import NET, SETTINGS, dense, same

import fedstat
from fedstat import fl, store
from fedstat.fl import algorithms, train

CASES = {
    "fedavg": algorithms.fedavg,
    "fedper": algorithms.fedper,
    "fedfac-dynamic": lambda: algorithms.fedfac(["fc1"], kappa=0.7),
}


def go(out: Path | None, case: str = "fedavg", **options: object) -> xr.DataTree:
    return train(dense(), NET, CASES[case](), out=out, **SETTINGS | options)


@cache
def whole(rounds: int) -> xr.DataTree:
    """Return a run of FedAvg that was planned with as many rounds."""
    return go(None, rounds=rounds)


def interrupt(out: Path, after: int, case: str = "fedavg", **options: object) -> None:
    rounds: list[int] = []

    def stop(step: int) -> None:
        rounds.append(step)
        if sum(rounds) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go(out, case, progress=stop, **options)


@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_equals_one_of_as_many_rounds(case: str, tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    interrupt(out, 3, case, rounds=9, checkpoints=[2], probe="trained-weights")
    run = fl.finish(out)
    planned = go(None, case, rounds=3, checkpoints=[2], probe="trained-weights")
    same(planned.drop_nodes("uploads"), run.drop_nodes("uploads"))
    for node in planned.drop_nodes("uploads").subtree:
        assert node.coords.to_dataset().equals(run[node.path].coords.to_dataset())
    assert run["uploads/fc1"]["checkpoint"].values.tolist() == [2], "uploads of the last round were not stored"
    assert "ended" in run.attrs
    assert run.attrs["title"] == planned.attrs["title"]
    assert run.attrs["history"].endswith("finished after round 3 of 9")
    config, expected = json.loads(run.attrs["config"]), json.loads(planned.attrs["config"])
    assert config == expected
    assert not store.damage(out, checksums=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert fedstat.split(out, stage="aggregated", kappa=0.7)["fc1"].shared.shape == (10,)


def test_a_finished_run_can_be_extended_to_the_rounds_that_were_planned(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    interrupt(out, 3, rounds=6, evaluate_every=2)
    fl.finish(out)
    same(go(None, rounds=6, evaluate_every=2), go(out, rounds=6, evaluate_every=2, resume=True))


def test_a_run_that_was_killed_has_the_weights_of_its_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    assert together(1, killed_run.without_a_state, out, folder=tmp_path)[0] == [-signal.SIGKILL]
    run = fl.finish(out)
    assert run["metrics"].sizes["round"] == 4
    assert run["weights/fc1"]["checkpoint"].values.tolist() == [2]
    same(go(None, rounds=4, checkpoints=[2])["metrics"], run["metrics"])
    with pytest.raises(ValueError, match="the process was killed before it stored one"):
        go(out, rounds=9, checkpoints=[2], resume=True)


def test_a_failed_write_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run.zarr"
    interrupt(out, 3, rounds=6)
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write", "commit"):
        with monkeypatch.context() as disk:
            disk.setattr(store.Writer if name == "write" else store.journal.Journal, name, full)
            with pytest.raises(OSError, match="No space left"):
                fl.finish(out)
        assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
        assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    same(whole(6), go(out, rounds=6, resume=True))


def test_what_cannot_be_finished_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        fl.finish(tmp_path / "none.zarr")
    other = tmp_path / "sim.zarr"
    small = {"clients": 4, "d": 6, "m": 6, "n_train": 10, "rounds": 1, "threads": 1}
    fedstat.sim.study(p=0.5, methods=["local"], out=other, **small)
    with pytest.raises(FileExistsError, match=r"was made by fedstat\.sim"):
        fl.finish(other)
    empty = tmp_path / "empty.zarr"
    interrupt(empty, 1, rounds=2)
    with store.Writer(empty, store.journal.Journal(empty)) as writer:
        writer.write("metrics/seconds", (slice(0, 1),), np.nan)
        writer.commit()
    with pytest.raises(ValueError, match="holds no finished round"):
        fl.finish(empty)
    complete = tmp_path / "complete.zarr"
    go(complete, rounds=2)
    same(whole(2), fl.finish(complete))


def test_a_resume_with_fewer_rounds_names_finish(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    interrupt(out, 3, rounds=6)
    with pytest.raises(ValueError, match=r"but got 3\. Runs can only be extended\. .*fedstat\.fl\.finish\('"):
        go(out, rounds=3, resume=True)


def test_an_interrupt_says_what_is_stored_and_how_to_go_on(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    def notes(path: Path | None, progress: object) -> str:
        with pytest.raises(KeyboardInterrupt) as stopped:
            go(path, rounds=6, progress=progress)
        return "\n".join(stopped.value.__notes__)

    assert notes(None, stop) == "Nothing is stored. Pass out=... to keep finished rounds."
    assert notes(out, stop) == "No round was finished, so nothing is stored."
    steps = iter([None, None])
    said = notes(out, lambda _: next(steps, "stop") and stop(1))
    assert said == (
        f"The finished rounds are in {str(out)!r}. To resume, repeat the call with resume=True. To end the run there: "
        f"fedstat.fl.finish({str(out)!r})."
    )


def test_a_run_that_is_finished_after_one_round_says_so_in_the_singular(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    interrupt(out, 1, rounds=4)
    assert fl.finish(out).attrs["title"] == whole(1).attrs["title"] == "fedavg, 1 round"
