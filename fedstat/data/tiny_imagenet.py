"""Tiny-ImageNet as its folders of JPEG files."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Source, Split, damaged, find, joined, read, reading, wanted

SOURCES = {
    "tiny-imagenet": Source(
        "Tiny-ImageNet",
        "http://cs231n.stanford.edu",
        {"train": 100_000, "test": 10_000},
        places=("tiny-imagenet-200", "", "tiny-imagenet/tiny-imagenet-200"),
        first=("wnids.txt",),
    )
}
_SIDE = 64


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel, row, column) uint8 0–255; grey images are repeated in the three channels.

    The published test images have no labels: "test" is the folder ``val``, as in the papers that use the set.
    """
    source = SOURCES[name]
    base = find(root, source.first, source).parent
    wnids = _text(base / "wnids.txt").split()
    if again := [wnid for wnid, n in Counter(wnids).items() if n > 1]:
        raise damaged(base / "wnids.txt", f"class {again[0]!r:.100}", "it stands there twice. Download it again.")
    label = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    parts = {}
    for part in wanted(split):
        files = _train(base, label, source) if part == "train" else _validation(base, label, source)
        parts[part] = Part(_decode([f for f, _ in files]), np.array([y for _, y in files], dtype=np.int64))
    data = joined(parts, source, ("channel", "row", "column"), base)
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = sorted(wnids)
    return data


def _text(path: Path) -> str:
    with reading(path):
        return read(path).decode("utf-8")


def _train(base: Path, label: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    folders = {}
    for wnid in label:
        guard.inside(base / "train", wnid, base / "wnids.txt")
        folders[wnid] = find(base, ["images"], source, [f"train/{wnid}"])
    return [(f, label[wnid]) for wnid, images in folders.items() for f in _images(images)]


def _images(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_symlink():
            guard.inside(folder, entry.name, folder)
    return [Path(entry.path) for entry in found]


def _validation(base: Path, label: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    table = find(base, ["val_annotations.txt"], source, ["val"])
    files = []
    for number, line in enumerate(_text(table).splitlines(), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label:
            raise damaged(table, f"line {number}", f"expected file name and class of wnids.txt, but got {line[:60]!r}")
        guard.inside(base / "val" / "images", cells[0], f"{table} at line {number}")
        files.append((find(base, [cells[0]], source, ["val/images"]), label[cells[1]]))
    return files


def _decode(files: list[Path]) -> np.ndarray:
    from PIL import Image

    x = np.empty((len(files), 3, _SIDE, _SIDE), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # no image of another size is decompressed
        for i, path in enumerate(files):
            x[i] = _image(path).transpose(2, 0, 1)
    return x


def _image(path: Path) -> np.ndarray:
    from PIL import Image

    with guard.opened(path) as stream:
        try:
            image = Image.open(stream, formats=("JPEG", "PNG"))  # of the others, some run programs
            width, height = image.size
            if width == height == _SIDE:
                return np.asarray(image.convert("RGB"))
        except Image.DecompressionBombError as error:
            raise damaged(path, 0, f"an image must be {_SIDE} × {_SIDE}, but got more: {error}") from error
        except Exception as error:  # what Pillow raises on damaged bytes is not documented
            raise damaged(path, stream.tell(), f"{guard.reason(error)}. Download it again.") from error
    raise damaged(path, 0, f"an image must be {_SIDE} × {_SIDE}, but got {height} × {width}")
