"""Files of weights that are damaged, careless or made to do harm; each function writes one and returns its reading."""

from __future__ import annotations

import json
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch

from fedstat.decompose import read_weights

Case = Callable[[Path], Callable[[], object]]
HOSTILE: dict[str, tuple[Case, str, str]] = {}  # by name: how it is made, the error's type, a part of its message
NORMAL: dict[str, Case] = {}
LIMIT = "FEDSTAT_MAX_BYTES"
_BLOCK = 1 << 26


def case(word: str, make: Case, kind: str = "") -> tuple[Case, str, str]:
    return make, kind or ("LimitError" if word == LIMIT else "ValueError"), word


def hostile(word: str, kind: str = "") -> Callable[[Case], Case]:
    def add(make: Case) -> Case:
        HOSTILE[make.__name__] = case(word, make, kind)
        return make

    return add


def normal(make: Case) -> Case:
    NORMAL[make.__name__] = make
    return make


@cache
def zeros() -> bytes:
    """64 MiB of zeros deflated, which may be repeated: a bomb is made as fast as it is written."""
    squeeze = zlib.compressobj(9, wbits=-15)
    return squeeze.compress(bytes(_BLOCK)) + squeeze.flush(zlib.Z_FULL_FLUSH)


def zip_bomb(path: Path, member: str, head: bytes, blocks: int) -> Path:
    """Zip file whose only member is ``head`` and ``blocks`` times 64 MiB of zeros; its checksum is not filled in."""
    squeeze = zlib.compressobj(9, wbits=-15)
    body = squeeze.compress(head) + squeeze.flush(zlib.Z_FULL_FLUSH) + zeros() * blocks + b"\x03\x00"
    size, name = len(head) + blocks * _BLOCK, member.encode()
    big = size >= 1 << 32
    wide = struct.pack("<HHQ", 1, 8, size) if big else b""
    fields = (45, 0, 8, 0, 33, 0, len(body), 0xFFFFFFFF if big else size, len(name))
    entry = struct.pack("<4s6H3I5H2I", b"PK\1\2", 45, *fields, len(wide), 0, 0, 0, 0, 0) + name + wide
    local = struct.pack("<4s5H3I2H", b"PK\3\4", *fields[:6], *fields[6:], 0) + name
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local) + len(body), 0)
    path.write_bytes(local + body + entry + end)
    return path


def npy_head(shape: str, descr: str = "<f8") -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(head)) + head.encode()


def saved(at: Path, content: object, name: str = "a.pt", **options: bool) -> Callable[[], object]:
    torch.save(content, at / name, **options)
    return lambda: read_weights([at / name])


