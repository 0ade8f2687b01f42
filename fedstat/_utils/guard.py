"""What may be read: a regular file, inside its folder, and no larger than a stated limit once expanded."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = 4 * 1024**3
HEAD, SETTINGS = 256, 4096
"""Fractions of the limit that a header or metadata (16 MiB) and a file of settings (1 MiB) may take."""
TENSOR, RUN = 2**19, 2**15
"""Bytes set aside for each tensor or name in a file (8,192 of them) and for each run of a grid (131,072)."""
DEPTH = 64
"""Levels of nesting in JSON and TOML."""
_VARIABLE = "FEDSTAT_MAX_BYTES"
# Least memory of what JSON is made of, in bytes: a number, a list or dict, half a string (it has two quotes).
_JSON_COSTS = {b",": 32, b"[": 64, b"{": 64, b'"': 26}


class LimitError(ValueError):
    """Something would take more than the limit; the message names the file, the size and the way out."""


def limit() -> int:
    """Most bytes that one file may take in memory: the environment's FEDSTAT_MAX_BYTES, else 4 GiB.

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
    """Return ``declared``, bytes or other units, or raise LimitError if they exceed the limit over ``share``.

    Shares are those of 4 GiB where the limit is lower.
    """
    most = limit() if share == 1 else max(limit(), LIMIT) // share
    if declared > most:
        raise LimitError(
            f"{where}: {what} would take {declared:,} {unit}, but at most {most:,} are read. If you trust it and have "
            f"the memory, set the environment variable {_VARIABLE} to {declared * share}."
        )
    return declared


def status(path: str | Path) -> os.stat_result | None:
    """Return what the system knows of a path, None if nothing is there.

    Raises
    ------
    ValueError
        If no file can have that name, as it is too long or its links form a circle.
    """
    try:
        return os.stat(path)  # noqa: PTH116 - twice as fast, and asked for every chunk
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{str(path)[:100]!r} cannot be the path of a file: {why}. Check its name.") from None


def regular(path: Path, *, share: int = 1) -> Path:
    """Return ``path`` if it is a regular file no larger than the limit over ``share``.

    Raises
    ------
    FileNotFoundError
        If nothing is there.
    ValueError
        If it is a folder, a pipe or a device, or too large, or no file can have that name.
    """
    found = status(path)
    if found is None:
        raise FileNotFoundError(f"there is no file {path}. Check its name.")
    if stat.S_ISDIR(found.st_mode):
        raise ValueError(f"{path} must be a file, but it is a folder. Name the files in it.")
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file but a pipe or a device. Copy its content to a file first.")
    size(path, found.st_size, share=share)
    return path


def opened(path: Path, *, share: int = 1) -> BufferedReader:
    """Open a regular file to read its bytes; raises as :func:`regular`."""
    return regular(path, share=share).open("rb")


def content(path: Path, *, share: int = 1) -> bytes:
    """Read a regular file whole; raises as :func:`regular`."""
    with opened(path, share=share) as stream:
        return stream.read()


def inside(folder: Path, name: str, where: object) -> Path:
    """``folder / name``, or ValueError if it lies elsewhere: by "..", as an absolute path, or through a link."""
    path = folder / name
    status(path)  # circles of links, in which nothing has a place
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where} names {name!r:.200}, which lies outside of {folder}. Nothing is read or written there; "
            "put the file itself into the folder."
        )
    return path


def reason(error: BaseException) -> str:
    """What went wrong, in one line: the kind of error and the first line of its message, if it has one."""
    own = type(error) is ValueError or type(error).__module__.startswith("fedstat.")
    kind = "" if own else f"{type(error).__name__}: "
    lines = f"{kind}{error}".removesuffix(": ").splitlines() or [type(error).__name__]
    return lines[0][:300].removesuffix(".")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Name the file in an OSError that does not, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if type(error) is OSError and error.errno is None:  # as of NumPy, which counts what it wrote
            raise OSError(f"{path} could not be written: {error}. Is the disk full?") from error
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def parsed(where: object, text: bytes, *, finite: bool = True) -> Any:
    """Parse JSON in which no object repeats a name and, unless ``finite`` is False, every number is finite.

    Raises
    ------
    ValueError
        If it is not, if it is too deeply nested, or if it would take more memory than the limit. Damaged text raises
        the subclasses json.JSONDecodeError and UnicodeDecodeError, which know the place.
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
        seen: set[str] = set()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {again!r:.200} twice")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"numbers must be finite, but got {name}")
