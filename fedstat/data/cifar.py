"""Loader of CIFAR-10 and CIFAR-100 (python version), which runs no code of the pickles."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Remote, Source, Split, error_at, find, join_parts, list_splits, read

_KRIZ = "https://www.cs.toronto.edu/~kriz"
_FILES = {
    "cifar-10": {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"], "meta": ["batches.meta"]},
    "cifar-100": {"train": ["train"], "test": ["test"], "meta": ["meta"]},
}


def _define(title: str, folder: str, name: str, size: int, digest: str, classes: int) -> Source:
    parts = _FILES[name]
    archive = f"{name}-python.tar.gz"
    return Source(
        title,
        f"{_KRIZ}/cifar.html",
        {"train": 50_000, "test": 10_000},
        places=(folder, "", f"{name}/{folder}"),
        files=tuple((file,) for part in parts.values() for file in part),
        classes=classes,
        remote=(Remote(archive, size, digest, (f"{_KRIZ}/{archive}",), {f"{folder}/": f"{folder}/"}),),
    )


SOURCES = {
    "cifar-10": _define(
        "CIFAR-10",
        "cifar-10-batches-py",
        "cifar-10",
        170_498_071,
        "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        classes=10,
    ),
    "cifar-100": _define(
        "CIFAR-100",
        "cifar-100-python",
        "cifar-100",
        169_001_437,
        "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        classes=100,
    ),
}
_IMAGE = (3, 32, 32)


def load_cifar(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read images x (sample, channel, row, column) uint8 0–255 and labels; for CIFAR-100 also ``coarse`` (sample)."""
    source, files, is_100 = SOURCES[name], _FILES[name], name == "cifar-100"
    parts = {}
    for part in list_splits(split):
        batches = [_read_batch(find(root, [f], source), is_100) for f in files[part]]
        extra = {"coarse": np.concatenate([b[2] for b in batches])} if is_100 else {}
        parts[part] = Part(np.concatenate([b[0] for b in batches]), np.concatenate([b[1] for b in batches]), extra)
    data = join_parts(parts, source, ("channel", "row", "column"), root)
    meta = find(root, files["meta"], source)
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = _read_names(meta, b"fine_label_names" if is_100 else b"label_names")
    if is_100:
        data.coarse.attrs["names"] = _read_names(meta, b"coarse_label_names")
    return data


def _read_names(meta: Path, key: bytes) -> list[str]:
    content = unpickle(meta)
    names = content.get(key) if isinstance(content, dict) else None
    if not isinstance(names, list) or any(type(n) is not bytes for n in names):
        raise error_at(meta, 0, f"{key.decode()} must hold the names of the classes. Download it again.")
    with guard.wrap_errors(meta):
        return [n.decode() for n in names]