def safe(at: Path, header: object, data: bytes = b"") -> Callable[[], object]:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (at / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return lambda: read_weights([at / "a.safetensors"])


def entry(shape: list[object], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def arrays(at: Path, **content: object) -> Callable[[], object]:
    np.savez(at / "a.npz", **content)
    return lambda: read_weights([at / "a.npz"])


def members(at: Path, content: dict[str, bytes]) -> Callable[[], object]:
    with zipfile.ZipFile(at / "a.npz", "w") as file:
        for name, raw in content.items():
            file.writestr(name, raw)
    return lambda: read_weights([at / "a.npz"])


class Code:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was-executed",)


@hostile(LIMIT)
def pt_that_is_a_zip_bomb(at: Path) -> Callable[[], object]:
    torch.save({"fc1.weight": torch.ones(64, 64)}, at / "b.pt")
    with (
        zipfile.ZipFile(at / "b.pt") as sound,
        zipfile.ZipFile(zip_bomb(at / "a.pt", "b/data/0", b"", 100), "a") as file,
    ):
        for name in sound.namelist():
            if not name.endswith("data/0"):
                file.writestr(name, sound.read(name))
    return lambda: read_weights([at / "a.pt"])


@hostile("must be an array or a tensor, but got list")
def pt_of_a_list_among_tensors(at: Path) -> Callable[[], object]:
    saved(at, {"fc1.weight": [[1.0, 2.0]], "fc2.weight": torch.ones(2, 2)})
    return lambda: read_weights([at / "a.pt"], layers=["fc1"])


@hostile("dequantize")
def state_of_a_quantised_tensor(_: Path) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        weight = torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.qint8)
    return lambda: read_weights([{"fc1.weight": weight, "fc2.weight": torch.ones(2, 2)}])


@hostile("must be a dense tensor")
def state_of_a_nested_tensor(_: Path) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        weight = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
    return lambda: read_weights([{"fc1.weight": weight}])


@hostile(LIMIT)
def npz_bomb(at: Path) -> Callable[[], object]:
    path = zip_bomb(at / "a.npz", "w.npy", npy_head("(32768, 25600)"), 100)
    return lambda: read_weights([path])


@hostile("could not be read as plain arrays")
def npz_with_a_flipped_byte(at: Path) -> Callable[[], object]:
    read = arrays(at, w=np.ones((40, 30)))
    raw = bytearray((at / "a.npz").read_bytes())
    raw[2000] ^= 1
    (at / "a.npz").write_bytes(raw)
    return read


@hostile("<U1")
def npz_of_words(at: Path) -> Callable[[], object]:
    np.savez(at / "a.npz", w=np.array([["a", "b"]]))
    return lambda: read_weights([at / "a.npz"], layers=["w"])


@hostile("a header of 1152921504606846976 bytes")
def safetensors_of_absurd_header(at: Path) -> Callable[[], object]:
    (at / "a.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return lambda: read_weights([at / "a.safetensors"])


@hostile("a name of 10,009 characters, but at most 200 are read")
def safetensors_of_a_long_name(at: Path) -> Callable[[], object]:
    name = "d" * 10_000
    return safe(at, {f"{name}/kernel:0": entry([2, 2], 0, 16), f"{name}/bias:0": entry([2], 16, 24)}, bytes(24))


@normal
def safetensors_of_2000_square_layers(at: Path) -> Callable[[], object]:
    names = [f"fc{i}.{of}" for i in range(2_000) for of in ("weight", "bias")]
    ends = np.cumsum([0] + [16, 8] * 2_000).tolist()
    shapes = [[2, 2], [2]] * 2_000
    parts = zip(names, shapes, ends[:-1], ends[1:], strict=True)
    return safe(at, {name: entry(shape, begin, end) for name, shape, begin, end in parts}, bytes(ends[-1]))


@hostile("'w' twice")
def safetensors_of_one_name_twice(at: Path) -> Callable[[], object]:
    one = json.dumps(entry([1, 2], 0, 8))
    return safe(at, f'{{"w": {one}, "w": {one}}}'.encode(), bytes(8))


def twice(at: Path, again: Path) -> Callable[[], object]:
    np.savez(at / "a.npz", w=np.ones((4, 3)))
    return lambda: read_weights([at / "a.npz", again])


@hostile("one file")
def file_given_through_a_link(at: Path) -> Callable[[], object]:
    (at / "b.npz").symlink_to(at / "a.npz")
    return twice(at, at / "b.npz")


@hostile("distinct labels")
def clients_of_one_name(_: Path) -> Callable[[], object]:
    state = {"w": np.ones((4, 3))}
    return lambda: read_weights([state, dict(state)], clients=["a", "a"])


@normal
def npz(at: Path) -> Callable[[], object]:
    np.savez_compressed(at / "a.npz", **{"w.weight": np.zeros((4_000, 300))})
    return lambda: read_weights([at / "a.npz"])


HOSTILE |= {
    "pt_of_an_expanded_number": case(
        LIMIT, lambda at: saved(at, {"fc1.weight": torch.zeros(1).expand(1_000_000, 1_000_000)})
    ),
    "pt_of_many_expanded_layers": case(
        LIMIT, lambda at: saved(at, {f"fc{i}.weight": torch.zeros(1).expand(5_000, 5_000) for i in range(40)})
    ),
    "pt_of_meta_tensors": case(
        "holds no numbers", lambda at: saved(at, {"fc1.weight": torch.zeros(4, 3, device="meta")})
    ),
    "pt_of_an_empty_dict": case("but got", lambda at: saved(at, {})),
    "pt_of_an_object": case("a Python object of posix.system", lambda at: saved(at, {"fc1.weight": Code()})),
    "npz_of_objects": case("holds Python objects", lambda at: arrays(at, w=np.array([Code()]))),
    "npz_that_holds_a_text": case(
        "its member 'a.txt' is no array",
        lambda at: members(at, {"a.txt": b"a", "w.npy": npy_head("(1, 1)") + bytes(8)}),
    ),
    "npz_of_9000_members": case(LIMIT, lambda at: members(at, {f"w{i}.npy": b"" for i in range(9_000)})),
    "npz_of_absurd_shape": case(LIMIT, lambda at: members(at, {"w.npy": npy_head("(4000000, 4000000)")})),
    "pt_of_lists": case("but got", lambda at: saved(at, {"fc1.weight": [[1.0, 2.0]]})),
    "pt_of_no_units": case("is empty", lambda at: saved(at, {"fc1.weight": torch.ones(0, 3)})),
    "npz_of_a_layer_too_wide_for_its_correlations": case(
        "60,000 units", lambda at: arrays(at, **{"w.weight": np.ones((60_000, 2))}), "UserWarning"
    ),
    "safetensors_of_absurd_shape": case(
        "do not hold", lambda at: safe(at, {"w": entry([1 << 40, 1 << 40], 0, 16)}, bytes(16))
    ),
    "safetensors_of_a_million_dims": case(
        "a tensor of 1,000,001 dims",
        lambda at: safe(at, b'{"w": {"dtype": "F32", "data_offsets": [0, 0], "shape": [' + b"3," * 1_000_000 + b"3]}}"),
    ),
    "safetensors_of_broken_shape": case("whole numbers", lambda at: safe(at, {"w": entry([0.5, 8], 0, 16)}, bytes(16))),
    "safetensors_of_negative_shape": case(
        "whole numbers", lambda at: safe(at, {"w": entry([-1, -4], 0, 16)}, bytes(16))
    ),
    "safetensors_that_overlap": case(
        "overlap",
        lambda at: safe(at, {f"w{i}": entry([1 << 10, 1 << 10], 0, 1 << 22) for i in range(500)}, bytes(1 << 22)),
    ),
    "safetensors_with_a_hole": case(
        "overlap", lambda at: safe(at, {"a": entry([1, 2], 0, 8), "b": entry([1, 2], 16, 24)}, bytes(24))
    ),
    "safetensors_without_offsets": case(
        "data_offsets", lambda at: safe(at, {"w": {"dtype": "F32", "shape": [1, 2]}}, bytes(8))
    ),
    "safetensors_nested_deeply": case("could not be read as safetensors", lambda at: safe(at, b"[" * 1_000_000)),
    "safetensors_of_a_header_of_empty_lists": case(
        LIMIT, lambda at: safe(at, b'{"w": [' + b"[]," * 6_000_000 + b"[]]}")
    ),
    "file_given_twice": case("one file", lambda at: twice(at, at / "a.npz")),
    "file_given_in_two_spellings": case("one file", lambda at: twice(at, at / ".." / at.name / "a.npz")),
}
NORMAL |= {
    "pt": lambda at: saved(
        at, {"state_dict": {"fc1.weight": torch.ones(40, 30), "tied.weight": torch.ones(1).expand(3, 3)}}
    ),
    "old_pt": lambda at: saved(at, {"fc1.weight": torch.ones(40, 30)}, "a.pth", _use_new_zipfile_serialization=False),
    "safetensors": lambda at: safe(
        at, {"b": entry([2], 8, 16), "w": entry([1, 2], 0, 8), "__metadata__": {"a": "b"}}, bytes(16)
    ),
}
