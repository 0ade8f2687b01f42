"""Data sets in users' own arrays (.npz), and images on [0, 1]."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard, labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data._files import SAMPLE, SPLITS, Remembered, Split, note


class Scaling(NamedTuple):
    """Map from stored values to inputs of networks: x · factor − shift, both float32 (), or broadcast over channels."""

    factor: NDArray[np.float32]
    shift: NDArray[np.float32]


def scaling(
    x: xr.DataArray | xr.Variable,
    mean: float | Sequence[float] | None = None,
    sd: float | Sequence[float] | None = None,
) -> Scaling:
    """Scaling to (x / scale − mean) / sd; by default with the mean and sd of ``x.attrs``, or else 0 and 1.

    Raises
    ------
    ValueError
        If x has no scale, a mean is not finite or an ``sd`` not positive, or there are more or fewer than channels.
    """
    if "scale" not in x.attrs and not (x.dtype == np.uint8 and x.ndim > 2):
        raise ValueError(
            "x must be images with attrs['scale'], the stored value that becomes 1, but got none: it is text, or it "
            "was scaled before. Set x.attrs['scale'] for others, such as 1 for whole numbers that are features."
        )
    mean = x.attrs.get("mean", 0.0) if mean is None else mean
    sd = x.attrs.get("sd", 1.0) if sd is None else sd
    centre, spread = (np.asarray(v, dtype=np.float32) for v in (mean, sd))
    if not np.all(spread > 0):
        raise ValueError(f"sd must be > 0, but got {sd!r}")
    if not np.isfinite(centre).all():
        raise ValueError(f"mean must be finite, but got {mean!r}")
    axis = x.dims.index("channel") if "channel" in x.dims else x.ndim - 3
    channels = x.shape[axis] if x.ndim > 3 else 1
    if not {centre.size, spread.size} <= {1, channels}:
        raise ValueError(f"mean and sd must be one number, or {channels} by channel, but got {mean!r} and {sd!r}")
    factor = np.asarray(1 / (np.float32(x.attrs.get("scale", 255)) * spread), dtype=np.float32)
    shift = np.asarray(centre / spread, dtype=np.float32)
    ones = (1,) * (x.ndim - 1 - axis)
    return Scaling(*(v.reshape(-1, *ones) if v.size > 1 else v.reshape(()) for v in (factor, shift)))


def to_float(
    data: xr.Dataset, *, mean: float | Sequence[float] | None = None, sd: float | Sequence[float] | None = None
) -> xr.Dataset:
    """Images as float32, scaled to [0, 1] by the largest stored value and standardised.

    Parameters
    ----------
    data : xarray.Dataset
        With x (sample, channel, row, column) as ``load`` gives it, or with a dim ``channel`` elsewhere:
        ``x.attrs["scale"]`` is the largest value; without it, uint8 images have 255. Whole numbers that are features
        have the scale 1.
    mean, sd : float or one per channel, optional
        x becomes (x / scale − mean) / sd. By default those in ``x.attrs``, or else 0 and 1.

    Returns
    -------
    xarray.Dataset
        The same, with x float32; attrs keep a mean and sd that were taken from there.

    Raises
    ------
    ValueError
        If x has no scale (it is text, or was scaled before), a mean is not finite or an ``sd`` not positive, or there
        are more or fewer than channels.

    Examples
    --------
    >>> from fedstat.data import load
    >>> float(to_float(load("digits")).x.max())
    1.0
    """
    factor, shift = scaling(data.x, mean, sd)
    x = data.x.values * factor
    x -= shift
    kept = {name: data.x.attrs[name] for name in ("mean", "sd") if name in data.x.attrs and mean is None and sd is None}
    return data.assign(x=(data.x.dims, x.astype(np.float32, copy=False), kept))


ARRAYS = (
    "x (sample, ...): float features or images, uint8 images (sample, row, column), (sample, channel, row, column) or "
    "(sample, row, column, channel), or integer tokens (sample, position); y (sample,): classes, as whole numbers or "
    "names; optional client (sample,): whose sample it is, for the partition natural; optional split (sample,): train "
    "or test"
)
"""What such a file holds."""

_CHANNELS = (1, 3, 4)


_NAMES: tuple[str, ...] = ("x", "y", "client", "split")


def is_arrays(name: object) -> bool:
    """Whether a data set's name is that of such a file."""
    return isinstance(name, str) and name.endswith(".npz")


