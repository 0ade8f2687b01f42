"""Runs whose metadata, chunks, journal or attributes are made to do harm; each function returns its reading."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from google_crc32c import value as crc32c
from hostile_data import Read
from hostile_weights import LIMIT, hostile, normal
from numcodecs.blosc import Blosc
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


@hostile("metrics/accuracy is missing", "DamageError")
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


def packed(at: Path, content: bytes, codec: dict[str, Any] | None = None) -> Read:
    """A run whose chunk of losses is packed otherwise; nothing else says so."""

    def change(metadata: dict[str, Any]) -> None:
        if codec is not None:
            metadata["codecs"][1] = codec

    path = changed(at, f"{LOSS}/zarr.json", change)
    (path / LOSS / "c.0.0").write_bytes(content + struct.pack("<I", crc32c(content)))
    return lambda: fedstat.open_run(path)["metrics/loss"].load()


@hostile("unpack to more than the 80 bytes that its shape takes", "DamageError")
def chunk_that_is_a_bomb(at: Path) -> Read:
    return packed(at, Zstd().encode(np.zeros(1 << 26, np.uint8)))


@hostile("unpack to more than the 80 bytes", "DamageError")
def chunk_that_does_not_say_its_size(at: Path) -> Read:
    head = bytes.fromhex("28b52ffd 00 60")  # a window of 4 MiB and no size, then blocks of 128 KiB, each of 4 bytes
    block = struct.pack("<I", 1 << 1 | 131_072 << 3)[:3] + b"\0"
    return packed(at, head + block * 20_000 + struct.pack("<I", 1 | 1 << 1 | 131_072 << 3)[:3] + b"\0")


@hostile("unpack to more than the 80 bytes", "DamageError")
def chunk_that_is_a_gzip_bomb(at: Path) -> Read:
    return packed(at, gzip.compress(bytes(1 << 26), 1), {"name": "gzip", "configuration": {"level": 1}})


@hostile("unpack to more than the 80 bytes", "DamageError")
def chunk_that_is_a_blosc_bomb(at: Path) -> Read:
    content = Blosc("zstd").encode(np.zeros(1 << 26, np.uint8))
    options = {"typesize": 4, "cname": "zstd", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0}
    return packed(at, content, {"name": "blosc", "configuration": options})


@hostile("compressed more than once", "DamageError")
def chunk_that_is_packed_twice(at: Path) -> Read:
    zstd = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}
    path = changed(at, f"{LOSS}/zarr.json", lambda metadata: metadata["codecs"].insert(1, zstd))
    return lambda: fedstat.open_run(path)


@hostile("could not be read as a zarr store (format 3)")
def store_of_zarr_2(at: Path) -> Read:
    data = xr.Dataset(
        {"x": (("client", "sample", "feature"), np.ones((2, 3, 4))), "y": (("client", "sample"), np.ones((2, 3)))}
    )
    data.to_zarr(at / "a.zarr", zarr_format=2)
    return lambda: descent.read(at / "a.zarr")


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


@hostile("No such|cannot be read", "DamageError")
def run_to_repeat_that_is_a_pipe(at: Path) -> Read:
    settings = Settings(clients=8, rounds=1)
    path = at / "runs" / f"{grid.name_of(settings)}.zarr"
    path.mkdir(parents=True)
    os.mkfifo(path / "zarr.json")
    return lambda: list(grid.run_all([settings], at / "runs"))
