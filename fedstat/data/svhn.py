"""SVHN, the cropped digits, as MATLAB files."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import scipy

from fedstat import _guard
from fedstat._later import xr
from fedstat.data._files import Part, Source, Split, damaged, find, joined, reading, wanted

SOURCES = {
    "svhn": Source("SVHN (cropped digits)", "http://ufldl.stanford.edu/housenumbers", {"train": 73_257, "test": 26_032})
}
# Bytes of a number of each class; cells and structures are not read, for their nesting can exhaust the stack.
_NUMBERS = {
    "double": 8, "single": 4, "logical": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4,
    "int64": 8, "uint64": 8,
}  # fmt: skip


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel, row, column) uint8 0–255 and digits; the files' label 10 is the digit 0."""
    parts = {}
    for part in wanted(split):
        path = find(root, ("svhn", "SVHN", ""), [f"{part}_32x32.mat"], SOURCES[name])
        parts[part] = Part(*_read(path))
    data = joined(parts, SOURCES[name], ("channel", "row", "column"), root)
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list("0123456789")
    return data


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with _guard.opened(path) as stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that stand twice: all are checked
        with reading(path, stream=stream):
            found = [entry for entry in scipy.io.whosmat(stream) if entry[0] in ("X", "y")]
        for name, shape, kind in found:
            if kind not in _NUMBERS:
                raise damaged(path, 0, f"{name} must be numbers, but got {kind}")
            _guard.size(path, _NUMBERS[kind] * math.prod(shape), f"{name} of shape {shape}")
        stream.seek(0)
        with reading(path, stream=stream):
            content = scipy.io.loadmat(stream, variable_names=("X", "y"))
    missing = {"X", "y"} - set(content)
    if missing:
        raise damaged(path, 0, f"an SVHN file holds X and y, but got no {' nor '.join(sorted(missing))}")
    x, y = content["X"], content["y"].ravel()
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, y.size):
        raise damaged(path, 0, f"X must be uint8 (32, 32, 3, {y.size}), but got {x.dtype} {x.shape}")
    if not np.isin(y, np.arange(1, 11)).all():
        raise damaged(path, 0, f"labels must be 1 to 10, but got {np.unique(y)[:12]}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10
