"""After a power cut at any moment a run goes on to the numbers of an undisturbed one, and no finished round is lost."""

from __future__ import annotations

import pickle

import children
import disk
import jobs
import numpy as np
import pytest
import recorded
import xarray as xr

from fedstat import store

CUTS = [pytest.param(2, id="few"), pytest.param(80, id="many", marks=pytest.mark.slow)]


NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in jobs.SLOW)) for name in (*jobs.STREAMED, "replaced")]


@pytest.fixture(scope="module", params=NAMES)
def recording(request, tmp_path_factory):
    """Name of a job, what it did to files, and what its store holds at the end."""
    out = tmp_path_factory.mktemp("recorded") / "run.zarr"
    log = out.parent.parent / f"{request.param}.log"
    children.parent()
    child = children.CHILDREN.Process(target=recorded.record, args=(request.param, out, log))
    child.start()
    child.join(300)
    assert child.exitcode == 0
    expected = jobs.values(out)
    return request.param, pickle.loads(log.read_bytes()), expected  # noqa: S301


@pytest.mark.parametrize("loose", [False, True], ids=["ordered", "loose"])
@pytest.mark.parametrize("cuts", CUTS)
def test_no_power_cut_loses_or_changes_anything(recording, cuts, loose, tmp_path):
    name, log, expected = recording
    rng = np.random.default_rng(cuts + loose)
    for number, at in enumerate(np.sort(rng.integers(1, len(log) + 1, cuts))):
        out = tmp_path / str(number) / "run.zarr"
        out.parent.mkdir()
        before = [op.number for op in log[:at] if op.kind == "mark"]
        if name == "replaced":
            first = xr.DataTree.from_dict({"/a": jobs.RESULT})
            store.save(out, first, store.provenance("first", {}, command="made up"))
        disk.power_cut(log, at, out.parent, rng, loose=loose)
        if name == "replaced":
            store.settle(out)
            assert store.open_run(out, verify=True)["a/x"].values[0] in (0.0, 1.0)
            continue
        if (out / "zarr.json").exists():
            store.open_run(out)
        assert jobs.recovered(out) >= max(before, default=0), f"cut {at} of {len(log)}"
        assert not jobs.quietly(jobs.STREAMED[name], out), f"cut {at} of {len(log)}"
        jobs.require_same(out, expected)
