"""Whatever is damaged in a store is named, and goes on to the numbers of an undisturbed run or is refused."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import jobs
import pytest
import xarray as xr
from small_runs import stopped

from fedstat import store
from fedstat.__main__ import main

# Of every store: one file of each role.
ROLES = {
    "sim": {
        "root": "zarr.json", "group": "metrics/zarr.json", "layout": "metrics/accuracy/zarr.json",
        "coordinate": "metrics/method/c/0", "chunk": "metrics/accuracy/c.0.0.1.0.0.0",
        "count": "metrics/rounds_done/c.0.0.0.1", "truth": "truth/communality/c.0.0.1.0", "log": "journal/log",
    },
    "fl": {
        "root": "zarr.json", "layout": "weights/fc1/w/zarr.json", "coordinate": "metrics/n_train/c/0",
        "chunk": "metrics/loss/c.0.0", "weights": "weights/fc1/w/c.1.0.0.0", "at the end": "ablation/accuracy/c.0.0.0",
        "log": "journal/log", "journal": "journal/zarr.json", "state": "journal/state",
    },
    "fl, longer": {"coordinate": "metrics/round/c/0", "chunk": "metrics/loss/c.0.0", "state": "journal/state"},
    "motivation": {"chunk": "dispersion/entropy/c.1.0.0", "start": "weights/fc1/start_w/c.0.0",
        "done": "outputs/done/c.0"},
    "result": {"root": "zarr.json", "chunk": "a/x/c/0", "coordinate": "a/unit/c/0", "log": "journal/log"},
    "unfinished": {
        "root": "zarr.json", "layout": "metrics/loss/zarr.json", "chunk": "metrics/accuracy/c.0.0",
        "state": "journal/state", "log": "journal/log",
    },
}  # fmt: skip


def flipped(place: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(place * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return flip


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


def swapped(path: Path) -> None:
    """A file that is sound, but another one's, or the file's own with a byte too many."""
    own = path.read_bytes()
    others = (p.read_bytes() for p in sorted(path.parent.iterdir()) if p.is_file())
    path.write_bytes(next((other for other in others if other != own), own + b"}"))


WAYS: dict[str, Callable[[Path], None]] = {
    "deleted": Path.unlink,
    "emptied": lambda path: path.write_bytes(b"") and None,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]) and None,
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)) and None,
    "first bit": flipped(0.0),
    "inner bit": flipped(0.6),
    "last bit": flipped(1.0),
    "a folder": replaced(Path.mkdir),
    "swapped": swapped,
    "a pipe": replaced(os.mkfifo),
    "an endless device": replaced(lambda path: path.symlink_to("/dev/zero")),
}
CASES = [(kind, role, way) for kind, roles in ROLES.items() for role in roles for way in WAYS]
FEW = CASES[:: len(CASES) // 30]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Stores that are no finished runs, by kind."""
    folder = tmp_path_factory.mktemp("others")
    attrs = store.provenance("first", {}, command="made up")
    store.save(folder / "result", xr.DataTree.from_dict({"/a": jobs.RESULT}), attrs)
    with stopped(before=3):
        jobs.trained(folder / "unfinished")
    return {kind: folder / kind for kind in ("result", "unfinished")}


@pytest.fixture
def copy_of(sound_run, others, tmp_path):
    """Copy an undamaged store of a kind."""
    return lambda kind: shutil.copytree(others.get(kind) or sound_run(kind)[0], tmp_path / "run.zarr")


@pytest.mark.parametrize(
    ("kind", "role", "way"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in CASES],
)
def test_damage_is_named_and_mended_or_refused(kind, role, way, copy_of, sound_run, capsys):
    path, file = copy_of(kind), ROLES[kind][role]
    before = (path / file).read_bytes()
    WAYS[way](path / file)
    assert not (path / file).is_file() or (path / file).read_bytes() != before

    with pytest.raises(ValueError, match=r"damaged|cannot be read|written without checksums") as caught:
        store.open_run(path, verify=True)
    array = file.rpartition("/c")[0]
    assert role in ("log", "journal") or file in str(caught.value) or array in str(caught.value)
    assert main(["verify", str(path)]) == 1
    assert str(path) in capsys.readouterr().out

    if kind == "result":
        return
    refused = ""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            jobs.STREAMED["fl" if kind == "unfinished" else kind](path)
        except (ValueError, FileExistsError, FileNotFoundError) as error:
            refused = str(error)
    if refused:
        assert str(path) in refused
        assert role in ("root", "group", "layout", "coordinate", "log", "journal") or way == "a folder"
        return
    assert any("is damaged" in str(one.message) for one in told)
    jobs.require_same(path, sound_run("fl" if kind in ("unfinished", "fl, longer") else kind)[1])


def test_of_a_damaged_study_only_the_damaged_cells_are_made_again(copy_of, sound_run, monkeypatch):
    path = copy_of("sim")
    (path / ROLES["sim"]["chunk"]).unlink()
    made = []
    module = import_module("fedstat.sim.experiment")
    monkeypatch.setattr(module, "_run", lambda *a, do=module._run: made.append(a[2]) or do(*a))
    (told,) = jobs.quietly(jobs.study, path)
    assert "damaged: metrics/accuracy (method = dynamic, replicate = 0) is missing. Damaged parts are" in told
    assert made == [(0, 0, 1, 0)]
    jobs.require_same(path, sound_run("sim")[1])


def test_a_run_without_a_journal_opens_but_cannot_be_verified_or_resumed(copy_of):
    path = copy_of("fl")
    shutil.rmtree(path / "journal")
    assert "metrics" in store.open_run(path).children
    with pytest.raises(ValueError, match="written without checksums"):
        store.open_run(path, verify=True)
    with pytest.raises(ValueError, match="no journal"):
        jobs.trained(path)


def test_what_is_read_of_a_flipped_chunk_is_an_error_that_names_store_and_array_without_verifying(copy_of):
    path = copy_of("fl")
    flipped(0.6)(path / "weights/fc1/w/c.1.0.0.0")
    run = store.open_run(path)
    with pytest.raises(store.DamageError, match=r"run\.zarr: weights/fc1/w is damaged \(Stored and computed checksum"):
        run["weights/fc1/w"].load()


def test_other_files_in_a_store_are_no_damage(copy_of):
    path = copy_of("fl")
    (path / "metrics" / "notes.txt").write_text(json.dumps("mine"))
    assert not store.damage(path, checksums=True)
    assert (path / "metrics" / "notes.txt").exists()
