"""What was found to hang a reader, to fill the memory or to end in a traceback: arrays, pickles, grids and names."""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from hostile_data import Read
from hostile_weights import HOSTILE, LIMIT, case, entry, hostile, normal, npy_head, safe, zip_bomb

import fedstat
from fedstat import data, store
from fedstat.fl import algorithms, nets, train
from fedstat.ntk import descent
from fedstat.reporting.document import require_ours
from fedstat.study import collect, compare, grid


def own_arrays(at: Path, change: Callable[[bytearray], object] = bytes, **members: bytes) -> Read:
    """A user's arrays, some of them by their bytes, and a change of the file's."""
    whole = {"x": npy_head("(4, 3)", "<f4") + bytes(48), "y": npy_head("(4,)", "<i8") + bytes(32)} | members
    with zipfile.ZipFile(at / "own.npz", "a", zipfile.ZIP_DEFLATED) as file:
        for name, content in whole.items():
            if f"{name}.npy" not in file.namelist():
                file.writestr(f"{name}.npy", content)
    raw = bytearray((at / "own.npz").read_bytes())
    change(raw)
    (at / "own.npz").write_bytes(raw)
    return lambda: data.load(str(at / "own.npz"))


@hostile(LIMIT)
def own_arrays_of_6_gigabytes_by_the_directory_too(at: Path) -> Read:
    path = zip_bomb(at / "own.npz", "x.npy", npy_head("(4, 200000000)"), 96)
    return own_arrays(path.parent)


@hostile(LIMIT)
def own_tokens_up_to_a_billion(at: Path) -> Read:
    """Their vocabulary was a list of 10⁹ strings."""
    return own_arrays(at, x=npy_head("(4, 3)", "<i8") + struct.pack("<12q", *range(11), 10**9))


def toml(at: Path, text: str) -> Read:
    (at / "grid.toml").write_text(text)
    return lambda: grid.cells(at / "grid.toml")


@hostile(LIMIT)
def grid_of_a_sweep_of_10_to_the_14(at: Path) -> Read:
    values = ", ".join(f"{i / 1000}" for i in range(1, 900))
    names = ("kappa", "tau", "lr", "server_lr", "participation")
    lists = "\n".join(f"{name} = [{values}]" for name in names)
    return toml(at, f"[[method]]\nalgorithm = 'fedfac-dynamic'\n[method.sweep]\n{lists}\n")


@hostile("must be names, such as 'fc1'")
def layer_named_by_a_number(_: Path) -> Read:
    return lambda: fedstat.read_weights([{"fc1.weight": np.ones((2, 3))}], layers=[0])  # type: ignore[list-item]


@normal
def weights_that_are_a_part_of_conjugated_numbers(_: Path) -> Read:
    part = torch.complex(torch.ones(2, 3), torch.ones(2, 3)).conj().imag
    read = fedstat.read_weights([{"fc1.weight": part}])
    assert (read["fc1"]["w"] == -1).all()
    return lambda: fedstat.icc(torch.stack([part, 2 * part]) + torch.rand(2, 2, 3))


@hostile("does not take samples of shape (5,): its first parameter, 'fc1.weight', has shape (8, 6)")
def network_of_another_width(_: Path) -> Read:
    given = fedstat.sim.generate(clients=4, d=5, m=8, n_train=12, n_test=6)
    return lambda: train(given, nets.mlp([6, 8, 1]), algorithms.fedavg(), rounds=1, threads=1)


EDGES: dict[str, Callable[[str], object]] = {
    "read_weights": lambda path: fedstat.read_weights([path + ".pt"]),
    "split": fedstat.split,
    "split of a pattern": lambda path: fedstat.split(path + "*"),
    "open_run": fedstat.open_run,
    "config_of": store.config_of,
    "stores": store.stores,
    "damage": lambda path: store.damage(path, checksums=True, require=True),
    "report": fedstat.report,
    "report to": lambda path: require_ours("out", Path(path)),
    "compare": lambda path: compare.compare_runs([path]),
    "collect": collect.collect,
    "claim": lambda path: store.require_available(path, "fedstat.fl"),
    "claim, nearly": lambda path: store.require_available(path[:250], "fedstat.fl"),
    "own arrays": lambda path: data.load(path + ".npz"),
    "folder of data sets": lambda path: data.load("mnist", path),
    "open_folder": data.open_folder,
    "zarr store of data": descent.read_samples,
    "grid": grid.cells,
    "grid to": lambda path: list(grid.run_all([], path)),
    "algorithm": lambda path: algorithms.constructor(f"{path}.py:mine"),
}
"""What takes a path."""

for name, edge in EDGES.items():
    HOSTILE[f"name of 300 characters, {name}"] = (
        lambda _, edge=edge: lambda: edge("a" * 300),  # type: ignore[dict-item]
        "ValueError",
        "cannot be the path of a file: File name too long",
    )
    if name != "claim, nearly":
        HOSTILE[f"name with a null byte, {name}"] = (
            lambda _, edge=edge: lambda: edge("a\0b"),  # type: ignore[dict-item]
            "ValueError",
            "cannot be the path of a file: embedded null",
        )


HOSTILE |= {
    "own_arrays_of_64_gigabytes": case(
        "takes more memory than this process can get", lambda at: own_arrays(at, x=npy_head("(8000000000, 1)"))
    ),
    "safetensors_of_20000_tensors": case(
        LIMIT, lambda at: safe(at, {f"w{i}": entry([1, 1], 4 * i, 4 * i + 4) for i in range(20_000)}, bytes(80_000))
    ),
    "grid_with_a_key_of_100000_parts": case("is nested too deep", lambda at: toml(at, "a" + ".a" * 100_000 + " = 1")),
    "grid_with_a_quoted_key_of_1000_parts": case(
        "is nested too deep", lambda at: toml(at, "[" + '"\\"".' * 1_000 + "a]\n")
    ),
    "grid_of_arrays_in_arrays": case("nested too deep", lambda at: toml(at, "x = " + "[" * 900 + "]" * 900)),
    "grid_of_140000_seeds": case(LIMIT, lambda at: toml(at, f"seeds = {[i % 10 for i in range(140_000)]}")),
    "grid_of_two_megabytes": case(LIMIT, lambda at: toml(at, f"label = '{'a' * 2_000_000}'")),
    "grid_with_a_long_value": case(
        "clients must be an integer >= 1, but got 'aaa", lambda at: toml(at, f"clients = '{'a' * 500_000}'")
    ),
    "grid_with_a_long_key": case(
        "has 500,000 characters, but at most 200 are read", lambda at: toml(at, f"{'a' * 500_000} = 1")
    ),
    "weights_of_meta_tensors": case(
        "holds no numbers", lambda _: lambda: fedstat.icc(torch.ones(3, 4, 5, device="meta"))
    ),
}