def _read_batch(path: Path, is_100: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read images, labels and coarse labels (for CIFAR-10, the labels again) of one file."""
    content = unpickle(path)
    keys = (b"fine_labels", b"coarse_labels") if is_100 else (b"labels", b"labels")
    missing = [k for k in (b"data", *keys) if not isinstance(content, dict) or k not in content]
    if missing:
        raise error_at(path, 0, f"a CIFAR batch is a dictionary with {missing[0].decode()!r}, but got none")
    for key in keys:  # a list that holds itself many times would fill the memory as an array
        labels = content[key]
        if not isinstance(labels, _Stored) and not (isinstance(labels, list) and {*map(type, labels)} <= {int}):
            raise error_at(path, 0, f"labels must be integers, but {key.decode()!r} holds other values")
    if not isinstance(content[b"data"], _Stored):
        raise error_at(path, 0, f"data must be an array of uint8, but got {type(content[b'data']).__name__}")
    with guard.wrap_errors(path):
        fine, coarse = (np.asarray(v, None if isinstance(v, _Stored) else np.int64) for v in map(content.get, keys))
        x = np.asarray(content[b"data"])
    if x.dtype != np.uint8 or x.shape != (len(fine), 3072) or len(fine) != len(coarse):
        raise error_at(
            path, 0, f"data must be uint8 of {len(fine)} rows of 3072 bytes, but got {x.dtype} of shape {x.shape}"
        )
    for labels, bound in ((fine, 100 if is_100 else 10), (coarse, 20 if is_100 else 10)):
        if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0 or labels.max(initial=0) >= bound:
            raise error_at(
                path, 0, f"labels must be integers from 0 to {bound - 1}, but got {labels.dtype} {labels[:3]}"
            )
    return x.reshape(-1, *_IMAGE), fine, coarse


_VALUE = 2**11
"""Bytes reserved for each operation of a pickle (at most 2,097,152)."""
_MOST_TUPLES = 64  # an array has eight; tuples that are nested deeply would crash Python as the key of a dictionary
_MEMO = {"BINPUT", "LONG_BINPUT"}
_OPERATIONS = _MEMO | {
    "PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "BINFLOAT",
    "SHORT_BINSTRING", "BINSTRING", "SHORT_BINBYTES", "BINBYTES", "SHORT_BINUNICODE", "BINUNICODE", "EMPTY_LIST",
    "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "BINGET", "LONG_BINGET", "MEMOIZE",
}  # fmt: skip
"""Operations of arrays, numbers, strings, lists and dictionaries in the protocols 2 to 4 of pickles."""


def unpickle(path: Path) -> Any:
    """Read a pickle of numbers, strings, lists and dictionaries; byte strings stay bytes.

    Numeric arrays are returned as objects that ``np.asarray`` turns into arrays.

    Raises
    ------
    ValueError
        If the pickle is truncated or corrupt, or asks for another class or function, which could run code.
    """
    stream = io.BytesIO(read(path))
    with guard.wrap_errors(path, stream=stream):
        _require_plain(path, stream)
        stream.seek(0)
        return _Unpickler(stream, encoding="bytes").load()


def _require_plain(path: Path, stream: io.BytesIO) -> None:
    """Raise ValueError if an operation of a pickle belongs to no data file, or if it could fill the memory."""
    n_tuples, previous = 0, ""
    for n, (operation, argument, _) in enumerate(pickletools.genops(stream)):
        name = operation.name
        if n % 4096 == 0:
            guard.size(path, n, "its pickle, counted so far,", share=_VALUE, unit="operations")
        # A pair that a call takes at once is a byte string as text, which the function does not take for a key.
        n_tuples += name.startswith("TUPLE") - (previous == "TUPLE2" and name == "REDUCE")
        is_far = name in _MEMO and int(str(argument)) > n  # the table of references would fill the memory
        if name not in _OPERATIONS or n_tuples > _MOST_TUPLES or is_far:
            raise ValueError(f"the pickle has the operation {name}, which no data file needs")
        previous = previous if name in _MEMO or name == "MEMOIZE" else name


class _Kind:
    """Numeric type of an array in a pickle, with its byte order."""

    def __init__(self, code: str | bytes, _align: object = 0, _copy: object = 1) -> None:
        self.dtype = np.dtype(code.decode() if isinstance(code, bytes) else code)
        if self.dtype.kind not in "biuf":
            raise ValueError(f"the pickle holds an array of {self.dtype}, which no data file needs")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.dtype = self.dtype.newbyteorder(order)


class _Stored:
    """Array in a pickle; ``np.asarray`` returns it, read-only."""

    def __init__(self, _kind: object, _shape: object, _code: object) -> None:
        self.array = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _version, shape, kind, by_column, raw = state
        self.array = np.frombuffer(raw, kind.dtype).reshape(shape, order="F" if by_column else "C")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _Stored,
    ("numpy._core.multiarray", "_reconstruct"): _Stored,
    ("__builtin__", "bytes"): lambda: b"",
}
"""Replacements of classes and functions, by module and name: NumPy's constructors trust the state in the file."""


class _Unpickler(pickle.Unpickler):
    """Unpickler of arrays and byte strings; byte strings of Python 2 stay bytes."""

    def __init__(self, stream: io.BytesIO, *, encoding: str) -> None:
        super().__init__(stream, encoding=encoding)
        self._encoded: dict[int, tuple[str, bytes]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            return self._encode
        if (module, name) not in _STAND_INS:
            path = ascii(f"{module}.{name}"[:200])[1:-1]
            raise ValueError(f"the pickle asks for {path}, which no data file needs")
        return _STAND_INS[module, name]

    def _encode(self, text: str, encoding: str) -> bytes:
        """Return the byte string that Python 3 wrote as text in the protocol of Python 2; equal texts share it."""
        if encoding not in ("latin1", b"latin1"):
            raise ValueError(f"the pickle holds a byte string as {encoding!r}, where 'latin1' was expected")
        return self._encoded.setdefault(id(text), (text, text.encode("latin1")))[1]
