"""Tiny-ImageNet as its folders of JPEG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr
from PIL import Image

from fedstat.data._files import Part, Source, Split, damaged, find, joined, wanted

SOURCES = {"tiny-imagenet": Source("Tiny-ImageNet", "http://cs231n.stanford.edu", {"train": 100_000, "test": 10_000})}
_SIDE = 64


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel, row, column) uint8 0–255; grey images are repeated in the three channels.

    The published test images have no labels: "test" is the folder ``val``, as in the papers that use the set.
    """
    source = SOURCES[name]
    base = find(root, ("tiny-imagenet-200", "", "tiny-imagenet/tiny-imagenet-200"), ["wnids.txt"], source).parent
    wnids = (base / "wnids.txt").read_text().split()
    label = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    parts = {}
    for part in wanted(split):
        files = _train(base, label, source) if part == "train" else _validation(base, label, source)
        parts[part] = Part(_decode([f for f, _ in files]), np.array([y for _, y in files], dtype=np.int64))
    data = joined(parts, source, ("channel", "row", "column"))
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = sorted(wnids)
    return data


def _train(base: Path, label: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    folders = {wnid: find(base, (f"train/{wnid}",), ["images"], source) for wnid in label}
    return [(f, label[wnid]) for wnid, images in folders.items() for f in sorted(images.iterdir())]


def _validation(base: Path, label: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    table = find(base, ("val",), ["val_annotations.txt"], source)
    files = []
    for number, line in enumerate(table.read_text().splitlines(), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label:
            raise damaged(table, f"line {number}", f"expected file name and class of wnids.txt, but got {line[:60]!r}")
        files.append((find(base, ("val/images",), [cells[0]], source), label[cells[1]]))
    return files


def _decode(files: list[Path]) -> np.ndarray:
    x = np.empty((len(files), 3, _SIDE, _SIDE), dtype=np.uint8)
    for i, path in enumerate(files):
        with path.open("rb") as stream:
            try:
                image = np.asarray(Image.open(stream).convert("RGB"))
            except (OSError, SyntaxError, ValueError) as error:
                raise damaged(path, stream.tell(), f"{error}. Download it again.") from error
        if image.shape != (_SIDE, _SIDE, 3):
            raise damaged(path, 0, f"an image must be {_SIDE} × {_SIDE}, but got {image.shape[0]} × {image.shape[1]}")
        x[i] = image.transpose(2, 0, 1)
    return x
