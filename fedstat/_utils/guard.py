"""Regular files of bounded size and their errors, .npz files, JSON; files replaced in one step."""

from __future__ import annotations

import json
import os
import re
import stat
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib.npyio import NpzFile
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


def printable(text: str) -> str:
    """Replace control characters and half pairs of UTF-16, which texts of others may hold."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


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


@contextmanager
def wrap_errors(
    path: object, advice: str = "Download it again.", *, what: str = "is damaged", stream: BinaryIO | None = None
) -> Iterator[None]:
    """Turn any error of a parser into a ValueError that names the file and, if it is passed, the byte of the stream."""
    try:
        yield
    except LimitError:
        raise
    except MemoryError as error:
        raise ValueError(f"{path} takes more memory than this process can get. Free memory, or read a part.") from error
    except Exception as error:  # on damaged bytes, parsers raise errors of many types, most undocumented
        place = "" if stream is None else f" at byte {stream.tell()}"
        raise ValueError(f"{path} {what}{place}: {reason(error)}. {advice}") from error


_wrap_npz = partial(
    wrap_errors, advice="Save it with np.savez(path, **arrays).", what="could not be read as plain arrays"
)


def require_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    """Raise LimitError if a zip file has too many members, or its members would exceed the limit when unzipped."""
    size(path, len(members), "its directory", share=TENSOR, unit="members")
    size(path, sum(member.file_size for member in members), "its unzipped content")


def arrays(path: Path) -> NpzFile:
    """Open an .npz file that holds nothing but arrays; :func:`array` reads one.

    Raises
    ------
    ValueError
        If the file is not a valid .npz file, or too large; the message names the file.
    FileNotFoundError
        If the file does not exist.
    """
    regular(path)
    with _wrap_npz(path):
        if not zipfile.is_zipfile(path):
            raise ValueError("it is not a zip file")
        file: NpzFile = np.load(path, allow_pickle=False)
        members = cast(zipfile.ZipFile, file.zip).infolist()
        require_members(path, members)
        if others := [member.filename for member in members if not member.filename.endswith(".npy")]:
            raise ValueError(f"its member {others[0]!r:.200} is no array")
        return file


def array(path: Path, file: NpzFile, name: str) -> NDArray[Any]:
    """Read an array of an open .npz file; raise ValueError if it is damaged or holds Python objects."""
    array_head(path, file, name)  # names an array of objects, which numpy does not
    with _wrap_npz(path):
        return file[name]


def array_head(path: Path, file: NpzFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read shape and type of an array of an open .npz file; raise ValueError if it holds Python objects."""
    with _wrap_npz(path), cast(zipfile.ZipFile, file.zip).open(f"{name}.npy") as stream:
        is_first = np.lib.format.read_magic(stream) == (1, 0)
        parse = np.lib.format.read_array_header_1_0 if is_first else np.lib.format.read_array_header_2_0
        shape, _, dtype = parse(stream)
        if dtype.hasobject:
            raise ValueError(f"{name[:100]!r} holds Python objects, which are not read")
        return shape, dtype


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
