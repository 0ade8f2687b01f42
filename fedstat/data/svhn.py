"""Loader of SVHN (cropped digits) from MATLAB files."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Remote, Source, Split, error_at, find, join_parts, list_splits

SOURCES = {
    "svhn": Source(
        "SVHN (cropped digits)",
        "http://ufldl.stanford.edu/housenumbers",
        {"train": 73_257, "test": 26_032},
        places=("svhn", "SVHN", ""),
        files=(("train_32x32.mat",), ("test_32x32.mat",)),
        classes=10,
        remote=(
            Remote(
                "svhn/train_32x32.mat",
                182_040_794,
                "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                ("http://ufldl.stanford.edu/housenumbers/train_32x32.mat",),
            ),
            Remote(
                "svhn/test_32x32.mat",
                64_275_384,
                "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                ("http://ufldl.stanford.edu/housenumbers/test_32x32.mat",),
            ),
        ),
    )
}
# Codes of MATLAB's array classes and element types; cells and structures are not read.
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_MATRIX, _COMPRESSED = 14, 15
_COMPLEX = 0x800
_HEAD_BYTES = 1024  # bytes that hold class, shape and name of an array
_Order = Literal["<", ">"]


def load_svhn(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read images x (sample, channel, row, column) uint8 0–255 and digits; label 10 of the files is the digit 0."""
    parts = {}
    for part in list_splits(split):
        path = find(root, [f"{part}_32x32.mat"], SOURCES[name])
        parts[part] = Part(*_read_file(path))
    data = join_parts(parts, SOURCES[name], ("channel", "row", "column"), root)
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list("0123456789")
    return data


def _read_file(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with guard.opened(path) as stream, guard.wrap_errors(path, stream=stream):
        content = dict(_read_arrays(path, stream))
    missing = {"X", "y"} - set(content)
    if missing:
        raise error_at(path, 0, f"an SVHN file holds X and y, but got no {' nor '.join(sorted(missing))}")
    x, y = content["X"], content["y"].ravel()
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, y.size):
        raise error_at(path, 0, f"X must be uint8 (32, 32, 3, {y.size}), but got {x.dtype} {x.shape}")
    if not np.isin(y, np.arange(1, 11)).all():
        raise error_at(path, 0, f"labels must be 1 to 10, but got {np.unique(y)[:12]}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10


def _read_arrays(path: Path, stream: BinaryIO) -> Iterator[tuple[str, np.ndarray]]:
    """Iterate over the arrays X and y of a MATLAB file of level 5, with their names.

    scipy.io.loadmat is not used: it trusts sizes and classes in the file. Of 400 damaged files, 2 made SciPy 1.17.1 end
    the interpreter.
    """
    head = stream.read(128)
    if len(head) < 128 or head[126:] not in (b"IM", b"MI"):
        raise ValueError(f"it must be a MATLAB file of level 5, whose header ends in IM or MI, but got {head[126:]!r}")
    order: _Order = "<" if head[126:] == b"IM" else ">"
    names: set[str] = set()
    while len(tag := stream.read(8)) == 8:
        kind, size = struct.unpack(f"{order}II", tag)
        part = raw = memoryview(stream.read(size))
        if is_compressed := kind == _COMPRESSED:
            part = memoryview(zlib.decompressobj().decompress(raw, _HEAD_BYTES))
            kind, part = struct.unpack_from(f"{order}I", part)[0], part[8:]
        if kind != _MATRIX:
            continue
        flags, shape, name, offset = _read_head(part, order)
        if name not in ("X", "y"):
            continue
        if name in names:
            raise ValueError(f"it must hold {name} once, but holds it twice")
        names.add(name)
        kind = flags & 255
        if kind not in _CLASSES or flags & _COMPLEX:
            raise ValueError(f"{name} must be numbers, but got an array of MATLAB's class {kind}, flags {flags:#x}")
        n_bytes = guard.size(path, math.prod(shape) * np.dtype(_CLASSES[kind]).itemsize, f"{name} of shape {shape}")
        if is_compressed:
            part = memoryview(zlib.decompressobj().decompress(raw, 8 + offset + 8 + n_bytes))[8:]
        type_code, values, _ = _read_element(part, offset, order)
        numbers = np.frombuffer(values, np.dtype(_TYPES[type_code]).newbyteorder(order))
        yield name, numbers.astype(_CLASSES[kind], copy=False).reshape(shape, order="F")


def _read_head(part: memoryview, order: _Order) -> tuple[int, tuple[int, ...], str, int]:
    """Return flags (the lowest byte is the class), shape and name of an array, and the offset of its numbers."""
    _, flags, offset = _read_element(part, 0, order)
    _, dims, offset = _read_element(part, offset, order)
    _, name, offset = _read_element(part, offset, order)
    shape = tuple(np.frombuffer(dims, np.dtype("i4").newbyteorder(order)).tolist())
    if any(n < 0 for n in shape):
        raise ValueError(f"a shape must be whole numbers from 0, but got {shape[:8]}")
    return struct.unpack_from(f"{order}I", flags)[0], shape, bytes(name).decode("latin-1"), offset


def _read_element(part: memoryview, offset: int, order: _Order) -> tuple[int, memoryview, int]:
    """Return type and bytes of an element, and the offset of the next element."""
    kind, size = struct.unpack_from(f"{order}II", part, offset)
    small_size = kind >> 16  # size of an element that fits into its tag
    kind, size, start = (kind & 0xFFFF, small_size, offset + 4) if small_size else (kind, size, offset + 8)
    values = part[start : start + size]
    if len(values) < size:
        raise ValueError(f"an element of {size:,} bytes has only {len(values):,}")
    return kind, values, offset + 8 if small_size else start + size + -size % 8
