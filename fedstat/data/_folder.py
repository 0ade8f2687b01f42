"""A data set kept as plain .npy files, whose x is mapped into memory rather than read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedstat import _guard, _labels
from fedstat._later import xr
from fedstat.data._files import reading

_INDEX = "dataset.json"
_AGAIN = "Make the folder again with save_folder."


def save_folder(data: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a data set to a new folder, one .npy file for each variable; ``open_folder`` maps it.

    For sets that do not fit in memory, or take long to decode (Tiny-ImageNet's JPEG files, windows of text).

    Parameters
    ----------
    data : xarray.Dataset
        As ``load`` or a partition gives it.
    path : path
        Folder to make. Its parent must exist.

    Raises
    ------
    FileExistsError
        If it exists.
    ValueError
        If the name of a variable is not a plain file name, two names are equal as text, or a name is missing.
    """
    folder = Path(path)
    names = [str(key) for key in data.variables]
    for text in names:
        _plain(text, "the data set")
        if names.count(text) > 1:
            raise ValueError(f"every variable needs a name of its own as text, but got {text!r} twice. Rename one.")
    folder.mkdir()
    index = {}
    for name, variable in data.variables.items():
        values = variable.values
        levels: list[str] | None = None
        if values.dtype == object:
            # The text "nan" would stand for a gap.
            _labels.complete(str(name), np.atleast_1d(values), str(next(iter(variable.dims), "data set")))
            unique, values = np.unique(values, return_inverse=True)
            levels = [str(u) for u in unique]
        with _guard.written(folder / f"{name}.npy"):
            np.save(folder / f"{name}.npy", values)
        index[str(name)] = {
            "dims": variable.dims,
            "attrs": variable.attrs,
            "levels": levels,
            "coord": name in data.coords,
        }
    with _guard.written(folder / _INDEX):
        (folder / _INDEX).write_text(json.dumps({"variables": index, "attrs": data.attrs}, indent=1))
    return folder


def open_folder(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open what ``save_folder`` wrote; arrays are read from disk as they are used, and writing to them leaves it alone.

    Raises
    ------
    FileNotFoundError
        If the folder or a file in it is missing.
    ValueError
        If a file is damaged, or lies outside of the folder; names it.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from fedstat.data import load
    >>> with TemporaryDirectory() as place:
    ...     bool(open_folder(save_folder(load("digits"), Path(place) / "digits")).equals(load("digits")))
    True
    """
    folder = Path(path)
    if not _guard.status(folder / _INDEX):
        raise FileNotFoundError(f"{folder} must be a folder that save_folder made, but it has no {_INDEX}")
    index = folder / _INDEX
    with reading(index, _AGAIN):
        content = _guard.parsed(index, _guard.content(index, share=_guard.HEAD))
        entries = {name: (tuple(e["dims"]), e["attrs"], e["levels"], e["coord"]) for name, e in _variables(content)}
        data = xr.Dataset(attrs=content["attrs"])
    for name, (dims, attrs, levels, coord) in entries.items():
        _plain(name, index)
        file = _guard.regular(_guard.inside(folder, f"{name}.npy", index))
        with reading(file, _AGAIN):
            values = np.load(file, mmap_mode="c", allow_pickle=False)
            data[name] = (dims, values if levels is None else _named(values, levels, file), attrs)
        if coord:
            data = data.set_coords(name)
    return data


def _variables(content: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    for name, entry in content["variables"].items():
        if missing := [key for key in ("dims", "attrs", "levels", "coord") if key not in entry]:
            raise ValueError(f"variable {name!r:.100} has no {missing[0]}")
        yield name, entry


def _named(codes: np.ndarray, levels: list[str], file: Path) -> np.ndarray:
    if codes.dtype.kind not in "iu" or codes.min(initial=0) < 0 or codes.max(initial=-1) >= len(levels):
        raise ValueError(f"its codes must be 0 to {len(levels) - 1}, but got {codes.dtype} outside of them")
    _guard.size(file, 8 * codes.size, "the names it stands for")
    return np.array(levels, dtype=object)[codes]


def _plain(name: str, where: object) -> None:
    """Raise ValueError if ``name`` is not the name of one file in the folder."""
    if name != Path(name).name or name in ("", "..") or {"/", "\\", "\0"} & set(name):
        raise ValueError(
            f"{where} has a variable {name!r:.200}, which is not a plain name: its file would lie outside the folder. "
            "Rename it."
        )
