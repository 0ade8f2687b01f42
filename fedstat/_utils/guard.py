"""Readers of untrusted files, archives and pickles, which limit memory and run no code; files replaced in one step."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import stat
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import IO, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

LIMIT = 4 * 1024**3
HEAD, SETTINGS = 256, 4096
"""Divisors of the limit: a header or metadata may take 16 MiB, a file of settings 1 MiB."""
TENSOR, RUN = 2**19, 2**15
"""Bytes reserved for each tensor or name of a file (at most 8,192) and for each run of a grid (at most 131,072)."""
DEPTH = 64
"""Levels of nesting in JSON and TOML."""
_VARIABLE = "FEDSTAT_MAX_BYTES"
# Smallest memory of the parts of JSON, in bytes: a number, a list or dict, half a string (it has two quotes).
_JSON_COSTS = {b",": 32, b"[": 64, b"{": 64, b'"': 26}


class LimitError(ValueError):
    """Error of content that takes more than the limit; the message names the file, the size and the solution."""


def limit() -> int:
    """Return the number of bytes that a file may take in memory: FEDSTAT_MAX_BYTES of the environment, else 4 GiB.

    Raises
    ------
    ValueError
        If the variable is not a positive number.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return LIMIT
    try:
        most = int(float(text))
    except (ValueError, OverflowError):
        most = 0
    if most < 1:
        raise ValueError(f"{_VARIABLE} must be a positive number of bytes, such as 8e9, but got {text!r}")
    return most


def size(where: object, declared: int, what: str = "its content", *, share: int = 1, unit: str = "bytes") -> int:
    """Return ``declared``, in bytes or other units, or raise LimitError if it exceeds the limit divided by ``share``.

    With ``share`` above 1, a limit below 4 GiB counts as 4 GiB.
    """
    most = limit() if share == 1 else max(limit(), LIMIT) // share
    if declared > most:
        raise LimitError(
            f"{where}: {what} would take {declared:,} {unit}, but at most {most:,} are read. If you trust it and have "
            f"the memory, set the environment variable {_VARIABLE} to {declared * share}."
        )
    return declared


def status(path: str | Path) -> os.stat_result | None:
    """Return the status of a path, or None if nothing exists at the path.

    Raises
    ------
    ValueError
        If no file can have the name, as it is too long or its links form a circle.
    """
    try:
        return os.stat(path)  # noqa: PTH116 - twice as fast, and called for every chunk
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte
        cause = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{str(path)[:100]!r} cannot be the path of a file: {cause}. Check its name.") from None


def regular(path: Path, *, share: int = 1) -> Path:
    """Return ``path`` if it is a regular file, not larger than the limit divided by ``share``.

    Raises
    ------
    FileNotFoundError
        If nothing exists at the path.
    ValueError
        If the path is a folder, a pipe or a device, or the file is too large, or no file can have the name.
    """
    info = status(path)
    if info is None:
        raise FileNotFoundError(f"there is no file {path}. Check its name.")
    if stat.S_ISDIR(info.st_mode):
        raise ValueError(f"{path} must be a file, but it is a folder. Name the files in it.")
    if not stat.S_ISREG(info.st_mode):
        raise ValueError(f"{path} is not a regular file but a pipe or a device. Copy its content to a file first.")
    size(path, info.st_size, share=share)
    return path


def opened(path: Path, *, share: int = 1) -> BufferedReader:
    """Open a regular file to read its bytes; raise the errors of :func:`regular`."""
    return regular(path, share=share).open("rb")


def content(path: Path, *, share: int = 1) -> bytes:
    """Return all bytes of a regular file; raise the errors of :func:`regular`."""
    with opened(path, share=share) as stream:
        return stream.read()


def inside(folder: Path, name: str, where: object) -> Path:
    """Return ``folder / name``; raise ValueError if "..", an absolute path or a link leads out of the folder."""
    path = folder / name
    status(path)  # raises for circles of links, which resolve to no file
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where} names {name!r:.200}, which lies outside of {folder}. Nothing is read or written there; "
            "put the file itself into the folder."
        )
    return path


