"""A disk that is full stops a run with an OSError; what was written before opens, and with room it goes on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
import xarray as xr

from fedstat import store
from fedstat._utils.guard import replace_file
from fedstat.data import save_folder
from fedstat.store import journal

SIZES = [40, 120, 200, 260, 320]
"""kB of the small disks; a run takes about 400."""


@pytest.fixture
def disk(tmp_path):
    """A folder on a file system of its own, and how to size that in kB."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(*options: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["mount", "-t", "tmpfs", "-o", *options, str(folder)], capture_output=True)  # noqa: S607

    if mount("size=40k", "tmpfs").returncode:
        pytest.skip("mounting a small file system is not permitted here: a full disk cannot be had")
    yield folder, lambda size: mount(f"remount,size={size}k")
    subprocess.run(["umount", str(folder)], check=True)  # noqa: S607


CASES = [(name, size) for name in jobs.STREAMED for size in SIZES]
FEW = CASES[::3]
"""Every job and every size is among them."""


@pytest.mark.parametrize(
    ("name", "size"), [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in CASES]
)
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(name, size, disk, sound_run):
    folder, resize = disk
    resize(size)
    path = folder / "run.zarr"
    with pytest.raises(OSError, match="No space left") as caught:
        jobs.quietly(jobs.STREAMED[name], path)
    assert str(path) in str(caught.value)
    if path.exists():
        store.open_run(path)
    else:
        assert not list(folder.iterdir())
    resize(20_000)
    assert not jobs.quietly(jobs.STREAMED[name], path)
    jobs.require_same(path, sound_run(name.removesuffix(", longer"))[1])


def test_a_result_that_does_not_fit_leaves_the_old_one(disk):
    folder, resize = disk
    resize(400)
    attrs = store.provenance("large", {}, command="made up")
    store.save(folder / "run.zarr", xr.DataTree.from_dict({"/a": jobs.RESULT}), attrs)
    resize(150)
    with pytest.raises(OSError, match=r"No space left .*run\.zarr"):
        store.save(folder / "run.zarr", xr.DataTree.from_dict({"/a": jobs.large()}), attrs, overwrite=True)
    jobs.require_same(folder / "run.zarr", {f"/a/{name}": v.values for name, v in jobs.RESULT.variables.items()})


def _table(folder: Path) -> None:
    with replace_file(folder / "run.csv") as draft, draft.open("w") as file:
        file.write("0" * 100_000)


def _state(folder: Path) -> None:
    with journal.open_checked(folder / "run.state") as file:
        torch.save({"w": torch.zeros(100_000)}, file)


WRITES = {
    "table": _table,
    "state of torch": _state,  # whose own error is "unexpected pos"
    "folder of data": lambda folder: save_folder(xr.Dataset({"run": ("sample", np.zeros(100_000))}), folder / "run"),
    "log": lambda folder: (folder / "run").mkdir() or _logged(folder / "run"),
}


def _logged(path: Path) -> None:
    (path / "journal").mkdir()
    (path / "journal" / "log").write_bytes(journal._format_commit({}))
    files = journal.Journal(path)
    try:
        files.forget("a" * 99 + str(i) for i in range(1_000))
    finally:
        files.close()


@pytest.mark.parametrize("what", WRITES)
def test_whatever_meets_a_full_disk_names_its_file(what, disk):
    folder, resize = disk
    resize(40)
    with pytest.raises(OSError, match=r"No space left|Is the disk full") as caught:
        WRITES[what](folder)
    assert f"{folder}/run" in str(caught.value)
