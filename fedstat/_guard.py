"""What may be read: a regular file, inside its folder, and no larger than a stated limit once expanded."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

LIMIT = 4 * 1024**3
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


def size(where: object, declared: int, what: str = "its content") -> int:
    """Return ``declared``, the bytes something would take in memory, or raise LimitError if they exceed the limit."""
    if declared > limit():
        raise LimitError(
            f"{where}: {what} would take {declared:,} bytes, but at most {limit():,} are read from one file. "
            f"If you trust it and have the memory, set the environment variable {_VARIABLE} to what it takes."
        )
    return declared


def regular(path: Path) -> Path:
    """Return ``path`` if it is a regular file no larger than the limit.

    Raises
    ------
    FileNotFoundError
        If nothing is there.
    ValueError
        If it is a folder, a pipe or a device, or too large.
    """
    if path.is_dir():
        raise ValueError(f"{path} must be a file, but it is a folder. Name the files in it.")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}. Check its name.")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file but a pipe or a device. Copy its content to a file first.")
    size(path, path.stat().st_size)
    return path


def inside(folder: Path, name: str, where: object) -> Path:
    """``folder / name``, or ValueError if it lies elsewhere: by "..", as an absolute path, or through a link."""
    path = folder / name
    if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"{where} names {name!r:.200}, which lies outside of {folder}. Nothing is read or written there; "
            "put the file itself into the folder."
        )
    return path


def reason(error: BaseException) -> str:
    """What went wrong, in one line: the kind of error and the first line of its message, if it has one."""
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return (f"{kind}{error}".removesuffix(": ") or type(error).__name__).splitlines()[0][:300]


def parsed(where: object, text: bytes) -> Any:
    """Parse JSON in which no object repeats a name and every number is finite.

    Raises
    ------
    ValueError
        If it is not, if it is too deeply nested, or if it would take more memory than the limit. Damaged text raises
        the subclasses json.JSONDecodeError and UnicodeDecodeError, which know the place.
    """
    size(where, sum(text.count(mark) * cost for mark, cost in _JSON_COSTS.items()), "its JSON")
    try:
        return json.loads(text, object_pairs_hook=_distinct, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        seen: set[str] = set()
        again = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"an object has {again!r:.200} twice")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"numbers must be finite, but got {name}")


def zipped(path: Path) -> None:
    """Check the unzipped size of a file, if it is a zip file, by the sizes in its directory.

    Raises
    ------
    ValueError, zipfile.BadZipFile
        If it exceeds the limit, or the directory is damaged.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            size(path, sum(member.file_size for member in file.infolist()), "its unzipped content")
