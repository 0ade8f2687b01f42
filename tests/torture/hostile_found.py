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
from fedstat.fl import algorithms, custom, nets, train
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


def heads(raw: bytearray, central: int, local: int, value: int) -> None:
    """Set a byte of every head in a zip file's directory, and of the one before each member."""
    for mark, offset in ((b"PK\1\2", central), (b"PK\3\4", local)):
        at = raw.find(mark)
        while at >= 0:
            raw[at + offset] = value
            at = raw.find(mark, at + 4)


@hostile("must have shape (4,)")
def own_labels_by_the_billion(at: Path) -> Read:
    zip_bomb(at / "own.npz", "y.npy", npy_head("(250000000,)", "<U1"), 15)
    return own_arrays(at)


@hostile(LIMIT)
def own_arrays_of_6_gigabytes_by_the_directory_too(at: Path) -> Read:
    path = zip_bomb(at / "own.npz", "x.npy", npy_head("(4, 200000000)"), 96)
    return own_arrays(path.parent)


@hostile(LIMIT)
def own_tokens_up_to_a_billion(at: Path) -> Read:
    """Their vocabulary was a list of 10⁹ strings."""
    return own_arrays(at, x=npy_head("(4, 3)", "<i8") + struct.pack("<12q", *range(11), 10**9))


@hostile(LIMIT)
def zip_of_350000_members(at: Path) -> Read:
    one = struct.pack("<4s6H3I5H2I", b"PK\1\2", 20, 20, 0, 0, 0, 33, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0) + b"x.npy"
    entries = one * 350_000
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, *(350_000,) * 2, len(entries), 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(entries), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (at / "own.npz").write_bytes(entries + wide + locator + end)
    return lambda: data.load(str(at / "own.npz"))


@normal
def own_arrays_beside_6_gigabytes_that_are_not_needed(at: Path) -> Read:
    zip_bomb(at / "own.npz", "z.npy", npy_head("(800000000,)"), 96)
    return own_arrays(at)


@normal
def weights_beside_6_gigabytes_that_are_not_needed(at: Path) -> Read:
    zip_bomb(at / "own.npz", "z.npy", npy_head("(800000, 1000)"), 96)
    own_arrays(at)
    return lambda: fedstat.read_weights([at / "own.npz"], layers=["x"], unit_axis=0)


def pickled(at: Path, content: bytes) -> Read:
    with zipfile.ZipFile(at / "a.pt", "w") as file:
        file.writestr("a/data.pkl", b"\x80\2" + content)
        file.writestr("a/data/0", bytes(400))
    return lambda: fedstat.read_weights([at / "a.pt"])


@hostile("but got")
def pt_that_sets_a_state_again_and_again(at: Path) -> Read:
    states = b"h\1b" * 100_000
    return pickled(at, b"ccollections\nOrderedDict\n)Rq\0}q\1(" + b"K\1N" * 200_000 + b"u0h\0" + states + b".")


@hostile("names an entry by a number")
def pt_of_keys_with_one_hash(at: Path) -> Read:
    prime = (1 << 61) - 1
    keys = b"".join(b"\x8a\x0b" + (i * prime).to_bytes(11, "little", signed=True) + b"N" for i in range(30_000))
    return pickled(at, b"}(" + keys + b"u.")


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0\x30X\3\0\0\0cpuK\x64tQ"
    b"K\0%bK\2\x86K\1K\1\x86\x89ccollections\nOrderedDict\n)RtR"
)


@hostile("whole numbers from 0")
def pt_of_a_tensor_whose_sizes_have_millions_of_digits(at: Path) -> Read:
    size = b"\x8b" + struct.pack("<i", 4_000_000) + b"\x7f" * 4_000_000
    return pickled(at, b"}X\1\0\0\0w" + TENSOR.replace(b"K\2\x86", size + b"\x86") % size + b"s.")


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
    "algorithm": lambda path: custom.constructor(f"{path}.py:mine"),
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
    "own_arrays_encrypted": case("is encrypted", lambda at: own_arrays(at, lambda raw: heads(raw, 8, 6, 1))),
    "own_arrays_of_unknown_compression": case(
        "compression method is not supported", lambda at: own_arrays(at, lambda raw: heads(raw, 10, 8, 97))
    ),
    "own_arrays_whose_stream_is_cut": case(
        "could not be read as plain arrays",
        lambda at: own_arrays(at, lambda raw: raw.__setitem__(slice(40, 60), b"\xff" * 20)),
    ),
    "own_arrays_of_64_gigabytes": case("but only 128 bytes", lambda at: own_arrays(at, x=npy_head("(8000000000, 1)"))),
    "own_arrays_that_are_not_there": case(
        "but only 4 bytes|has the shape", lambda at: own_arrays(at, x=npy_head("(4, 30000000)", "<f8") + b"1234")
    ),
    "own_samples_by_the_billion_without_features": case(
        "has the shape (1000000000,)",
        lambda at: own_arrays(at, x=npy_head("(1000000000, 0)"), y=npy_head("(1000000000,)", "<U0")),
    ),
    "own_arrays_of_nested_types": case(
        "could not be read as plain arrays", lambda at: own_arrays(at, x=npy_head("(4, 3)", "<f8'" + ", [('a', [" * 3))
    ),
    "safetensors_of_20000_tensors": case(
        LIMIT, lambda at: safe(at, {f"w{i}": entry([1, 1], 4 * i, 4 * i + 4) for i in range(20_000)}, bytes(80_000))
    ),
    "pt_that_doubles_a_string_forty_times": case(
        "a Python object of _codecs.encode", lambda at: pickled(at, b"c_codecs\nencode\n(C\1aX\3\0\0\0hextR" + b".")
    ),
    "pt_of_a_large_bytearray": case(
        "a Python object of builtins.bytearray",
        lambda at: pickled(at, b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R."),
    ),
    "pt_that_copies_a_dictionary_again_and_again": case(
        "could not be read as plain tensors",
        lambda at: pickled(
            at, b"ccollections\nOrderedDict\nq\0}q\1(" + b"K\1N" * 200_000 + b"u" + b"h\0h\1\x85R" * 100_000 + b"."
        ),
    ),
    "pt_of_two_million_values": case(LIMIT, lambda at: pickled(at, b"(" + b"N" * 2_200_000 + b"l.")),
    "pt_of_a_tensor_beyond_its_storage": case(
        "ends beyond its 100 numbers", lambda at: pickled(at, b"}X\1\0\0\0w" + TENSOR % b"J\xff\xff\xff\x7f" + b"s.")
    ),
    "pt_of_dictionaries_in_dictionaries": case(
        "nested too deeply",
        lambda at: pickled(
            at, b"}X\1\0\0\0a" * 10_000 + b"}X\1\0\0\0w" + TENSOR % b"K\0" + b"s" + b"s" * 10_000 + b"."
        ),
    ),
    "pt_that_sets_the_state_of_an_array": case(
        "sets the state of a ndarray", lambda at: pickled(at, TENSOR % b"K\2" + b"(K\1K\1K\1K\1tb.")
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
