"""A data set kept as plain .npy files, whose x is mapped into memory rather than read."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import xarray as xr

_INDEX = "dataset.json"


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
    """
    folder = Path(path)
    folder.mkdir()
    index = {}
    for name, variable in data.variables.items():
        values = variable.values
        levels: list[str] | None = None
        if values.dtype == object:
            unique, values = np.unique(values, return_inverse=True)
            levels = [str(u) for u in unique]
        np.save(folder / f"{name}.npy", values)
        index[str(name)] = {
            "dims": variable.dims,
            "attrs": variable.attrs,
            "levels": levels,
            "coord": name in data.coords,
        }
    (folder / _INDEX).write_text(json.dumps({"variables": index, "attrs": data.attrs}, indent=1))
    return folder


def open_folder(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open what ``save_folder`` wrote; arrays are read from disk as they are used, and writing to them leaves it alone.

    Raises
    ------
    FileNotFoundError
        If the folder or a file in it is missing.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from fedstat.data import load
    >>> with TemporaryDirectory() as place:
    ...     bool(open_folder(save_folder(load("digits"), Path(place) / "digits")).equals(load("digits")))
    True
    """
    folder = Path(path)
    if not (folder / _INDEX).exists():
        raise FileNotFoundError(f"{folder} must be a folder that save_folder made, but it has no {_INDEX}")
    content = json.loads((folder / _INDEX).read_text())
    data = xr.Dataset(attrs=content["attrs"])
    for name, entry in content["variables"].items():
        values = np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)
        if entry["levels"] is not None:
            values = np.array(entry["levels"], dtype=object)[values]
        data[name] = (entry["dims"], values, entry["attrs"])
        if entry["coord"]:
            data = data.set_coords(name)
    return data
