"""Data sets of users, in files of arrays or tables, and images scaled to [0, 1]."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data import tables
from fedstat.data._files import SPLITS, Remembered, Split, note
from fedstat.data._samples import SUBSETS, build_samples, move_channels
from fedstat.data.targets import Task

__all__ = ["ARRAYS", "SUBSETS", "Scaling", "digest", "is_arrays", "load", "scaling", "to_float"]


class Scaling(NamedTuple):
    """Map from stored values to network inputs: x · factor − shift, both float32, scalar or one value per channel."""

    factor: NDArray[np.float32]
    shift: NDArray[np.float32]


def scaling(
    x: xr.DataArray | xr.Variable,
    mean: float | Sequence[float] | None = None,
    sd: float | Sequence[float] | None = None,
) -> Scaling:
    """Return the map to (x / scale − mean) / sd; by default with mean and sd of ``x.attrs``, or else 0 and 1.

    Raises
    ------
    ValueError
        If x has no scale, a mean is not finite, an ``sd`` is not positive, or their number is not that of the channels.
    """
    if "scale" not in x.attrs and not (x.dtype == np.uint8 and x.ndim > 2):
        raise ValueError(
            "x has no attrs['scale'], the stored value that becomes 1: it is text, or already scaled. For other data, "
            "set x.attrs['scale'], such as 1 for features that are integers."
        )
    mean = x.attrs.get("mean", 0.0) if mean is None else mean
    sd = x.attrs.get("sd", 1.0) if sd is None else sd
    center, spread = (np.asarray(v, dtype=np.float32) for v in (mean, sd))
    if not np.all(spread > 0):
        raise ValueError(f"sd must be > 0, but got {sd!r}")
    if not np.isfinite(center).all():
        raise ValueError(f"mean must be finite, but got {mean!r}")
    axis = x.dims.index("channel") if "channel" in x.dims else x.ndim - 3
    channels = x.shape[axis] if x.ndim > 3 else 1
    if not {center.size, spread.size} <= {1, channels}:
        raise ValueError(f"mean and sd must be one number, or {channels} by channel, but got {mean!r} and {sd!r}")
    factor = np.asarray(1 / (np.float32(x.attrs.get("scale", 255)) * spread), dtype=np.float32)
    shift = np.asarray(center / spread, dtype=np.float32)
    ones = (1,) * (x.ndim - 1 - axis)
    return Scaling(*(v.reshape(-1, *ones) if v.size > 1 else v.reshape(()) for v in (factor, shift)))


@check.named_options()
def to_float(
    data: xr.Dataset, *, mean: float | Sequence[float] | None = None, sd: float | Sequence[float] | None = None
) -> xr.Dataset:
    """Convert images to float32, scale them to [0, 1] by the largest stored value, and standardize them.

    Parameters
    ----------
    data : xarray.Dataset
        With x (sample, channel, row, column) as ``load`` returns it; the dim ``channel`` may be another axis.
        ``x.attrs["scale"]`` is the largest value; without it, uint8 images have 255. Features that are integers have
        the scale 1.
    mean, sd : float or one per channel, optional
        x becomes (x / scale − mean) / sd. By default, mean and sd in ``x.attrs``, or else 0 and 1.

    Returns
    -------
    xarray.Dataset
        ``data`` with x float32; ``x.attrs`` keep the default mean and sd, if they have them.

    Raises
    ------
    ValueError
        If x has no scale (it is text, or already scaled), a mean is not finite, an ``sd`` is not positive, or their
        number is not that of the channels.

    Examples
    --------
    >>> from fedstat.data import load
    >>> float(to_float(load("digits")).x.max())
    1.0
    """
    factor, shift = scaling(data.x, mean, sd)
    x = data.x.values * factor
    x -= shift
    attrs = {key: data.x.attrs[key] for key in ("mean", "sd") if key in data.x.attrs and mean is None and sd is None}
    return data.assign(x=(data.x.dims, x.astype(np.float32, copy=False), attrs))


ARRAYS = (
    "x (sample, ...): float features or images, uint8 images (sample, row, column), (sample, channel, row, column) or "
    "(sample, row, column, channel), or integer tokens (sample, position); y (sample,): classes, as integers or "
    "names, or real numbers (sample,) or (sample, target); optional client (sample,): client of each sample, for the "
    "partition natural; optional split (sample,): train, test or validation, which every partition keeps"
)
"""Arrays of a user's .npz file."""