def reason(error: BaseException) -> str:
    """Return the kind of an error and the first line of its message, in one line."""
    is_plain = type(error) is ValueError or type(error).__module__.startswith("fedstat.")
    kind = "" if is_plain else f"{type(error).__name__}: "
    lines = f"{kind}{error}".removesuffix(": ").splitlines() or [type(error).__name__]
    return lines[0][:300].removesuffix(".")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Name the file in an OSError that names none, as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if type(error) is OSError and error.errno is None:  # NumPy counts the bytes it wrote, and raises this error
            raise OSError(f"{path} could not be written: {error}. Is the disk full?") from error
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def parsed(where: object, text: bytes, *, finite: bool = True) -> Any:
    """Parse JSON in which no object repeats a name and, unless ``finite`` is False, every number is finite.

    Raises
    ------
    ValueError
        If a name is repeated, a number is not finite, the nesting is too deep, or the JSON would take more memory than
        the limit. Damaged text raises the subclasses json.JSONDecodeError and UnicodeDecodeError, which hold the
        position.
    """
    marks = {mark: text.count(mark) for mark in _JSON_COSTS}
    size(where, sum(n * _JSON_COSTS[mark] for mark, n in marks.items()), "its JSON")
    if marks[b"["] + marks[b"{"] > DEPTH and (depth := _depth(text)) > DEPTH:
        raise ValueError(f"its JSON is nested {depth:,} levels deep, but at most {DEPTH} are read")
    return json.loads(text.decode(), object_pairs_hook=_distinct, parse_constant=_no_constant if finite else None)


_OTHER = bytes(set(range(256)) - set(b'[]{}"'))
_STEPS = bytes({91: 1, 123: 1, 93: 255, 125: 255}.get(i, 0) for i in range(256))  # of int8: 255 is -1


def _depth(text: bytes) -> int:
    """Return the deepest nesting of brackets outside of strings."""
    if b"\\" in text:
        text = re.sub(rb"\\.", b"", text, flags=re.DOTALL)  # escaped quotes
    brackets = re.sub(rb'"[^"]*"', b"", text.translate(None, _OTHER))
    return int(np.cumsum(np.frombuffer(brackets.translate(_STEPS), np.int8), dtype=np.int32).max(initial=0))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names: set[str] = set()
        repeated = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {repeated!r:.200} twice")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"numbers must be finite, but got {name}")


VALUE = 2**11
"""Bytes reserved for each reading of a pickle (at most 2,097,152): a value, and the reference to it."""

_REFUSED = {
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET,
    pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.INST, pickle.OBJ,
}  # fmt: skip


_LARGEST = 2**31


class Counted(io.BytesIO):
    """Bytes of a pickle with a limited number of readings: every value of a pickle takes at least one reading."""

    def __init__(self, where: object, content: bytes) -> None:
        super().__init__(content)
        self._where, self._readings = where, 0

    def read(self, n: int | None = -1, /) -> bytes:
        """Read as BytesIO does, and raise LimitError after too many readings."""
        self._readings += 1
        if self._readings % 4096 == 0:
            size(self._where, self._readings, "its pickle, counted so far,", share=VALUE, unit="readings")
        return super().read(n)


class ObjectError(ValueError):
    """Error of a pickle that asks for an unknown class or function, ``name``."""

    def __init__(self, module: str, name: str) -> None:
        self.name = ascii(f"{module}.{name}"[:200])[1:-1]
        super().__init__(f"the pickle asks for {self.name}, which no data file needs")


class Stateful:
    """Stand-in for a class whose instances take a state from the pickle, by ``__setstate__``."""


class Unpickler(pickle._Unpickler):
    """Unpickler of numbers, strings, lists, tuples, dictionaries and the objects of ``stand_ins``.

    A stand-in takes a fixed number of arguments and copies none; otherwise a short pickle could fill the memory. The
    constructors of NumPy and torch are not used, because they trust the state in the file. The unpickler in C is not
    used either: a few bytes make it fill gigabytes (its table of references) or crash (a deeply nested key).
    """

    stand_ins: ClassVar[dict[tuple[str, str], Any]] = {}
    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        op: load for op, load in pickle._Unpickler.dispatch.items() if bytes([op]) not in _REFUSED
    }

    def load_frame(self) -> None:
        """Skip a frame, which is only a hint, so that every reading is counted."""
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
        """Set the state of an instance of a stand-in."""
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
        if (module, name) not in self.stand_ins:
            raise ObjectError(module, name)
        return self.stand_ins[module, name]


