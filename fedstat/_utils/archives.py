"""Archives and pickles of strangers: read within limits, and without running their code."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import guard

VALUE = 2**11
"""Bytes set aside for each reading of a pickle (2,097,152 of them): a value, and the reference to it."""

_REFUSED = {
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET,
    pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.INST, pickle.OBJ,
}  # fmt: skip


_LARGEST = 2**31


class Counted(io.BytesIO):
    """Bytes of a pickle that are read a limited number of times: every value it makes takes a reading at least."""

    def __init__(self, where: object, content: bytes) -> None:
        super().__init__(content)
        self._where, self._readings = where, 0

    def read(self, n: int | None = -1, /) -> bytes:
        """Read as BytesIO does, and raise LimitError after too many readings."""
        self._readings += 1
        if self._readings % 4096 == 0:
            guard.size(self._where, self._readings, "its pickle, counted so far,", share=VALUE, unit="readings")
        return super().read(n)


class ObjectError(ValueError):
    """A pickle asks for a class or function, ``name``, that is not known."""

    def __init__(self, module: str, name: str) -> None:
        self.name = ascii(f"{module}.{name}"[:200])[1:-1]
        super().__init__(f"the pickle asks for {self.name}, which no data file needs")


class Stateful:
    """Stand-in of a class whose instances take a state from the pickle, by ``__setstate__``."""


class Unpickler(pickle._Unpickler):
    """Makes numbers, strings, lists, tuples and dictionaries, and what the stand-ins in ``known`` make.

    A stand-in takes a fixed number of arguments and copies none, or a short pickle could fill the memory. NumPy's and
    torch's own constructors are not used, for they take the state in the file on trust. Nor is the unpickler in C: a
    few bytes make it fill gigabytes (its table of references) or crash (a deeply nested key).
    """

    known: ClassVar[dict[tuple[str, str], Any]] = {}
    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        op: load for op, load in pickle._Unpickler.dispatch.items() if bytes([op]) not in _REFUSED
    }

    def load_frame(self) -> None:
        """Pass over a frame: it is a hint, and without it every reading is counted."""
        self.read(8)

    def load_setitem(self) -> None:
        """Set an entry of a dictionary."""
        key, value = self.stack[-2:]
        del self.stack[-2:]
        self.stack[-1][_name(key)] = value

    def load_setitems(self) -> None:
        """Set entries of a dictionary."""
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_name(key)] = value

    def load_dict(self) -> None:
        """Make a dictionary."""
        items = self.pop_mark()
        self.append({_name(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def load_build(self) -> None:
        """Give its state to an instance of a stand-in."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if not isinstance(instance, Stateful):
            raise ValueError(f"the pickle sets the state of a {type(instance).__name__}")
        instance.__setstate__(state)  # type: ignore[attr-defined]

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a class or function, or raise ObjectError."""
        if (module, name) not in self.known:
            raise ObjectError(module, name)
        return self.known[module, name]


def _name(key: object) -> bytes | str | int:
    if isinstance(key, int) and abs(key) > _LARGEST:  # larger ones can be chosen to have one hash
        raise ValueError(f"the pickle names an entry by a number beyond {_LARGEST}")
    if not isinstance(key, bytes | str | int):
        raise ValueError(f"the pickle names an entry by a {type(key).__name__}, which no data file needs")
    return key


_BLOCK = 1 << 18  # bytes read at once


class _Stream(io.BufferedReader):
    """Stream that reads no more at once than a header may take: the directory of a zip file is one reading."""

    def read(self, n: int | None = -1, /) -> bytes:
        guard.size(self.name, n or 0, "the directory of the zip file", share=guard.HEAD)
        return super().read(n)


@contextmanager
def unzipped(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file with a directory of bounded size; readers check what its members declare.

    Raises
    ------
    ValueError, zipfile.BadZipFile
        If it is no regular file or no zip file, or has too many members.
    """
    with _Stream(io.FileIO(guard.regular(path))) as stream, zipfile.ZipFile(stream) as file:
        guard.size(path, len(file.infolist()), "its directory", share=guard.TENSOR, unit="members")
        yield file


class Head(NamedTuple):
    """Shape and type of an array that ``read`` reads from its file, as long as that is open."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], NDArray[Any]]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one number, at least one."""
        return max(1, self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return prod(self.shape) * self.itemsize


class Arrays:
    """Arrays of an .npz file, each read when it is asked for.

    Attributes
    ----------
    names : list of str
    """

    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self._path, self._file, self._total = path, file, 0
        self._members = {m.filename.removesuffix(".npy"): m for m in file.infolist() if m.filename.endswith(".npy")}
        self.names = list(self._members)

    def head(self, name: str) -> Head:
        """Return what an array declares; raise ValueError if it declares more bytes than the file has."""
        with _reading(self._path), self._file.open(self._members[name]) as stream:
            return self._head(name, stream)[0]

    def read(self, name: str) -> NDArray[Any]:
        """Read an array; raise LimitError if all arrays read so far exceed the limit."""
        with _reading(self._path), self._file.open(self._members[name]) as stream:
            head, by_column = self._head(name, stream)
            self._total += head.nbytes
            guard.size(self._path, self._total, f"{name[:100]} of shape {head.shape} and what is read before it")
            numbers = np.ndarray(prod(head.shape), head.dtype)
            left = numbers.view(np.uint8).data if numbers.nbytes else memoryview(b"")
            while left:
                block = stream.read(min(len(left), _BLOCK))
                left[: len(block)] = block
                left = left[len(block) :]
                if not block:
                    raise EOFError(f"{name[:100]!r} ends too soon")
            return numbers.reshape(head.shape[::-1]).T if by_column else numbers.reshape(head.shape)

    def _head(self, name: str, stream: IO[bytes]) -> tuple[Head, bool]:
        """Return what an array declares, and whether it is in column-major order."""
        version, n_bytes = np.lib.format.read_magic(stream), self._members[name].file_size
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = parse(stream)
        head = Head(shape, dtype, partial(self.read, name))
        if dtype.hasobject:
            raise ValueError(f"{name[:100]!r} holds Python objects, which are not read")
        if head.nbytes > n_bytes or min(shape, default=0) < 0:
            raise ValueError(f"{name[:100]!r} has the shape {shape} of {dtype}, but only {n_bytes:,} bytes")
        return head, by_column


@contextmanager
def arrays(path: Path) -> Iterator[Arrays]:
    """Open an .npz file to read arrays from it.

    Raises
    ------
    ValueError
        If it is not a sound .npz file of plain arrays, or too large; the message names the file.
    FileNotFoundError
        If there is no such file.
    """
    with ExitStack() as stack:
        with _reading(path):
            with guard.opened(path) as stream:
                if stream.read(6) == b"\x93NUMPY":
                    raise ValueError("it holds one array without a name. Save with np.savez(path, **arrays)")
            members = Arrays(path, stack.enter_context(unzipped(path)))
        yield members


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in what a malformed one makes the parsers raise, which is not documented."""
    try:
        yield
    except (guard.LimitError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be read as plain arrays: {guard.reason(error)}") from error
