"""Sound files, changed at random, for every parser: ``python tests/torture/fuzz.py SECONDS [TARGET ...]``.

A target takes bytes and may raise ValueError or FileNotFoundError, with a message of bearable length. Anything else, or
more than 5 seconds of computing, is a find: it is made small, printed, and the exit status is 1. Keep it as a case of
``test_hostile_files``.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google_crc32c import value as crc32c
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from numcodecs.zstd import Zstd
from scipy.io import savemat

import fedstat
from fedstat import data, store
from fedstat._utils import check as _check
from fedstat.data import cifar, leaf, mnist, svhn
from fedstat.study import Settings, collect, federation, grid, selection, tuning

SECONDS, MEMORY, LIMIT = 5, 1 << 30, 1 << 28
PLACE = Path(tempfile.gettempdir()) / f"fuzz-{os.getpid()}"
SIMULATIONS = Path(__file__).parents[2] / "simulations"
TOKENS = [
    b"\0", b"\xff", b"\xff\xff\xff\x7f", b"\xff" * 8, struct.pack("<q", 1 << 40), b"0", b"-1", b"1e999", b"9" * 50,
    b"NaN", b"null", b"true", b"[]", b"{}", b'""', b"[", b"{", b"(", b".", b":", b",", b"=", b"\n", b'"', b"\\u0000",
    b"../", b"/", b"*", "é".encode(), b"PK\1\2", b"\x93NUMPY", b"\x28\xb5\x2f\xfd", b"<U1", b"|O", b"inf", b"KiB",
    b"[[a]]\n", b"\x85R", b"h\0",
]  # fmt: skip


def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Target that writes the bytes to a file and reads it."""

    def target(content: bytes) -> None:
        path = PLACE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        read(path)

    return target


def text(read: Callable[[str], object]) -> Callable[[bytes], None]:
    """Target that takes the bytes for an argument of a command line."""
    return lambda content: read(content.decode("utf-8", "surrogateescape")) and None


def saved(write: Callable[[Any], object]) -> bytes:
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def in_run(name: str, seal: Callable[[bytes], bytes], read: Callable[[Path], object]) -> Callable[[bytes], None]:
    """Target that puts the bytes, sealed, in the place of a file of a run without a journal."""

    def target(content: bytes) -> None:
        path = PLACE / "run.zarr"
        before = (path / name).read_bytes()
        (path / name).write_bytes(seal(content))
        try:
            read(path)
        finally:
            (path / name).write_bytes(before)

    return target


def make_run() -> None:
    """The run of those targets, small, and sound but for its journal."""
    given_ = fedstat.sim.generate(clients=3, d=4, m=5, n_train=8, n_test=4)
    net = fedstat.fl.nets.mlp([4, 5, 1])
    method = fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.7)
    fedstat.fl.train(given_, net, method, rounds=2, batch_size=4, lr=0.05, threads=1, out=PLACE / "run.zarr")
    shutil.rmtree(PLACE / "run.zarr" / "journal")


def raw_log(content: bytes) -> None:
    """The log of a store."""
    folder = PLACE / "log" / store.JOURNAL
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log").write_bytes(content)
    store.damage(folder.parent, checksums=True)


def log_line(content: bytes) -> bytes:
    """A line of the log, with the checksum and length that it must have."""
    return b"%08x %d %b\n" % (zlib.crc32(content), len(content), content)


def chunk(content: bytes) -> bytes:
    return content + struct.pack("<I", crc32c(content))


def opened(path: Path) -> None:
    fedstat.open_run(path, verify=False).load()


def tabulated(path: Path) -> None:
    fedstat.report(path).html  # noqa: B018
    collect.collect(path)


