"""Reader of ``torch.save`` files: tensors as NumPy arrays, without torch and without executing the pickle."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import guard
from fedstat._utils.guard import Counted, Stateful, Unpickler

_ZIP = b"PK\3\4"
_MAGIC = 0x1950A86A20F9469CFC6C  # of files before torch 1.6
_BFLOAT16 = "bfloat16"
_STORAGES = {
    "Double": "f8", "Float": "f4", "Half": "f2", "BFloat16": _BFLOAT16, "Long": "i8", "Int": "i4", "Short": "i2",
    "Char": "i1", "Byte": "u1", "Bool": "?", "ComplexDouble": "c16", "ComplexFloat": "c8", "QInt8": "i1",
    "QInt32": "i4", "QUInt8": "u1", "QUInt4x2": "u1", "QUInt2x4": "u1",
}  # fmt: skip
_DTYPES = {
    "float64": "f8", "float32": "f4", "float16": "f2", _BFLOAT16: _BFLOAT16, "int64": "i8", "int32": "i4",
    "int16": "i2", "int8": "i1", "uint64": "u8", "uint32": "u4", "uint16": "u2", "uint8": "u1", "bool": "?",
    "complex128": "c16", "complex64": "c8",
    **{name: name for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")},
}  # fmt: skip
Storage = Callable[[str, str], "NDArray[Any] | None"]
"""Function that returns the numbers of a storage by its key and the name of its type; None to skip them."""


class Unread(NamedTuple):
    """A tensor that cannot be read.

    Attributes
    ----------
    reason : str
        The predicate of a sentence, such as "holds F4 numbers.".
    shape : tuple of int
        Shape of the tensor; () if unknown.
    ndim : int
        Number of axes.
    """

    reason: str
    shape: tuple[int, ...] = ()
    ndim: int = 2


def read(path: Path) -> Any:
    """Read a file of ``torch.save``: dense tensors as read-only arrays, other tensors as ``Unread``.

    Raises
    ------
    ValueError
        If the file is damaged or too large, or holds objects other than tensors, numbers, strings, lists, tuples and
        dictionaries.
    """
    raw = guard.content(path)
    return _zipped(path, raw) if raw.startswith(_ZIP) else _legacy(path, raw)


def widened(numbers: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16, the upper half of a float32, to float32."""
    return (numbers.astype(np.uint32) << 16).view(np.float32)


def _zipped(path: Path, raw: bytes) -> Any:
    """Read a zip file with the pickle ``data.pkl`` and a member for each storage."""
    with guard.unzipped(path) as file:
        members = {m.filename: m for m in file.infolist()}
        head = next((name for name in members if name.rpartition("/")[2] == "data.pkl"), None)
        if head is None:
            raise ValueError("it is a zip file without data.pkl")
        folder, loaded = head.removesuffix("data.pkl"), dict[tuple[str, str], "NDArray[Any]"]()
        order = _member(path, raw, file, members[f"{folder}byteorder"]) if f"{folder}byteorder" in members else b""
        sign: Literal["<", ">"] = ">" if bytes(order) == b"big" else "<"

        def storage(key: str, dtype: str) -> NDArray[Any]:
            if (key, dtype) not in loaded:
                loaded[key, dtype] = _numbers(_member(path, raw, file, members[f"{folder}data/{key}"]), dtype, sign)
            return loaded[key, dtype]

        return _Reader(Counted(path, bytes(_member(path, raw, file, members[head]))), storage).load()


def _member(path: Path, raw: bytes, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> memoryview:
    """Return the bytes of a member, without a copy if they are uncompressed, as torch stores them."""
    if member.compress_type == zipfile.ZIP_STORED:
        start = member.header_offset
        name, extra = (int.from_bytes(raw[start + i : start + i + 2], "little") for i in (26, 28))
        return memoryview(raw)[start + 30 + name + extra :][: member.file_size]
    guard.size(path, sum(m.file_size for m in file.infolist()), "its unzipped content")
    return memoryview(file.read(member))


def _legacy(path: Path, raw: bytes) -> Any:
    """Read five pickles (magic number, version, system, content, keys of storages), then the numbers by key."""
    stream = Counted(path, raw)
    magic, *_ = (_Reader(stream, lambda *_: None).load() for _ in range(3))
    if magic != _MAGIC:
        raise ValueError("it is no file of torch.save")
    content, dtypes = stream.tell(), dict[str, str]()
    _Reader(stream, lambda key, dtype: dtypes.__setitem__(key, dtype)).load()
    keys, storages = _Reader(stream, lambda *_: None).load(), dict[str, "NDArray[Any]"]()
    start = stream.tell()
    for key in keys:
        size = np.dtype("u2" if dtypes[key] == _BFLOAT16 else dtypes[key]).itemsize
        end = start + 8 + size * int.from_bytes(raw[start : start + 8], "little", signed=True)
        if not start + 8 <= end <= len(raw):
            raise ValueError(f"storage {key!r:.100} ends beyond the file")
        storages[key] = _numbers(memoryview(raw)[start + 8 : end], dtypes[key], "<")
        start = end
    stream.seek(content)
    return _Reader(stream, lambda key, _: storages[key]).load()


def _numbers(raw: memoryview, dtype: str, sign: Literal["<", ">"]) -> NDArray[Any]:
    if dtype == _BFLOAT16:
        return widened(np.frombuffer(raw, f"{sign}u2"))
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder(sign))


