"""Zip files and the arrays in .npz files: what they declare is checked before anything is unpacked."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat import _guard

_BLOCK = 1 << 18  # bytes read at once


class _Stream(io.BufferedReader):
    """Stream that reads no more at once than a header may take: the directory of a zip file is one reading."""

    def read(self, n: int | None = -1, /) -> bytes:
        _guard.size(self.name, n or 0, "the directory of the zip file", share=_guard.HEAD)
        return super().read(n)


@contextmanager
def unzipped(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file with a directory of bounded size; readers check what its members declare.

    Raises
    ------
    ValueError, zipfile.BadZipFile
        If it is no regular file or no zip file, or has too many members.
    """
    with _Stream(io.FileIO(_guard.regular(path))) as stream, zipfile.ZipFile(stream) as file:
        _guard.size(path, len(file.infolist()), "its directory", share=_guard.TENSOR, unit="members")
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
            _guard.size(self._path, self._total, f"{name[:100]} of shape {head.shape} and what is read before it")
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
            with _guard.opened(path) as stream:
                if stream.read(6) == b"\x93NUMPY":
                    raise ValueError("it holds one array without a name. Save with np.savez(path, **arrays)")
            members = Arrays(path, stack.enter_context(unzipped(path)))
        yield members


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in what a malformed one makes the parsers raise, which is not documented."""
    try:
        yield
    except (_guard.LimitError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be read as plain arrays: {_guard.reason(error)}") from error
