"""Every reader of files: how a sound file is made for it, and read; and what is put in the file's place."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import hostile_data
import hostile_stores
import hostile_weights
import numpy as np
import torch
from hostile_weights import HOSTILE, NORMAL
from matplotlib.figure import Figure
from PIL import Image

import fedstat
from fedstat import _cli, data, store
from fedstat.data import arrays
from fedstat.decompose.__main__ import _require_table
from fedstat.fl import algorithms
from fedstat.fl.logs import Source, open_log
from fedstat.reporting.document import MARK, require_ours
from fedstat.study import Settings, federation, grid, outcomes, selection

Read = Callable[[], object]
Made = tuple[Path, Read]
READERS: dict[str, Callable[[Path], Made]] = {}
"""By name: makes a sound file in a folder, and returns it with its reading."""
FINE: set[tuple[str, str]] = set()
"""Readers, and what may stand in the file's place without an error."""
SOUND = "FEDSTAT_TORTURE_RUN"
"""Variable of the environment that names a sound run."""


def settings_of(path: Path) -> SimpleNamespace:
    """Settings of a run that name a file, before anything checks it."""
    return SimpleNamespace(data=str(path), task=None, target=(), client_column=None)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        make(file)

    return replace


def written(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(change(file.read_bytes()))


SPOILS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (replaced_by(os.mkfifo), "not a regular file"),
    "an endless device": (replaced_by(lambda file: file.symlink_to("/dev/zero")), "not a regular file|lies outside"),
    "a folder": (replaced_by(Path.mkdir), "folder"),
    "nothing": (Path.unlink, ""),
    "a link to nothing": (replaced_by(lambda file: file.symlink_to(file.with_name("gone"))), ""),
    "links in a circle": (replaced_by(lambda file: file.symlink_to(file)), "symbolic links|not a regular file"),
    "a terabyte of holes": (lambda file: os.truncate(file, 1 << 40), ""),
    "nothing inside": (written(lambda _: b""), ""),
    "half of it": (written(lambda content: content[: len(content) // 2]), ""),
    "noise": (written(lambda content: np.random.default_rng(0).bytes(len(content))), ""),
    "zeros": (written(lambda content: bytes(len(content))), ""),
}
"""By name: what is done to a sound file, and a part of what must be said."""


def reader(name: str, *fine: str) -> Callable[[Callable[[Path], Made]], Callable[[Path], Made]]:
    """Add a reader; what is put in the file's place is no error where it is in ``fine``."""

    def add(make: Callable[[Path], Made]) -> Callable[[Path], Made]:
        READERS[name] = make
        FINE.update((name, spoil) for spoil in fine)
        return make

    return add


reader("weights, .pt")(lambda at: (at / "a.pt", hostile_weights.saved(at, {"fc1.weight": torch.ones(40, 30)})))


@reader("weights, .pth before torch 1.6")
def old_pt(at: Path) -> Made:
    state = {"fc1.weight": torch.ones(40, 30)}
    return at / "a.pth", hostile_weights.saved(at, state, "a.pth", _use_new_zipfile_serialization=False)


reader("weights, .npz")(lambda at: (at / "a.npz", hostile_weights.arrays(at, **{"w.weight": np.ones((40, 30))})))
reader("weights, .safetensors")(lambda at: (at / "a.safetensors", NORMAL["safetensors"](at)))


@reader("weights, index of several files")
def index(at: Path) -> Made:
    NORMAL["safetensors"](at)
    (at / "model.index.json").write_text('{"weight_map": {"w": "a.safetensors", "b": "a.safetensors"}}')
    return at / "model.index.json", lambda: fedstat.read_weights([at / "model.index.json"])


reader("own arrays, .npz")(lambda at: (hostile_data.own(at), lambda: data.load(str(at / "own.npz"))))
reader("own table, .csv")(lambda at: (hostile_data.table(at), lambda: data.load(str(at / "own.csv"))))
reader("digest of own arrays", "nothing inside", "half of it", "noise", "zeros")(
    lambda at: (hostile_data.own(at), lambda: arrays.digest(str(at / "own.npz")))
)
reader("shape of own arrays")(lambda at: (hostile_data.own(at), lambda: federation.like(settings_of(at / "own.npz"))))
reader("images, idx")(lambda at: (at / "train-images-idx3-ubyte", hostile_data.mnist(at, hostile_data.IMAGES)))
reader("images, idx zipped")(
    lambda at: (at / "train-images-idx3-ubyte", hostile_data.mnist(at, gzip.compress(hostile_data.IMAGES)))
)
reader("images, CIFAR")(lambda at: (at / "test_batch", NORMAL["cifar_batch"](at)))
reader("classes, CIFAR")(lambda at: (at / "batches.meta", NORMAL["cifar_batch"](at)))
reader("images, MATLAB")(lambda at: (at / "test_32x32.mat", NORMAL["mat"](at)))
reader("images, JPEG")(lambda at: (at / "val" / "images" / "a.JPEG", hostile_data.tiny_test(at)))


@reader("record of a failed run", "nothing")
def failure(at: Path) -> Made:
    file = (path := at / "run.zarr").with_suffix(outcomes.FAILED)
    outcomes.record_failure(path, outcomes.failure_of(ValueError("no such thing"), Settings()))
    return file, lambda: outcomes.recorded_failure(path)


@reader("selected settings of a tuned folder", "nothing", "a link to nothing")
def tuned(at: Path) -> Made:
    selection.write(at, [selection.Selected("a", "fedavg", {"lr": "0.1"}, ("run.zarr",), ())])
    return at / selection.FILE, lambda: selection.read(at)


@reader("log of a run, .csv", "nothing", "a link to nothing")
def log(at: Path) -> Made:
    source = Source(at / "run.zarr", "0", {}, ["accuracy"], 1)
    open_log("csv", source).close(failed=False)
    return at / "run.csv", lambda: open_log("csv", source).close(failed=False)


@reader("training images, JPEG", "nothing")
def jpegs(at: Path) -> Made:
    read = hostile_data.tiny_test(at, split="train")
    images = at / "train" / "n01" / "images"
    shutil.copy(images / "a.JPEG", images / "b.JPEG")
    return images / "b.JPEG", read


@reader("own images, PNG", "nothing", "a folder")
def pngs(at: Path) -> Made:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5), dtype=np.uint8)
    for name in "abc":
        (at / "own" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(at / "own" / name / "1.png")
    return at / "own" / "c" / "1.png", lambda: data.from_folder(at / "own")


reader("classes, Tiny-ImageNet")(lambda at: (at / "wnids.txt", hostile_data.tiny_test(at)))
reader("list of images, Tiny-ImageNet")(lambda at: (at / "val" / "val_annotations.txt", hostile_data.tiny_test(at)))
reader("samples, LEAF")(lambda at: (at / "train" / "a.json", NORMAL["leaf_writers"](at)))
reader("articles, csv")(lambda at: (at / "test.csv", NORMAL["articles"](at)))
reader("plays, text")(lambda at: (at / "100.txt", NORMAL["roles"](at)))
reader("index of a folder of data")(lambda at: (at / "kept" / "dataset.json", NORMAL["kept_folder"](at)))
reader("array in a folder of data")(lambda at: (at / "kept" / "x.npy", NORMAL["kept_folder"](at)))


@reader("array in a zarr store of data", "nothing", "a link to nothing")
def zarr_array(at: Path) -> Made:
    read = hostile_stores.store(at)
    return next(path for path in (at / "a.zarr" / "x" / "c").rglob("*") if path.is_file()), read


@reader("layout in a zarr store of data")
def zarr_layout(at: Path) -> Made:
    read = hostile_stores.store(at)
    return at / "a.zarr" / "x" / "zarr.json", read


def make_sound(path: Path) -> None:
    """The run that all readers of runs copy."""
    import jobs

    jobs.trained(path)


def run(at: Path) -> Path:
    """A copy of a sound run of the trainer."""
    shutil.copytree(os.environ[SOUND], at / "run.zarr")
    return at / "run.zarr"


def of_run(file: str, *fine: str, verify: bool | None = None) -> None:
    @reader(f"run, {file}, {verify}", *fine)
    def make(at: Path) -> Made:
        path = run(at)
        return path / file, lambda: fedstat.open_run(path, verify=verify).load()


of_run("zarr.json", verify=False)
of_run("metrics/zarr.json", verify=False)
of_run("metrics/loss/zarr.json", verify=False)
of_run("metrics/loss/c.0.0", "nothing", "a link to nothing", verify=False)
of_run("metrics/round/c/0", "nothing", "a link to nothing", verify=False)
of_run("weights/fc1/w/zarr.json")
of_run("weights/fc1/w/c.1.0.0.0")
of_run("journal/log")
of_run("weights/fc1/w/c.1.0.0.0", verify=True)


@reader("layout that names damage", *SPOILS)
def layout(at: Path) -> Made:
    path = run(at)
    (path / "weights/fc1/w/c.1.0.0.0").unlink()
    return path / "weights/fc1/w/zarr.json", lambda: store.describe(store.damage(path, checksums=True))


@reader("labels that name damage", *SPOILS)
def labels(at: Path) -> Made:
    path = run(at)
    (path / "weights/fc1/w/c.1.0.0.0").unlink()
    return path / "weights/fc1/checkpoint/c/0", lambda: store.describe(store.damage(path, checksums=True))


@reader("lock of a run", "a folder", "nothing", "nothing inside", "half of it", "noise", "zeros", "a terabyte of holes")
def lock(at: Path) -> Made:
    path = run(at)
    (path / "journal" / "lock").write_text("lock")
    command = store.attributes(path)["command"]
    return path / "journal" / "lock", lambda: store.resume(path, store.config_of(path), command=command)


def saved(at: Path, name: str) -> Path:
    """A copy of a result that was saved beside the sound run."""
    sound = Path(os.environ[SOUND]).with_name(name)
    if not sound.exists():
        fedstat.icc(np.random.default_rng(0).normal(size=(4, 3, 9)), inference="F").save(sound)
    copy = shutil.copytree if sound.is_dir() else shutil.copy
    return Path(copy(sound, at / name))


@reader("result, JSON")
def saved_json(at: Path) -> Made:
    path = saved(at, "icc.json")
    return path, lambda: fedstat.load(path)


@reader("result to replace, JSON", "nothing", "a link to nothing", "half of it", "nothing inside", "noise", "zeros")
def saved_json_replaced(at: Path) -> Made:
    path = saved(at, "icc.json")

    def replace() -> None:
        with suppress(FileExistsError):  # of a file that is no result
            fedstat.n_factors(np.eye(3), draws=1).save(path, overwrite=True)

    return path, replace


def of_saved(file: str, *fine: str) -> None:
    @reader(f"result, {file}", *fine)
    def make(at: Path) -> Made:
        path = saved(at, "icc.zarr")
        return path / file, lambda: fedstat.load(path)


of_saved("zarr.json")
of_saved("result/zarr.json")
of_saved("result/units/zarr.json")
of_saved("result/coefficients.icc/c/0/0")
of_saved("journal/log")


@reader("report of a run", *SPOILS)
def reported(at: Path) -> Made:
    path = run(at)
    return path / "metrics/accuracy/c.0.0", lambda: fedstat.report(path).html


def text(at: Path, name: str, content: str) -> Path:
    (at / name).write_text(content)
    return at / name


@reader("grid", "nothing inside")
def grid_file(at: Path) -> Made:
    file = text(at, "grid.toml", 'seeds = [0, 1]\n[[method]]\nalgorithm = "fedavg"\n')
    return file, lambda: grid.cells(file)


@reader("algorithm")
def algorithm(at: Path) -> Made:
    file = text(at, "mine.py", "from fedstat.fl import algorithms\n\n\ndef mine():\n    return algorithms.fedavg()\n")
    return file, lambda: algorithms.constructor(f"{file}:mine")


@reader("page to replace", "nothing", "a link to nothing")
def page(at: Path) -> Made:
    file = at / "page.html"
    file.write_bytes(b"<!doctype html>" + MARK)
    return file, lambda: require_ours("--out", file)


@reader("figure to replace", "nothing", "a link to nothing", "half of it")
def figure(at: Path) -> Made:
    file = at / "figure.png"
    _cli.save_figure(Figure(), file)
    return file, lambda: _cli.require_figure("--plot", file)


@reader(
    "table to replace", "nothing", "a link to nothing", "nothing inside", "half of it", "a pipe", "an endless device"
)
def table(at: Path) -> Made:
    file = text(at, "table.csv", "layer,term,communality\n" * 9)
    return file, lambda: _require_table("--csv", file)


def spoiled(make: Callable[[Path], Made], spoil: Callable[[Path], object]) -> Callable[[Path], Read]:
    def case(at: Path) -> Read:
        file, read = make(at)
        spoil(file)
        return read

    return case


for name, make in READERS.items():
    NORMAL[name] = lambda at, make=make: make(at)[1]
    for spoil, (change, word) in SPOILS.items():
        kinds = "none" if (name, spoil) in FINE else "ValueError LimitError DamageError FileNotFoundError"
        HOSTILE[f"{name}: {spoil}"] = (spoiled(make, change), kinds, "" if kinds == "none" else word)