class _Ordered(dict[Any, Any], Stateful):
    """Replacement of OrderedDict without its attributes, the versions of modules."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, state: object) -> None:
        pass


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, _grad: object = None, _hooks: object = None,
    metadata: object = None,
) -> NDArray[Any] | Unread | None:  # fmt: skip
    """Return a tensor as a view of its storage."""
    if storage is None:
        return None
    if not len(shape) == len(stride) <= 64 or not all(map(_is_size, (offset, *shape, *stride))):
        raise ValueError("a tensor without whole numbers from 0 for its offset, shape and strides")
    if metadata:
        reason = "is a conjugated or negated view. Save it with .resolve_conj().resolve_neg()."
        return Unread(reason, tuple(shape), len(shape))
    if not prod(shape):
        return np.empty(shape, storage.dtype)
    if offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) >= len(storage):
        raise ValueError(f"a tensor of shape {tuple(shape)} ends beyond its {len(storage):,} numbers")
    strides = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, strides, writeable=False)


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number <= sys.maxsize


def _meta(_dtype: object, shape: Any, *_rest: object) -> Unread:
    if not len(shape) <= 64 or not all(map(_is_size, shape)):
        raise ValueError("a tensor without whole numbers from 0 for its shape")
    reason = 'holds no numbers, only a shape (device="meta"). Save the model once it has weights.'
    return Unread(reason, tuple(shape), len(shape))


def _sparse(*_parts: object) -> Unread:
    return Unread(
        "must be a dense tensor, but is sparse, quantized or nested. Save it with .to_dense() or .dequantize()."
    )


class _Reader(Unpickler):
    """Unpickler of torch's tensors."""

    stand_ins: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): _Ordered,
        ("collections", "Counter"): lambda counts=None: {} if counts is None else counts,  # of schedulers
        **{(module, "set"): lambda items=(): items for module in ("builtins", "__builtin__")},
        ("torch", "Size"): lambda shape=(): shape,
        ("torch", "device"): lambda kind, _number=0: kind,
        ("torch.storage", "UntypedStorage"): "u1",
        ("torch._utils", "_rebuild_tensor"): _tensor,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_parameter"): lambda data, _grad, _hooks: data,
        ("torch._utils", "_rebuild_parameter_with_state"): lambda data, _grad, _hooks, _state: data,
        ("torch._utils", "_rebuild_meta_tensor_no_storage"): _meta,
        ("torch.serialization", "_get_layout"): lambda name: name,
        **{("torch._utils", f"_rebuild_{kind}"): _sparse for kind in ("sparse_tensor", "qtensor", "nested_tensor")},
        **{("torch", f"per_{kind}"): kind for kind in ("tensor_affine", "channel_affine", "tensor_symmetric")},
        **{("torch", name): dtype for name, dtype in _DTYPES.items()},
        **{("torch", f"{name}Storage"): dtype for name, dtype in _STORAGES.items()},
    }

    def __init__(self, stream: Counted, storage: Storage) -> None:
        super().__init__(stream, encoding="utf-8")
        self._storage, self._viewed = storage, dict[tuple[int, str], Any]()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):
            return self._tensor_of_bytes
        return super().find_class(module, name)

    def _tensor_of_bytes(
        self, storage: Any, offset: Any, shape: Any, stride: Any, _grad: object, _hooks: object, dtype: str,
        metadata: object = None,
    ) -> NDArray[Any] | Unread | None:  # fmt: skip
        """Return a tensor of a type that has no storage class, such as uint16."""
        if storage is not None and (id(storage), dtype) not in self._viewed:
            self._viewed[id(storage), dtype] = (
                storage,
                small_floats(storage, dtype) if dtype.startswith("float8") else storage.view(dtype),
            )
        typed = None if storage is None else self._viewed[id(storage), dtype][1]
        return _tensor(typed, offset, shape, stride, metadata=metadata)

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, _, *view = pid
        numbers = self._storage(str(key), dtype)
        if numbers is None or not view or view[0] is None:
            return numbers
        _, offset, size = view[0]
        return numbers[offset : offset + size]


def small_floats(numbers: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Convert floats of 8 bits to float32."""
    import torch  # takes a second; only these types need it

    converted: NDArray[np.float32] = torch.from_numpy(numbers.copy()).view(getattr(torch, dtype)).float().numpy()
    return converted
