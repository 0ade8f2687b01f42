"""An interrupted run that is finished where it stands is the run that was planned with as many rounds."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from functools import cache
from pathlib import Path

import killed_run
import numpy as np
import pytest
import xarray as xr
from children import together
from small_runs import NET, SETTINGS, dense, interrupt, same

import fedstat
from fedstat import fl, store
from fedstat.fl import algorithms, train
from fedstat.fl.algorithm import Algorithm

EVERY_TWO = {"rounds": 6, "evaluate_every": 2}


def go(out: Path | None, algorithm: Algorithm | None = None, **options: object) -> xr.DataTree:
    return train(dense(), NET, algorithm or algorithms.fedavg(), out=out, **SETTINGS | options)


@cache
def whole() -> xr.DataTree:
    """Return the run of FedAvg to its last round."""
    return go(None, **EVERY_TWO)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a run of FedAvg that was interrupted after three of its rounds, to copy."""
    interrupt(go, after=3, out=(out := tmp_path_factory.mktemp("interrupted") / "run.zarr"), **EVERY_TWO)
    return out


@pytest.fixture
def out(interrupted: Path, tmp_path: Path) -> Path:
    """Return the path of a copy of it, the only file in its folder."""
    return shutil.copytree(interrupted, tmp_path / "run.zarr")


def test_a_finished_run_equals_one_of_as_many_rounds(tmp_path: Path) -> None:
    out, method = tmp_path / "run.zarr", algorithms.fedfac(["fc1"], kappa=0.7)
    options = {"algorithm": method, "checkpoints": [2]}
    interrupt(go, after=3, out=out, rounds=4, **options)
    run, planned = fl.finish(out), go(None, rounds=3, **options)
    same(planned, run)
    for node in planned.subtree:
        assert node.coords.to_dataset().equals(run[node.path].coords.to_dataset())
    assert run["trained/fc1"]["checkpoint"].values.tolist() == [2, 3]
    assert "ended" in run.attrs
    assert run.attrs["title"] == planned.attrs["title"]
    assert run.attrs["history"].endswith("finished after round 3 of 4")
    assert json.loads(run.attrs["config"]) == json.loads(planned.attrs["config"])
    assert not store.damage(out, checksums=True)
    assert [p.name for p in tmp_path.iterdir()] == ["run.zarr"]
    assert fedstat.split(out, stage="aggregated", kappa=0.7)["fc1"].shared.shape == (10,)


def test_a_finished_run_can_be_extended_to_the_rounds_that_were_planned_and_is_left_as_it_is(out: Path) -> None:
    fl.finish(out)
    same(whole(), go(out, **EVERY_TWO, resume=True))
    same(whole(), fl.finish(out))


def test_a_run_that_was_killed_has_the_weights_of_its_checkpoints(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"
    assert together(1, killed_run.without_a_state, out, folder=tmp_path)[0] == [-signal.SIGKILL]
    run = fl.finish(out)
    assert run["metrics"].sizes["round"] == 4
    assert run["weights/fc1"]["checkpoint"].values.tolist() == [2]
    same(go(None, rounds=4, checkpoints=[2])["metrics"], run["metrics"])
    with pytest.raises(ValueError, match="the process was killed before it stored one"):
        go(out, rounds=9, checkpoints=[2], resume=True)


def test_a_failed_write_leaves_the_run_as_it_was(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("write", "commit"):
        with monkeypatch.context() as disk:
            disk.setattr(store.Writer if name == "write" else store.journal.Journal, name, full)
            with pytest.raises(OSError, match="No space left"):
                fl.finish(out)
        assert {p.relative_to(out): p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
        assert [p.name for p in out.parent.iterdir()] == ["run.zarr"]
    same(whole(), go(out, **EVERY_TWO, resume=True))


def test_what_cannot_be_finished_is_refused(out: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run at"):
        fl.finish(tmp_path / "none.zarr")
    other = tmp_path / "sim.zarr"
    store.save(other, xr.DataTree(), store.provenance("a study", {}, command="fedstat.sim"))
    with pytest.raises(FileExistsError, match=r"was made by fedstat\.sim"):
        fl.finish(other)
    with store.Writer(out, store.journal.Journal(out)) as writer:
        writer.write("metrics/seconds", (slice(0, 3),), np.nan)
        writer.commit()
    with pytest.raises(ValueError, match="holds no finished round"):
        fl.finish(out)


def test_a_resume_with_fewer_rounds_names_finish(out: Path) -> None:
    with pytest.raises(ValueError, match=r"but got 3\. Runs can only be extended\. .*fedstat\.fl\.finish\('"):
        go(out, rounds=3, evaluate_every=2, resume=True)


def test_an_interrupt_says_what_is_stored_and_how_to_go_on_or_to_end_the_run_there(tmp_path: Path) -> None:
    out = tmp_path / "run.zarr"

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    def notes(path: Path | None, progress: object) -> str:
        with pytest.raises(KeyboardInterrupt) as stopped:
            go(path, rounds=6, progress=progress)
        return "\n".join(stopped.value.__notes__)

    assert notes(None, stop) == "Nothing is stored. Pass out=... to keep finished rounds."
    assert notes(out, stop) == "No round was finished, so nothing is stored."
    steps = iter([None])
    said = notes(out, lambda _: next(steps, "stop") and stop(1))
    assert said == (
        f"The finished rounds are in {str(out)!r}. To resume, repeat the call with resume=True. To end the run there: "
        f"fedstat.fl.finish({str(out)!r})."
    )
    assert fl.finish(out).attrs["title"] == "fedavg, 1 round"
