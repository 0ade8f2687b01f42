"""Data sets of users, from whatever they are read: targets, classes, subsets, clients and images in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, guard, labels
from fedstat._utils.lazy import xr
from fedstat.data._files import SAMPLE
from fedstat.data.targets import Task, read_targets

SUBSETS = ("train", "test", "validation")
"""Values of split in a user's data."""

CHANNELS = (1, 3, 4)
"""Numbers of channels by which a dim of images is recognized."""


def build_samples(
    where: str,
    x: NDArray[Any],
    y: Any,
    *,
    task: Task | None = None,
    names: Sequence[Any] | None = None,
    client: Any = None,
    split: Any = None,
    features: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
) -> xr.Dataset:
    """Build the data set that :func:`fedstat.data.load` returns.

    Parameters
    ----------
    where : str
        What holds the samples, in messages, such as "own.npz".
    x : array (sample, ...)
        Images have the dims channel, row, column, and tables the dim feature.
    y : array (sample,) or (sample, target)
    task, names
        As in :func:`fedstat.data.targets.read_targets`.
    client, split : array (sample,), optional
    features, targets : sequence of str, optional
        Names of the columns of x and y.

    Raises
    ------
    ValueError
        If there are no samples, a value is missing, a subset has another name, or classes are fewer than two.
    """
    if not len(x):
        raise ValueError(f"{where} must hold samples, but holds none.")
    guard.size(where, len(x) * SAMPLE, f"the labels and splits of {len(x):,} samples")
    x_attrs = build_attrs(where, x)
    values, attrs = read_targets(f"y in {where}", y, task, names=names)
    if attrs and len(np.unique(values)) < 2:
        raise ValueError(
            f"y in {where} must hold at least two classes, but all {len(values):,} samples are of the class "
            f"{attrs['names'][values[0]]}. Add samples of other classes."
        )
    if split is None:
        split = np.full(len(x), "train")
    splits = np.asarray(labels.complete(f"split in {where}", split, "sample")).astype(str).astype(object)
    for name in dict.fromkeys(splits):
        check.choice(f"split in {where}", name, SUBSETS)
    dims = ("channel", "row", "column") if x.ndim == 4 else tuple(f"axis{i}" for i in range(1, x.ndim))
    coords: dict[str, Any] = {"split": ("sample", splits)}
    if features is not None:
        dims, coords["feature"] = ("feature",), np.array(features, dtype=object)
    if targets is not None:
        coords["target"] = np.array(targets, dtype=object)
    if client is not None:
        coords["user"] = ("sample", labels.complete(f"client in {where}", client, "sample"))
    variables = {
        "x": (("sample", *dims), x, x_attrs),
        "y": (("sample", "target")[: values.ndim], values, attrs),
    }
    return xr.Dataset(variables, coords, {"title": where})


def move_channels(x: NDArray[Any]) -> NDArray[Any]:
    """Return images as (sample, channel, row, column), other arrays unchanged."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
        return np.ascontiguousarray(np.moveaxis(x, 3, 1))
    return x


def build_attrs(where: str, x: NDArray[Any]) -> dict[str, Any]:
    """Return the ``attrs`` of x: the scale of images, the vocabulary of tokens."""
    if x.dtype == np.uint8 and x.ndim == 4:
        return {"scale": 255}
    if x.dtype.kind not in "iu":
        return {}
    if x.min() < 0:
        raise ValueError(
            f"x in {where} must be tokens 0, 1, ..., as it holds integers, but the smallest is {x.min()}. Number the "
            "tokens from 0; save features as floats, x.astype('float32')."
        )
    guard.size(where, (int(x.max()) + 1) * SAMPLE, f"a vocabulary with the token {x.max()}")
    return {"vocabulary": [str(i) for i in range(int(x.max()) + 1)]}
