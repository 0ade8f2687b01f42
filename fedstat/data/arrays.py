"""A user's own data: arrays in one .npz file."""

from __future__ import annotations

import hashlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from fedstat import _check, _labels
from fedstat._later import xr
from fedstat.data._files import SPLITS, Remembered, Split, note

ARRAYS = (
    "x (sample, ...): float features or images, uint8 images (sample, row, column), (sample, channel, row, column) or "
    "(sample, row, column, channel), or integer tokens (sample, position); y (sample,): classes, as whole numbers or "
    "names; optional client (sample,): whose sample it is, for the partition natural; optional split (sample,): train "
    "or test"
)
"""What such a file holds."""

_CHANNELS = (1, 3, 4)


def is_arrays(name: object) -> bool:
    """Whether a data set's name is that of such a file."""
    return isinstance(name, str) and name.endswith(".npz")


def _digest(path: str) -> str:
    with note(Path(path)).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


digest = Remembered(_digest, size=8)
"""Digest (SHA-256) of a file's content, by its path."""


def load(path: str | Path, split: Split | None = None) -> xr.Dataset:
    """Samples of a .npz file, as :func:`fedstat.data.load` returns those of published data sets.

    Parameters
    ----------
    path : path
        With the arrays that ``ARRAYS`` describes, as ``np.savez("own.npz", x=x, y=y)`` writes them.
    split : {"train", "test"}, optional
        Only these samples.

    Returns
    -------
    Dataset
        x, y (numbered from 0, ``attrs["names"]`` are the classes), the coordinate split, "train" unless given, and
        ``user`` where there is ``client``. Images are (sample, channel, row, column): if only the last dim of the
        file's may be channels (1, 3 or 4), it is moved. uint8 images have ``attrs["scale"]`` 255.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If it is no .npz file, lacks an array, holds objects, or its arrays do not fit together.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}. It must hold {ARRAYS}")
    try:
        with np.load(note(path), allow_pickle=False) as file:
            found = {name: file[name] for name in file.files}
    except (OSError, ValueError, BadZipFile, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}). It must hold {ARRAYS}") from None
    for name in ("x", "y"):
        if name not in found:
            near = _check.did_you_mean(name, list(found))
            raise ValueError(
                f"{path} lacks {name}; it holds {', '.join(found) or 'nothing'}.{near} It must hold {ARRAYS}"
            )
    x, n = found["x"], len(found["x"]) if found["x"].ndim else 0
    for name in ("y", "client", "split"):
        if name in found and found[name].shape != (n,):
            raise ValueError(
                f"{name} in {path} must have shape ({n},), a value for each of x, but has {found[name].shape}"
            )
        if name in found:
            _labels.complete(f"{name} in {path}", found[name], "sample")
    if n == 0 or x.dtype.kind not in "fiu" or x.ndim < 2:
        raise ValueError(f"x in {path} must be numbers (sample, ...), but is {x.dtype} of shape {x.shape}")
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[1] not in _CHANNELS and x.shape[3] in _CHANNELS:
        x = np.ascontiguousarray(np.moveaxis(x, 3, 1))  # channels last
    classes, y = np.unique(_labels.classes(f"y in {path}", found["y"]), return_inverse=True)
    dims = ("channel", "row", "column") if x.ndim == 4 else tuple(f"axis{i}" for i in range(1, x.ndim))
    which = np.asarray(found.get("split", np.full(n, "train"))).astype(str).astype(object)
    for name in dict.fromkeys(which):
        _check.choice(f"split in {path}", name, SPLITS)
    data = xr.Dataset(
        {"x": (("sample", *dims), x), "y": ("sample", y.astype(np.int64), {"names": [str(c) for c in classes]})},
        {"split": ("sample", which)},
        {"title": path.name},
    )
    if "client" in found:
        data = data.assign_coords(user=("sample", found["client"]))
    if x.dtype == np.uint8 and x.ndim == 4:
        data.x.attrs["scale"] = 255
    elif x.dtype.kind in "iu":
        if x.min() < 0:
            raise ValueError(f"x in {path} holds integers, which are tokens 0, 1, ..., but the least is {x.min()}")
        data.x.attrs["vocabulary"] = [str(i) for i in range(int(x.max()) + 1)]
    return data if split is None else data.isel(sample=np.flatnonzero(which == _check.choice("split", split, SPLITS)))
