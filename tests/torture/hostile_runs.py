"""Runs whose metadata, chunks, journal or attributes are made to do harm; each function returns its reading."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from google_crc32c import value as crc32c
from hostile_data import Read
from hostile_weights import LIMIT, Code, hostile, normal
from numcodecs.zstd import Zstd
from readers import run

import fedstat
from fedstat import store
from fedstat.ntk import descent
from fedstat.study import collect, grid, leaderboard
from fedstat.study.run_settings import Settings

LOSS = "metrics/loss"


def changed(at: Path, file: str, change: Callable[[dict[str, Any]], object], *, journal: bool = False) -> Path:
    """A run with other metadata; without its journal, which would say so, or with one that agrees."""
    path = run(at)
    metadata = json.loads((path / file).read_text())
    change(metadata)
    (path / file).write_text(json.dumps(metadata))
    if journal:
        agree(path, file)
    else:
        shutil.rmtree(path / "journal")
    return path


def line(files: dict[str, Any], without: list[Any] = []) -> bytes:  # noqa: B006
    text = json.dumps({"files": files, "without": without}).encode()
    return b"%08x %d %b\n" % (zlib.crc32(text), len(text), text)


def agree(path: Path, *files: str) -> None:
    """Add to the log that files are as they are."""
    contents = {file: (path / file).read_bytes() for file in files}
    with (path / "journal" / "log").open("ab") as log:
        log.write(line({file: [len(raw), zlib.crc32(raw), "7"] for file, raw in contents.items()}))


def attribute(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda metadata: metadata["attributes"].__setitem__(name, value)


@hostile("nested 100,000 levels deep", "DamageError")
def run_of_settings_nested_deeply(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("config", "[" * 100_000), journal=True)
    return lambda: fedstat.split(path)


@hostile("settings in its attribute groups cannot be read", "DamageError")
def run_of_an_order_of_groups_nested_deeply(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("groups", "[" * 100_000), journal=True)
    return lambda: fedstat.open_run(path)


@normal
def run_of_an_order_of_groups_that_are_none(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("groups", json.dumps([0, [], {}, "a", "/" * 400_000])), journal=True)
    return lambda: fedstat.open_run(path)


@hostile("settings in its attribute config cannot be read", "DamageError")
def settings_nested_deeply(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("config", "[" * 100_000))
    return lambda: store.config_of(path)


@normal
def report_of_a_run_of_settings_nested_deeply(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("config", "[" * 100_000))
    return lambda: fedstat.report(path).html


@hostile("zarr.json cannot be read", "DamageError")
def run_of_attributes_nested_deeply(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("config", 0))
    (path / "zarr.json").write_text('{"attributes": ' + '{"a":' * 100_000 + "0" + "}" * 100_001)
    return lambda: fedstat.open_run(path)


@hostile("metrics/accuracy or metrics/rmse is missing", "DamageError")
def run_without_an_array(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("note", ""))
    shutil.rmtree(path / "metrics" / "accuracy")
    return lambda: fedstat.open_run(path)


@normal
def report_of_a_run_without_an_array(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("note", ""))
    shutil.rmtree(path / "metrics" / "accuracy")
    return lambda: fedstat.report(path).html


def opened_without(at: Path, *groups: str) -> xr.DataTree:
    """A run that is open, without some of its groups or arrays."""
    parts = fedstat.open_run(run(at)).load().to_dict()
    for group in groups:
        parent, _, name = group.rpartition("/")
        if group in parts:
            del parts[group]
        else:
            parts[parent] = parts[parent].drop_vars(name)
    return xr.DataTree.from_dict(parts)


@hostile("the run holds no weights (checkpoint, client)")
def weights_of_a_run_without_weights(at: Path) -> Read:
    tree = opened_without(at, "/weights/fc1", "/weights/fc2", "/weights")
    return lambda: fedstat.fl.client_weights(tree, "fc1")


@hostile("the run holds no weights (checkpoint, client)")
def model_of_a_run_without_checkpoints(at: Path) -> Read:
    tree = opened_without(at, "/weights/fc1", "/weights/fc2")
    tree["/weights/fc1"] = xr.DataTree(xr.Dataset({"w": ("unit", np.ones(3))}))
    return lambda: fedstat.fl.state_dict(tree)


@hostile("must be a run that fedstat.fl.train")
def figure_of_a_run_without_accuracies(at: Path) -> Read:
    tree = opened_without(at, "/metrics/accuracy")
    return lambda: fedstat.plot.client_boxplot(tree)


@hostile("must be a run that fedstat.fl.train")
def scores_of_a_run_without_attributes(at: Path) -> Read:
    tree = opened_without(at)
    tree.attrs = {}
    return lambda: leaderboard.scores(tree)


@hostile("must be a run that fedstat.fl.train")
def runs_of_a_table_without_settings(at: Path) -> Read:
    path = changed(at, "zarr.json", attribute("config", "{}"))
    return lambda: collect.collect(path)


@hostile("metrics/loss is damaged (Stored and computed checksum do not match", "DamageError")
def run_of_a_changed_byte(at: Path) -> Read:
    path = run(at)
    raw = bytearray((path / LOSS / "c.0.0").read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / LOSS / "c.0.0").write_bytes(raw)
    return lambda: fedstat.open_run(path)["metrics"].load()


@hostile("metrics/round is damaged (Stored and computed checksum do not match", "DamageError")
def run_of_a_changed_byte_of_a_coordinate(at: Path) -> Read:
    path = run(at)
    raw = bytearray((path / "metrics/round/c/0").read_bytes())
    raw[len(raw) // 2] ^= 1
    (path / "metrics/round/c/0").write_bytes(raw)
    return lambda: fedstat.open_run(path)


def of_shape(*shape: int, chunk: tuple[int, ...] = ()) -> Callable[[dict[str, Any]], object]:
    def change(metadata: dict[str, Any]) -> None:
        metadata["shape"] = list(shape)
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = list(chunk or shape)

    return change


@hostile(LIMIT)
def run_of_a_chunk_of_4_terabytes(at: Path) -> Read:
    path = changed(at, f"{LOSS}/zarr.json", of_shape(1_000_000, 1_000_000))
    return lambda: fedstat.open_run(path)


@hostile(LIMIT)
def run_of_two_million_chunks(at: Path) -> Read:
    path = changed(at, f"{LOSS}/zarr.json", of_shape(2_000, 1_000, chunk=(1, 1)))
    return lambda: fedstat.open_run(path)


@hostile(LIMIT)
def run_of_an_array_of_4_terabytes(at: Path) -> Read:
    path = changed(at, f"{LOSS}/zarr.json", of_shape(1_000_000, 1_000_000, chunk=(4_000, 4_000)))
    for name in ("accuracy", "accuracy_before", "train_loss", "seconds", "bytes_up", "bytes_down", "n_train", "n_test"):
        shutil.rmtree(path / "metrics" / name)
    for name in ("round", "client"):
        shutil.rmtree(path / "metrics" / name)
    return lambda: fedstat.open_run(path, verify=False)["metrics/loss"].load()


@hostile(LIMIT)
def run_of_a_coordinate_of_8_gigabytes(at: Path) -> Read:
    path = changed(at, "clients/class/zarr.json", of_shape(1_000_000_000, chunk=(1_000_000,)))
    shutil.rmtree(path / "clients" / "n_train")
    return lambda: fedstat.open_run(path)


@hostile("metrics/loss is damaged", "DamageError")
def chunk_that_unpacks_to_more_than_its_shape_takes(at: Path) -> Read:
    path = changed(at, f"{LOSS}/zarr.json", lambda _: None)
    content = Zstd().encode(np.zeros(1 << 26, np.uint8))
    (path / LOSS / "c.0.0").write_bytes(content + struct.pack("<I", crc32c(content)))
    return lambda: fedstat.open_run(path)["metrics/loss"].load()


@hostile("could not be read as a zarr store of format 3")
def zarr_2_store_that_runs_code(at: Path) -> Read:
    group = zarr.open_group(at / "a.zarr", mode="w", zarr_format=2)
    for name, shape in (("x", (2, 3, 4)), ("y", (2, 3)), ("sample", (3,))):
        array = group.create_array(name, shape=shape, dtype="f8", filters=None, compressors=None)
        array.attrs["_ARRAY_DIMENSIONS"] = (
            ["client", "sample", "feature"][3 - len(shape) :]
            if name == "x"
            else (["client", "sample"][2 - len(shape) :])
        )
    metadata = json.loads((at / "a.zarr" / "sample" / ".zarray").read_text())
    metadata |= {"dtype": "|O", "filters": [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}], "fill_value": 0}
    (at / "a.zarr" / "sample" / ".zarray").write_text(json.dumps(metadata))
    (at / "a.zarr" / "sample" / "0").write_bytes(pickle.dumps([Code()] * 3))
    return lambda: descent.read_samples(at / "a.zarr")


def logged(at: Path, *lines: bytes) -> Path:
    """A run, unfinished, whose log goes on with these lines."""
    path = changed(at, "zarr.json", lambda metadata: metadata["attributes"].pop("ended"), journal=True)
    with (path / "journal" / "log").open("ab") as log:
        log.writelines(lines)
    return path


def resumed(path: Path) -> Read:
    return lambda: store.resume(path, store.config_of(path), command="fedstat.fl")


@hostile("of journal/log", "DamageError")
def log_that_places_a_file_outside(at: Path) -> Read:
    path = logged(at, line({"../../precious": [3, zlib.crc32(b"bad"), "9"]}))
    (path / "journal" / "9").write_bytes(b"bad")
    return resumed(path)


@hostile("of journal/log", "DamageError")
def log_that_removes_a_file_outside(at: Path) -> Read:
    return resumed(logged(at, line({"/etc/hosts": [3, 4, "9"]})))


@hostile("metrics is a link", "DamageError")
def folder_of_a_run_that_is_a_link_to_the_outside(at: Path) -> Read:
    path = logged(at)
    (path / "metrics").rename(at / "outside")
    (path / "metrics").symlink_to(at / "outside")
    return resumed(path)


@hostile("journal/lock is not a regular file", "DamageError")
def lock_that_is_a_link_to_the_outside(at: Path) -> Read:
    path = logged(at)
    (at / "precious").write_text("precious")
    (path / "journal" / "lock").symlink_to(at / "precious")
    return resumed(path)


LINES: dict[str, bytes] = {
    "a list": b"[]",
    "files that are a list": b'{"files": [], "without": []}',
    "an entry of two": b'{"files": {"a": [1, 2]}, "without": []}',
    "an entry that is a number": b'{"files": {"a": 1}, "without": []}',
    "a size in words": b'{"files": {"a": ["1", 2, "3"]}, "without": []}',
    "a staged name in words": b'{"files": {"a": [1, 2, "x"]}, "without": []}',
    "a staged name of 5000 digits": b'{"files": {"a": [1, 2, "' + b"9" * 5_000 + b'"]}, "without": []}',
    "a removal of nothing": b'{"files": {}, "without": [3]}',
    "no removals": b'{"files": {}}',
    "nested deeply": b"[" * 100_000,
    "no JSON": b"{",
    "a key that is empty": b'{"files": {"": [1, 2, "3"]}, "without": []}',
    "a key with a null byte": b'{"files": {"a\\u0000": [1, 2, "3"]}, "without": []}',
    "a number of 5000 digits": b'{"files": {"a": [' + b"9" * 5_000 + b', 2, "3"]}, "without": []}',
    "a file twice": b'{"files": {"a": [1, 2, "3"], "a": [1, 2, "3"]}, "without": []}',
}


def of_line(text: bytes) -> Callable[[Path], Read]:
    def log(at: Path) -> Read:
        path = logged(at, b"%08x %d %b\n" % (zlib.crc32(text), len(text), text))
        return lambda: fedstat.open_run(path)

    return log


for what, text in LINES.items():
    log = of_line(text)
    log.__name__ = f"log with a line of {what}"
    hostile("of journal/log", "DamageError")(log)


@normal
def log_whose_line_promises_5000_digits(at: Path) -> Read:
    path = logged(at, b"%08x %b {" % (0, b"9" * 5_000))
    return lambda: fedstat.open_run(path)


@hostile("and 994 more", "DamageError")
def log_of_1000_files_that_are_missing(at: Path) -> Read:
    path = logged(at, line({f"metrics/loss/c.{i}.0": [9, 9, "9"] for i in range(1, 1_000)}))
    return lambda: fedstat.open_run(path)


@hostile("nearly all are holes", "DamageError")
def state_of_a_terabyte_of_holes(at: Path) -> Read:
    path = logged(at, line({"journal/state": [1 << 40, 0, "9"]}))
    os.truncate(path / "journal" / "state", 1 << 40)
    return lambda: fedstat.open_run(path, verify=True)


@hostile("failed, DamageError", "FailedRunsError")
def run_to_repeat_that_is_a_pipe(at: Path) -> Read:
    settings = Settings(clients=8, rounds=1)
    path = at / "runs" / f"{grid.name_of(settings)}.zarr"
    path.mkdir(parents=True)
    os.mkfifo(path / "zarr.json")
    return lambda: list(grid.run_all([settings], at / "runs"))
