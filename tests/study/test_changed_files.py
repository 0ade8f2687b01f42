"""Data files that change while a process runs are read again, by everything that trains or attacks from files."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedstat import attack, data, store
from fedstat.data._files import Remembered, locate, note
from fedstat.study import experiment, federation, grid, tuning
from fedstat.study.run_settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore:.*were published")


def own(place: Path, label: int) -> dict[str, Any]:
    """A file of 40 images of two clients; the same size whatever the labels."""
    y = np.where(np.arange(40) % 2 == 0, label, 1 - label)
    np.savez(place / "own.npz", x=np.arange(640, dtype=np.uint8).reshape(40, 4, 4), y=y)
    return {"data": str(place / "own.npz")}


def mnist(place: Path, label: int) -> dict[str, Any]:
    for part in ("train", "t10k"):
        images, labels = np.full((40, 28, 28), 9, np.uint8), np.full(40, label, np.uint8)
        images[::2], labels[::2] = 7, 1 - label
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
            (place / f"{part}-{name}-ubyte").write_bytes(head + values.tobytes())
    return {"data": "mnist"}


def leaf(place: Path, label: int) -> dict[str, Any]:
    (folder := place / "femnist" / "all_data").mkdir(parents=True, exist_ok=True)
    y = [label, 1 - label] * 10
    users = {user: {"x": [[i / 100] * 784 for i in range(20)], "y": y} for user in ("f1", "f2")}
    (folder / "all.json").write_text(json.dumps({"users": [*users], "num_samples": [20, 20], "user_data": users}))
    return {"data": "femnist", "partition": "natural"}


def tiny(place: Path, label: int) -> dict[str, Any]:
    """Images lie two folders below the one that is looked for."""
    base = place / "tiny-imagenet-200"
    for wnid in ("n0", "n1"):
        (base / "train" / wnid / "images").mkdir(parents=True, exist_ok=True)
        for i in range(20):
            shade = 200 if int(wnid[1]) == label else 20
            Image.new("RGB", (64, 64), (shade,) * 3).save(base / "train" / wnid / "images" / f"{i}.JPEG")
    (base / "val" / "images").mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (64, 64)).save(base / "val" / "images" / "v.JPEG")
    (base / "val" / "val_annotations.txt").write_text("v.JPEG\tn0\t0\t0\t62\t62\n")
    (base / "wnids.txt").write_text("n0\nn1")
    return {"data": "tiny-imagenet:train"}


READERS: dict[str, Callable[[Path, int], dict[str, Any]]] = {"own": own, "mnist": mnist, "leaf": leaf, "tiny": tiny}
QUICK: dict[str, Any] = {
    "partition": "iid", "clients": 2, "rounds": 1, "participation": 1.0, "min_samples": 2, "net_options": "hidden=4",
    "algorithm": "fedavg", "batch_size": 0, "validation_fraction": 0.2, "optimizer": "sgd", "lr": 0.1,
}  # fmt: skip


def settings(place: Path, read: str, label: int) -> Settings:
    return Settings.of(**QUICK | READERS[read](place, label))


@pytest.mark.parametrize("read", READERS)
def test_what_is_dealt_is_what_the_files_hold_now(read: str, tmp_path: Path) -> None:
    for label in (0, 1, 0):
        fed, _ = experiment.federated(chosen := settings(tmp_path, read, label), tmp_path)
        again, _ = experiment.federated(chosen, tmp_path)
        assert again is fed, "files that stay as they are are read once"
        federation.forget_files()
        federation.federated.forget()
        fresh, _ = experiment.federated(chosen, tmp_path)
        assert fed.identical(fresh)


@pytest.mark.parametrize("name", [name for name in data.SOURCES if name != "digits"])
def test_the_first_file_of_a_published_data_set_is_where_it_is_looked_for(name: str, tmp_path: Path) -> None:
    source = data.SOURCES[name]
    assert locate(tmp_path, source) is None
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / source.places[-1]))) as error:
        data.load(name, tmp_path)
    assert any(first in str(error.value) for first in source.first)
    (tmp_path / source.places[-1]).mkdir(parents=True, exist_ok=True)
    (path := tmp_path / source.places[-1] / source.first[-1]).touch()
    assert locate(tmp_path, source) == path


def test_a_file_that_keeps_its_size_and_time_of_change_is_seen(tmp_path: Path) -> None:
    path, calls = tmp_path / "a", []
    read = Remembered(lambda name: calls.append(name) or note(Path(name)).read_text())
    path.write_text("old")
    assert [read(str(path)), read(str(path))] == ["old", "old"]
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text("new")
    os.utime(path, ns=times)
    assert read(str(path)) == "new"
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(str(path))
    assert len(calls) == 3


def counts(path: Path) -> np.ndarray:
    """Training samples of each class, over clients, as the store says."""
    return store.open_run(path)["clients/n_train"].sum("client").to_numpy()[:2]


USERS: dict[str, Callable[[Settings, Path], Path]] = {
    "run": lambda s, out: (experiment.run(s, out=out / "a.zarr"), out / "a.zarr")[1],
    "grid": lambda s, out: next(iter(grid.run_all([s], out))).path,
    "grid by an executor": lambda s, out: next(iter(grid.run_all([s], out, executor=ThreadPoolExecutor(1)))).path,
    "tune": lambda s, out: (list(tuning.tune(s, {"lr": [0.1]}, out)), next(out.glob("*.zarr")))[1],
}


@pytest.mark.parametrize("use", USERS)
def test_runs_train_on_the_file_as_it_is(use: str, tmp_path: Path) -> None:
    """Labels are unequally many: those of the first file, which was read before, are not those of the second."""
    for label in (0, 1):
        y = np.where(np.arange(40) < 10, label, 1 - label)
        np.savez(tmp_path / "own.npz", x=np.arange(640, dtype=np.uint8).reshape(40, 4, 4), y=y)
        chosen = Settings.of(**QUICK | {"data": str(tmp_path / "own.npz"), "max_samples": None})
        if label == 0:
            experiment.federated(chosen)
    path = USERS[use](chosen, tmp_path / "runs")
    assert counts(path).argmax() == 0
    fed, _ = experiment.federated(chosen)
    assert counts(path).tolist() == np.bincount(fed.y[fed.split == "train"], minlength=2).tolist()


def test_finished_runs_of_another_content_are_named_and_repeated_only_if_asked(tmp_path: Path) -> None:
    chosen, runs = settings(tmp_path, "own", 0), tmp_path / "runs"
    (run,) = grid.run_all([chosen], runs)
    assert run.made
    path = run.path
    assert [run.made for run in grid.run_all([chosen], runs)] == [False]
    before = store.config_of(path)["data_digest"]
    settings(tmp_path, "own", 1)
    (run,) = grid.run_all([chosen], runs)
    assert (run.state, run.changed) == ("outdated", ("own.npz",))
    with pytest.raises(ValueError, match=r"was made with another version of own\.npz. Repeat outdated runs"):
        list(tuning.tune(chosen, {"lr": [0.1]}, runs))
    assert [run.made for run in grid.run_all([chosen], runs, repeat=True)] == [True]
    assert store.config_of(path)["data_digest"] != before
    assert [run.made for run in grid.run_all([chosen], runs, repeat=True)] == [False]


def test_an_attack_sees_that_the_data_are_others(tmp_path: Path) -> None:
    chosen = settings(tmp_path, "own", 0)
    experiment.run(chosen, out=tmp_path / "run.zarr")
    quick: dict[str, Any] = {"images": 1, "iterations": 1, "labels": "given"}
    attack.leakage(tmp_path / "run.zarr", **quick)
    settings(tmp_path, "own", 1)
    with pytest.raises(ValueError, match="are not those of the run: other files"):
        attack.leakage(tmp_path / "run.zarr", **quick)


def test_another_folder_of_data_is_another_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for label in (0, 1):
        (place := tmp_path / str(label)).mkdir()
        chosen = settings(place, "mnist", label)
        monkeypatch.setenv("FEDSTAT_DATA", str(place))
        found.append(experiment.federated(chosen)[0])
    assert not np.array_equal(found[0].y, found[1].y)
