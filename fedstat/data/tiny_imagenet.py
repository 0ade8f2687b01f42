"""Loader of Tiny-ImageNet from its folders of JPEG files."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import Part, Remote, Source, Split, error_at, find, join_parts, list_splits, read
from fedstat.data._images import decode, many

SOURCES = {
    "tiny-imagenet": Source(
        "Tiny-ImageNet",
        "http://cs231n.stanford.edu",
        {"train": 100_000, "test": 10_000},
        places=("tiny-imagenet-200", "", "tiny-imagenet/tiny-imagenet-200"),
        files=(("wnids.txt",), ("train",), ("val",)),
        classes=200,
        remote=(
            Remote(
                "tiny-imagenet-200.zip",
                248_100_043,
                "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
                (
                    "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
                    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                ),
                {"tiny-imagenet-200/": "tiny-imagenet-200/"},
            ),
        ),
    )
}
_SIDE = 64


def load_tiny_imagenet(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read images x (sample, channel, row, column) uint8 0–255; gray images are repeated in the three channels.

    The published test images have no labels, so "test" is the folder ``val``, as in papers that use the data set.
    """
    source = SOURCES[name]
    folder = find(root, source.first, source).parent
    wnids = _read_text(folder / "wnids.txt").split()
    if duplicates := [wnid for wnid, n in Counter(wnids).items() if n > 1]:
        raise error_at(folder / "wnids.txt", f"class {duplicates[0]!r:.100}", "it occurs twice. Download it again.")
    label_by_wnid = {wnid: i for i, wnid in enumerate(sorted(wnids))}
    parts = {}
    for part in list_splits(split):
        list_files = _list_train if part == "train" else _list_validation
        files = list_files(folder, label_by_wnid, source)
        parts[part] = Part(_decode_images([f for f, _ in files]), np.array([y for _, y in files], dtype=np.int64))
    data = join_parts(parts, source, ("channel", "row", "column"), folder)
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = sorted(wnids)
    return data


def _read_text(path: Path) -> str:
    with guard.wrap_errors(path):
        return read(path).decode("utf-8")


def _list_train(folder: Path, label_by_wnid: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    image_folders = {}
    for wnid in label_by_wnid:
        guard.inside(folder / "train", wnid, folder / "wnids.txt")
        image_folders[wnid] = find(folder, ["images"], source, [f"train/{wnid}"])
    return [(f, label_by_wnid[wnid]) for wnid, images in image_folders.items() for f in _list_images(images)]


def _list_images(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        files = sorted(entries, key=lambda entry: entry.name)
    for entry in files:
        if entry.is_symlink():
            guard.inside(folder, entry.name, folder)
    return [Path(entry.path) for entry in files]


def _list_validation(folder: Path, label_by_wnid: dict[str, int], source: Source) -> list[tuple[Path, int]]:
    table = find(folder, ["val_annotations.txt"], source, ["val"])
    files = []
    for number, line in enumerate(_read_text(table).splitlines(), start=1):
        cells = line.split("\t")
        if len(cells) < 2 or cells[1] not in label_by_wnid:
            raise error_at(table, f"line {number}", f"expected file name and class of wnids.txt, but got {line[:60]!r}")
        guard.inside(folder / "val" / "images", cells[0], f"{table} at line {number}")
        files.append((find(folder, [cells[0]], source, ["val/images"]), label_by_wnid[cells[1]]))
    return files


def _decode_images(files: list[Path]) -> np.ndarray:
    x = np.empty((len(files), 3, _SIDE, _SIDE), dtype=np.uint8)
    with many():
        for i, path in enumerate(files):
            x[i] = decode(path, "RGB", (_SIDE, _SIDE))
    return x
