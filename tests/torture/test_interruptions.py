"""A process that is killed, or loses its power, at any moment has lost nothing, and goes on to the same numbers."""

from __future__ import annotations

import os
import pickle
import signal
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import children
import disk
import jobs
import numpy as np
import pytest
import torch
import xarray as xr

from fedstat import store
from fedstat.store import Writer

JOBS = jobs.STREAMED | {"replaced": jobs.replaced}
KILLS = [pytest.param(2, id="few"), pytest.param(32, id="many", marks=pytest.mark.slow)]
CUTS = [pytest.param(2, id="few"), pytest.param(80, id="many", marks=pytest.mark.slow)]
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in jobs.SLOW)) for name in JOBS]


def record(name: str, out: Path, to: Path) -> None:
    """Do a job, and write down its changes to files and its commits; this process can do nothing else."""
    log: list[disk.Operation] = []
    watched(name, out, log.append, lambda rounds: log.append(disk.Operation("mark", number=rounds)))
    to.write_bytes(pickle.dumps(log))


def victim(name: str, out: Path, last: int, kept: Synchronized) -> None:
    """Do a job, and be killed before change number ``last`` to a file."""
    changes: list[disk.Operation] = []

    def count(change: disk.Operation) -> None:
        changes.append(change)
        if len(changes) == last:
            os.kill(os.getpid(), signal.SIGKILL)

    watched(name, out, count, lambda rounds: setattr(kept, "value", max(kept.value, rounds)))


def watched(name, out, notice, committed) -> None:
    """Do a job; tell each change to a file before it is made, and after each commit the rounds that are held."""
    torch.set_num_threads(1)
    jobs.at_every_turn()
    commit = Writer.commit

    def marked(writer: Writer) -> None:
        commit(writer)
        committed(jobs.held(writer))

    Writer.commit = marked
    disk.watch(out.parent, notice)
    JOBS[name](out)


def in_child(work, *arguments) -> None:
    child = children.CHILDREN.Process(target=work, args=arguments)
    child.start()
    child.join(300)
    assert child.exitcode in (0, -signal.SIGKILL)


def prepare(name: str, out: Path) -> None:
    out.parent.mkdir()
    if name == "replaced":
        first = xr.DataTree.from_dict({"/a": jobs.RESULT})
        store.save(out, first, store.provenance("first", {}, command="made up"))


@pytest.fixture(scope="module", params=NAMES)
def undisturbed(request, tmp_path_factory):
    """Name of a job, what it did to files, and what its store holds at the end."""
    children.parent()
    out = tmp_path_factory.mktemp("undisturbed") / "runs" / "run.zarr"
    log = out.parents[1] / "log"
    prepare(request.param, out)
    in_child(record, request.param, out, log)
    return request.param, pickle.loads(log.read_bytes()), jobs.values(out)  # noqa: S301


def require_either(out: Path) -> None:
    """The old result or the new one stands there, whole."""
    store.settle(out)
    assert store.open_run(out, verify=True)["a/x"].values[0] in (0.0, 1.0)


@pytest.mark.parametrize("kills", KILLS)
def test_a_run_killed_before_any_change_to_a_file_goes_on(undisturbed, kills, tmp_path):
    name, log, expected = undisturbed
    changes = sum(op.kind != "mark" for op in log)
    rng = np.random.default_rng(kills)
    for number, last in enumerate(np.linspace(1, changes, kills, dtype=int)):
        out = tmp_path / str(number) / "run.zarr"
        prepare(name, out)
        kept = children.CHILDREN.Value("i", 0)
        in_child(victim, name, out, int(last), kept)
        disk.age(out.parent)
        if name == "replaced":
            require_either(out)
            jobs.replaced(out)
        else:
            if out.exists():
                store.open_run(out)
            if number % 2:
                in_child(victim, name, out, int(rng.integers(1, changes)), kept)
                disk.age(out.parent)
            assert jobs.recovered(out) >= kept.value
            assert not jobs.quietly(JOBS[name], out)
        jobs.require_same(out, expected)


@pytest.mark.parametrize("loose", [False, True], ids=["ordered", "loose"])
@pytest.mark.parametrize("cuts", CUTS)
def test_no_power_cut_loses_or_changes_anything(undisturbed, cuts, loose, tmp_path):
    name, log, expected = undisturbed
    rng = np.random.default_rng(cuts + loose)
    for number, cut in enumerate(np.sort(rng.integers(1, len(log) + 1, cuts))):
        out = tmp_path / str(number) / "run.zarr"
        prepare(name, out)
        disk.power_cut(log, cut, out.parent, rng, loose=loose)
        if name == "replaced":
            require_either(out)
            continue
        if (out / "zarr.json").exists():
            store.open_run(out)
        before = [op.number for op in log[:cut] if op.kind == "mark"]
        assert jobs.recovered(out) >= max(before, default=0), f"cut {cut} of {len(log)}"
        assert not jobs.quietly(jobs.STREAMED[name], out), f"cut {cut} of {len(log)}"
        jobs.require_same(out, expected)