def _name(key: object) -> bytes | str | int:
    if isinstance(key, int) and abs(key) > _LARGEST:  # larger numbers can be chosen to have equal hashes
        raise ValueError(f"the pickle names an entry by a number beyond {_LARGEST}")
    if not isinstance(key, bytes | str | int):
        raise ValueError(f"the pickle names an entry by a {type(key).__name__}, which no data file needs")
    return key


_BLOCK = 1 << 18  # bytes read at once


class _Stream(io.BufferedReader):
    """Stream that limits each reading to the size of a header: zipfile reads the directory of a file at once."""

    def read(self, n: int | None = -1, /) -> bytes:
        size(self.name, n or 0, "the directory of the zip file", share=HEAD)
        return super().read(n)


@contextmanager
def unzipped(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file with a directory of bounded size; readers check the sizes that members declare.

    Raises
    ------
    ValueError, zipfile.BadZipFile
        If the path is not a regular file or not a zip file, or the file has too many members.
    """
    with _Stream(io.FileIO(regular(path))) as stream, zipfile.ZipFile(stream) as file:
        size(path, len(file.infolist()), "its directory", share=TENSOR, unit="members")
        yield file


class Head(NamedTuple):
    """Shape and type of an array in a file; ``read`` reads the array while the file is open."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], NDArray[Any]]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one number, at least 1."""
        return max(1, self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the array's numbers."""
        return prod(self.shape) * self.itemsize


class Arrays:
    """Arrays of an .npz file, read one at a time.

    Attributes
    ----------
    names : list of str
    """

    def __init__(self, path: Path, file: zipfile.ZipFile) -> None:
        self._path, self._file, self._total = path, file, 0
        self._members = {m.filename.removesuffix(".npy"): m for m in file.infolist() if m.filename.endswith(".npy")}
        self.names = list(self._members)

    def head(self, name: str) -> Head:
        """Return the declared shape and type of an array; raise ValueError if the file has fewer bytes."""
        with _reading(self._path), self._file.open(self._members[name]) as stream:
            return self._head(name, stream)[0]

    def read(self, name: str) -> NDArray[Any]:
        """Read an array; raise LimitError if all arrays read so far exceed the limit."""
        with _reading(self._path), self._file.open(self._members[name]) as stream:
            head, by_column = self._head(name, stream)
            self._total += head.nbytes
            size(self._path, self._total, f"{name[:100]} of shape {head.shape} and what is read before it")
            numbers = np.ndarray(prod(head.shape), head.dtype)
            unread = numbers.view(np.uint8).data if numbers.nbytes else memoryview(b"")
            while unread:
                block = stream.read(min(len(unread), _BLOCK))
                unread[: len(block)] = block
                unread = unread[len(block) :]
                if not block:
                    raise EOFError(f"{name[:100]!r} ends too soon")
            return numbers.reshape(head.shape[::-1]).T if by_column else numbers.reshape(head.shape)

    def _head(self, name: str, stream: IO[bytes]) -> tuple[Head, bool]:
        """Return the declared shape and type of an array, and True if it is in column-major order."""
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
        If the file is not a valid .npz file of plain arrays, or too large; the message names the file.
    FileNotFoundError
        If the file does not exist.
    """
    with ExitStack() as stack:
        with _reading(path):
            with opened(path) as stream:
                if stream.read(6) == b"\x93NUMPY":
                    raise ValueError("it holds one array without a name. Save with np.savez(path, **arrays)")
            members = Arrays(path, stack.enter_context(unzipped(path)))
        yield members


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the file in the errors that parsers raise for a malformed file, whose types are not documented."""
    try:
        yield
    except (LimitError, FileNotFoundError):
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be read as plain arrays: {reason(error)}") from error


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, which replaces the file when the context ends, or is removed after an error."""
    if path.exists() and not path.is_file():  # /dev/stdout
        yield path
        return
    target = path.resolve()
    draft = draft_of(target)
    try:
        with written(path):
            yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def draft_of(path: Path) -> Path:
    """Return the path of the draft of a file."""
    return path.parent / f".{path.name}.{os.getpid()}.draft"
