"""SVHN, the cropped digits, as MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
from scipy.io import loadmat

from fedstat.data._files import Part, Source, Split, damaged, find, joined, wanted

SOURCES = {
    "svhn": Source("SVHN (cropped digits)", "http://ufldl.stanford.edu/housenumbers", {"train": 73_257, "test": 26_032})
}


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel, row, column) uint8 0–255 and digits; the files' label 10 is the digit 0."""
    parts = {}
    for part in wanted(split):
        path = find(root, ("svhn", "SVHN", ""), [f"{part}_32x32.mat"], SOURCES[name])
        parts[part] = Part(*_read(path))
    data = joined(parts, SOURCES[name], ("channel", "row", "column"))
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list("0123456789")
    return data


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with path.open("rb") as stream:
        try:
            content = loadmat(stream, variable_names=("X", "y"))
        except Exception as error:  # scipy raises many kinds on damaged bytes, zlib.error and TypeError among them
            raise damaged(path, stream.tell(), f"{error or 'it ends too soon'}. Download it again.") from error
    missing = {"X", "y"} - set(content)
    if missing:
        raise damaged(path, 0, f"an SVHN file holds X and y, but got no {' nor '.join(sorted(missing))}")
    x, y = content["X"], content["y"].ravel()
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, y.size):
        raise damaged(path, 0, f"X must be uint8 (32, 32, 3, {y.size}), but got {x.dtype} {x.shape}")
    if not np.isin(y, np.arange(1, 11)).all():
        raise damaged(path, 0, f"labels must be 1 to 10, but got {np.unique(y)[:12]}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y % 10