ENTRY = b'{"files":{"metrics/loss/c.0.0":[3,4,"0"]},"without":["a"]}'
STATE = {"fc1.weight": torch.ones(4, 3), "fc1.bias": torch.ones(4)}
FACTORS = {
    "a.weight_orig": torch.ones(4, 3), "a.weight_mask": torch.ones(4, 3), "b.weight_g": torch.ones(2, 1),
    "b.weight_v": torch.ones(2, 3), "c.weight_orig": torch.ones(3, 3), "c.weight_u": torch.ones(3),
    "c.weight_v": torch.ones(3), "r.weight_ih_l0": torch.ones(8, 3), "r.weight_hh_l0": torch.ones(8, 2),
}  # fmt: skip
NESTED = {"model": FACTORS, "head": STATE, "optimizer": {"param_groups": [{"lr": 0.1}]}}
KERAS = json.dumps({
    "d/kernel:0": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "d/bias:0": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
})  # fmt: skip
SAFE = json.dumps({"w.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {"a": "b"}})
PLAYS = b"by William Shakespeare\n\nPLAY\n\nby William Shakespeare\n" + b"  Fool. word word word\n  King. a b c\n" * 9
USERS = {"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[0.5] * 784], "y": [1]}}}
BATCH = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]}
IMAGES = b"\0\0\x08\3" + struct.pack(">3I", 2, 3, 4) + bytes(24)
OWN = partial(np.savez, x=np.ones((4, 3)), y=np.arange(4), client=np.arange(4), split=np.array(["train"] * 4))
PACKED_OWN = saved(partial(np.savez_compressed, x=np.ones((4, 3)), y=np.arange(4)))
MAT = saved(lambda to: savemat(to, {"X": np.zeros((32, 32, 3, 1), np.uint8), "y": np.ones((1, 1), np.uint8)}))
Target = tuple[Callable[[bytes], None], list[bytes]]


def _check_tuning(path: Path) -> None:
    candidates, _, _, procedure = grid.tuning(path)
    tuning.check(Settings(validation_fraction=0.1), candidates, **procedure)


TARGETS: dict[str, Target] = {
    "safetensors": (
        file("a.safetensors", lambda path: fedstat.read_weights([path])),
        [len(SAFE).to_bytes(8, "little") + SAFE.encode() + bytes(24)],
    ),
    "safetensors head": (
        lambda content: file("a.safetensors", lambda path: fedstat.read_weights([path]))(
            len(content).to_bytes(8, "little") + content + bytes(24)
        ),
        [SAFE.encode(), KERAS.encode()],
    ),
    "npz": (
        file("a.npz", lambda path: fedstat.read_weights([path])),
        [saved(partial(np.savez, **{"fc1.weight": np.ones((3, 4))})), saved(partial(np.savez, **FACTORS))],
    ),
    "own arrays": (file("own.npz", lambda path: data.load(str(path))), [saved(OWN), PACKED_OWN]),
    "own tables": (
        file("own.csv", lambda path: data.load(str(path))),
        [b"a,b,y,client,split\n1,2.5,u,7,train\n3,4,v,8,test\n"],
    ),
    "torch": (
        file("a.pt", lambda path: fedstat.read_weights([path])),
        [
            saved(partial(torch.save, STATE)),
            saved(partial(torch.save, NESTED)),
            saved(partial(torch.save, NESTED, _use_new_zipfile_serialization=False)),
        ],
    ),
    "log": (raw_log, [log_line(ENTRY) * 2]),
    "line of a log": (lambda content: raw_log(log_line(content)), [ENTRY]),
    "grid": (file("grid.toml", grid.cells), [path.read_bytes()[:3000] for path in sorted(SIMULATIONS.glob("*.toml"))]),
    "tuning": (
        file("grid.toml", grid.tuning),
        [b"[tune]\ntau = [0.5, 'mean']\nseeds = [0]\n[tune.quick]\nkappa = [0.5]\n"],
    ),
    "procedure of tuning": (
        file("grid.toml", _check_tuning),
        [
            b"[tune]\nlr = [0.1, 1.0]\nextend = true\n",
            b"[tune]\nlr = {low = 0.1, high = 1, log = true}\nsearch = 'optuna'\nbudget = 5\n",
            b"[tune]\nkappa = {low = 0.5, high = 0.9, step = 0.1}\nsearch = 'optuna'\nbudget = 5\n",
        ],
    ),
    "tuned folder": (
        file(selection.FILE, lambda path: selection.read(path.parent)),
        [
            json.dumps({"layout": 1, "selected": [entry]}).encode()
            for entry in (
                {"scenario": "a", "algorithm": "b", "settings": {"lr": "1"}, "final": ["x"], "candidates": ["y"]},
                {"scenario": "a", "algorithm": "b", "settings": None, "final": [], "candidates": []},
            )
        ],
    ),
    "options": (
        text(lambda given_: federation.network_options("options", tuple(given_.split(" ")))),
        [b"a=1 b=2,3 c=true d=x"],
    ),
    "options of a method": (
        text(lambda given_: Settings(algorithm="fedprox+", options=tuple(given_.split(" ")))),
        [b"mu=0.1", b"mu=0.1 epochs=2 rate=0.1"],
    ),
    "partition": (text(federation.partition_of), [b"dirichlet:0.1", b"pathological:2", b"natural", b"iid"]),
    "layers": (text(lambda given_: Settings.of(layers=given_.split(" "))), [b"fc1", b"1 2", b"-1", b"fc*"]),
    "units of memory": (text(lambda given_: _check.in_bytes("memory", given_)), [b"2GiB", b"500 MB", b"1.5kB", b"100"]),
    "data and network": (
        text(
            lambda given_: Settings(**dict(zip(("data", "net", "prediction_rules"), given_.split(" "), strict=False)))
        ),
        [b"digits mlp fedavg+", b"cifar-100:test lenet fedfac-dynamic+"],
    ),
    "metadata of a run": (in_run("zarr.json", bytes, opened), []),
    "metadata of an array": (in_run("metrics/loss/zarr.json", bytes, opened), []),
    "attributes of a run": (in_run("zarr.json", bytes, tabulated), []),
    "layout of an array": (in_run("metrics/accuracy/zarr.json", bytes, tabulated), []),
    "chunk": (in_run("metrics/loss/c.0.0", chunk, opened), [bytes(Zstd().encode(np.zeros(6, np.float32)))]),
    "idx": (file("a-idx3-ubyte", lambda path: mnist.read_idx([path])), [IMAGES, gzip.compress(IMAGES)]),
    "CIFAR": (file("test_batch", cifar.unpickle), [pickle.dumps(BATCH, protocol=2), pickle.dumps(BATCH, protocol=4)]),
    "MATLAB": (
        file("a.mat", svhn._read_file),
        [MAT],
    ),
    "LEAF": (
        file("leaf/train/a.json", lambda path: leaf.load_leaf("femnist", path.parents[1], "train")),
        [json.dumps(USERS).encode()],
    ),
    "articles": (
        file("test.csv", lambda path: data.load("ag-news", path.parent, split="test")),
        [b'"1","A","b c"\n' * 2],
    ),
    "plays": (
        file("100.txt", lambda path: data.load("shakespeare", path.parent)),
        [PLAYS],
    ),
}


def refused(target: Callable[[bytes], None], content: bytes) -> None:
    """Give the bytes to a target; AssertionError unless it takes or refuses them in time."""
    began = time.process_time()
    signal.alarm(10 * SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target(content)
    except (ValueError, FileNotFoundError) as error:
        assert len(str(error)) < 2000, f"a message of {len(str(error))} characters: {str(error)[:200]}"  # noqa: PT017
    except KeyboardInterrupt:  # which no reader takes for an error of its file
        raise AssertionError("it hangs") from None
    finally:
        signal.alarm(0)
    assert time.process_time() - began < SECONDS, "it takes too long"


@st.composite
def changed(draw: Any, seeds: list[bytes]) -> bytes:
    """Bytes of a sound file after some changes, or any bytes."""
    if draw(st.integers(0, 15)) == 0:
        return draw(st.binary(max_size=200))
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(content)))
        width = draw(st.sampled_from([0, 1, 1, 2, 4, 8, 16, 100]))
        new = draw(
            st.one_of(st.sampled_from(TOKENS), st.binary(max_size=4), st.just(bytes(content[at : at + width]) * 2))
        )
        content[at : at + width] = new * draw(st.sampled_from([1, 1, 1, 1, 2, 1000]))
    return bytes(content[: 1 << 16])