def _digest(path: str) -> str:
    with guard.opened(note(Path(path))) as file:
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
        If it is no .npz file, lacks an array, holds objects, or its arrays do not fit together. If these arrays, their
        labels or their vocabulary would take more than the limit, see :func:`fedstat.data.load`; others are not read.
    """
    path = Path(path).expanduser()
    found = _read(path)
    x = _channels_first(found["x"])
    classes, y = np.unique(labels.classes(f"y in {path}", found["y"]), return_inverse=True)
    dims = ("channel", "row", "column") if x.ndim == 4 else tuple(f"axis{i}" for i in range(1, x.ndim))
    which = np.asarray(found.get("split", np.full(len(x), "train"))).astype(str).astype(object)
    for name in dict.fromkeys(which):
        check.choice(f"split in {path}", name, SPLITS)
    data = xr.Dataset(
        {
            "x": (("sample", *dims), x, _values(path, x)),
            "y": ("sample", y.astype(np.int64), {"names": [str(c) for c in classes]}),
        },
        {"split": ("sample", which)},
        {"title": path.name},
    )
    if "client" in found:
        data = data.assign_coords(user=("sample", found["client"]))
    return data if split is None else data.isel(sample=np.flatnonzero(which == check.choice("split", split, SPLITS)))


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """The file's arrays of the names that have a meaning; no value is missing."""
    try:
        with guard.arrays(note(path)) as file:
            heads = {name: file.head(name) for name in _NAMES if name in file.names}
            _require(path, heads, file.names)
            found = {name: head.read() for name, head in heads.items()}
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}. It must hold {ARRAYS}") from None
    for name in found.keys() - {"x"}:
        labels.complete(f"{name} in {path}", found[name], "sample")
    return found


def _channels_first(x: NDArray[Any]) -> NDArray[Any]:
    """Images as (sample, channel, row, column); other arrays as they are."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in _CHANNELS and x.shape[3] in _CHANNELS:
        return np.ascontiguousarray(np.moveaxis(x, 3, 1))
    return x


def _values(path: Path, x: NDArray[Any]) -> dict[str, Any]:
    """``attrs`` of x: the scale of images, the vocabulary of tokens."""
    if x.dtype == np.uint8 and x.ndim == 4:
        return {"scale": 255}
    if x.dtype.kind not in "iu":
        return {}
    if x.min() < 0:
        raise ValueError(f"x in {path} holds integers, which are tokens 0, 1, ..., but the least is {x.min()}")
    guard.size(path, (int(x.max()) + 1) * SAMPLE, f"a vocabulary with the token {x.max()}")
    return {"vocabulary": [str(i) for i in range(int(x.max()) + 1)]}


def _require(path: Path, heads: Mapping[str, guard.Head], names: list[str]) -> None:
    """Raise ValueError unless the arrays are there, of types and shapes that fit together."""
    for name in ("x", "y"):
        if name not in heads:
            near = check.did_you_mean(name, names)
            raise ValueError(f"{path} lacks {name}; it holds {few(names, 8) or 'nothing'}.{near} It must hold {ARRAYS}")
    shape, dtype = heads["x"].shape, heads["x"].dtype
    for name in heads.keys() - {"x"}:
        if heads[name].shape != shape[:1]:
            raise ValueError(
                f"{name} in {path} must have shape {shape[:1]}, a value for each of x, but has {heads[name].shape}"
            )
    if 0 in shape or dtype.kind not in "fiu" or len(shape) < 2:
        raise ValueError(f"x in {path} must be numbers (sample, ...), but is {dtype} of shape {shape}")
    guard.size(path, shape[0] * SAMPLE, f"the labels and splits of {shape[0]:,} samples")