_NAMES: tuple[str, ...] = ("x", "y", "client", "split")


def is_arrays(name: object) -> bool:
    """Return True if the name of a data set is that of a user's file, .npz or .csv."""
    return isinstance(name, str) and name.endswith((".npz", ".csv"))


def _digest(path: str) -> str:
    with guard.opened(note(Path(path))) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


digest = Remembered(_digest, size=8)
"""Cached digest (SHA-256) of a file, by its path."""


def load(
    path: str | Path,
    split: Split | None = None,
    *,
    task: Task | None = None,
    y: str | Sequence[str] | None = None,
    client: str | None = None,
) -> xr.Dataset:
    """Read samples from a .npz or .csv file, in the form of :func:`fedstat.data.load`.

    Parameters
    ----------
    path : path
        File with the arrays of ``ARRAYS``, as ``np.savez("own.npz", x=x, y=y)`` writes them; or a table, see
        :func:`fedstat.data.from_table`.
    split : {"train", "test"}, optional
        Samples to return; by default, all.
    task : {"classification", "regression"}, optional
        By default, real numbers in y are targets of a regression, and integers and texts are classes.
    y, client : str, optional
        Columns of a table that hold the targets and clients; by default "y", and "client" if there is such a column.
        Several targets are a sequence, or names with commas between them.

    Returns
    -------
    Dataset
        x; y: classes numbered from 0, with their names as ``attrs["names"]``, or float64 targets; the coordinate split,
        by default "train"; and ``user`` if the file has ``client``. Images are (sample, channel, row, column): if only
        the last dim of the file has a size of channels (1, 3 or 4), it is moved. uint8 images have ``attrs["scale"]``
        255. Tables have the coordinate ``feature``.

    Raises
    ------
    FileNotFoundError
        If the file does not exist.
    ValueError
        If the file is not of its format, lacks an array or column, holds objects, or its arrays do not fit together. If
        the arrays, their labels or their vocabulary would exceed the limit of :func:`fedstat.data.load`.
    """
    path = Path(path).expanduser()
    if path.suffix == ".csv":
        data = tables.read_table(path, y=y, client=client, task=task)
    else:
        for option, value in (("y", y), ("client", client)):
            check.require_default(option, value, None, "with a .npz file", hint=f". Name its array {option}.")
        arrays = _read_arrays(path)
        x = move_channels(arrays["x"])
        data = build_samples(
            str(path), x, arrays["y"], task=task, client=arrays.get("client"), split=arrays.get("split")
        )
    data.attrs["title"] = path.name
    if split is None:
        return data
    return data.isel(sample=np.flatnonzero(data["split"] == check.choice("split", split, SPLITS)))


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read the arrays x, y, client and split of a file; raise ValueError if a value is missing."""
    try:
        with guard.arrays(note(path)) as file:
            arrays = {name: guard.array(path, file, name) for name in _NAMES if name in file.files}
            _require_arrays(path, arrays, file.files)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}. It must hold {ARRAYS}") from None
    return arrays


def _require_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], names: list[str]) -> None:
    """Raise ValueError unless the arrays exist and their types and shapes fit together."""
    for name in ("x", "y"):
        if name not in arrays:
            hint = check.did_you_mean(name, names)
            raise ValueError(f"{path} lacks {name}; it holds {few(names, 8) or 'nothing'}.{hint} It must hold {ARRAYS}")
    shape, dtype = arrays["x"].shape, arrays["x"].dtype
    for name in arrays.keys() - {"x"}:
        actual = arrays[name].shape
        if actual[:1] != shape[:1] or len(actual) > 1 + (name == "y"):
            raise ValueError(f"{name} in {path} must have shape {shape[:1]}, a value per sample of x, but has {actual}")
    if 0 in shape or dtype.kind not in "fiu" or len(shape) < 2:
        raise ValueError(f"x in {path} must be numbers (sample, ...), but is {dtype} of shape {shape}")