def fuzz(name: str, seconds: float, first: int) -> str:
    """Try a target for some seconds, and return what was found, if anything was."""
    target, seeds = TARGETS[name]
    last = PLACE.with_name("fuzzed")
    end, number, tried = time.monotonic() + seconds, first, [0]
    while time.monotonic() < end:
        number += 1

        @seed(number)
        @settings(
            max_examples=200, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(changed(seeds))
        def check(content: bytes) -> None:
            tried[0] += 1
            last.write_bytes(content)  # for what crashes
            if time.monotonic() < end + 60:
                refused(target, content)

        try:
            check()
        except BaseException:
            return "\n".join(line[:300] for line in traceback.format_exc(limit=-6).splitlines())
    print(f"{name}: {tried[0]:,} files", flush=True)
    return ""


def apart(name: str, seconds: float) -> int:
    """Try a target in a child process, and return 1 if anything is found, a crash among it."""
    child = os.fork()
    if child == 0:
        if found := fuzz(name, seconds, time.time_ns() // 1_000_000):
            print(f"{name}:\n{found}", flush=True)
        os._exit(bool(found))
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        print(
            f"{name}: crashed by signal {os.WTERMSIG(status)}, by the file in {PLACE.with_name('fuzzed')}", flush=True
        )
    return int(status != 0)


def main(seconds: float, names: list[str]) -> int:
    """Try targets, all by default, for some seconds together; 1 if anything is found."""
    os.environ["FEDSTAT_MAX_BYTES"] = str(LIMIT)
    PLACE.mkdir()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make_run()
        for name, (_, seeds) in TARGETS.items():
            if not seeds:
                where = "metrics/loss/zarr.json" if "an array" in name else "zarr.json"
                seeds.append((PLACE / "run.zarr" / where).read_bytes())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        os.chdir(PLACE)
        names = names or list(TARGETS)
        return max([apart(name, seconds / len(names)) for name in names])
    finally:
        shutil.rmtree(PLACE)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
