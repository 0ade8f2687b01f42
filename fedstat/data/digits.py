"""The 1,797 handwritten digits that come with scikit-learn: the default, which needs no files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedstat._utils.lazy import xr
from fedstat.data._files import Source, Split, dataset

SOURCES = {
    "digits": Source(
        "Optical recognition of handwritten digits",
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        {"train": 1797},
    )
}


def load(name: str, _root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel 1, row 8, column 8) uint8 0–16; all are "train", for no split was published."""
    from sklearn.datasets import load_digits

    if split == "test":
        raise ValueError('digits has no published test split, but got split="test". Use partition.train_test.')
    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[:, None]
    which = np.full(len(x), "train", dtype=object)
    data = dataset(x, bunch.target, which, SOURCES[name], ("channel", "row", "column"))
    data.x.attrs["scale"] = 16
    data.y.attrs["names"] = list("0123456789")
    return data
