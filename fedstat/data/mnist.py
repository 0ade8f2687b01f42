"""Digits: MNIST and its kin in IDX files, and scikit-learn's digits, which need no files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import (
    CHUNK,
    Source,
    Split,
    check_rows,
    damaged,
    dataset,
    find,
    opened,
    reading,
    wanted,
    zipped,
)

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_UPPER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOWER = tuple("abcdefghijklmnopqrstuvwxyz")
_MERGED = (*_DIGITS, *_UPPER, *"abdefghnqrt")  # the lower-case letters that do not look like their capitals


def _spellings(base: str, ndim: int) -> tuple[str, ...]:
    return tuple(f"{base}{dash}idx{ndim}-ubyte{end}" for end in ("", ".gz") for dash in "-.")


def _source(title: str, home: str, train: int, test: int, places: tuple[str, ...], stem: str = "") -> Source:
    return Source(title, home, {"train": train, "test": test}, places, first=_spellings(f"{stem}train-images", 3))


def _emnist(part: str, train: int, test: int) -> Source:
    home = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    places = ("", "emnist", "gzip", "EMNIST/raw", "emnist/gzip")
    title = {"byclass": "by class", "bymerge": "by merge", "mnist": "MNIST"}.get(part, part)
    return _source(f"EMNIST {title}", home, train, test, places, stem=f"emnist-{part}-")


SOURCES = {
    "mnist": _source("MNIST", "http://yann.lecun.com/exdb/mnist", 60_000, 10_000, ("", "mnist", "MNIST/raw", "MNIST")),
    "fashion": _source(
        "Fashion-MNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        60_000,
        10_000,
        ("fashion", "fashion-mnist", "FashionMNIST/raw"),
    ),
    "emnist-balanced": _emnist("balanced", 112_800, 18_800),
    "emnist-byclass": _emnist("byclass", 697_932, 116_323),
    "emnist-bymerge": _emnist("bymerge", 697_932, 116_323),
    "emnist-digits": _emnist("digits", 240_000, 40_000),
    "emnist-letters": _emnist("letters", 124_800, 20_800),
    "emnist-mnist": _emnist("mnist", 60_000, 10_000),
}
CLASSES = {
    "mnist": _DIGITS,
    "fashion": _CLOTHES,
    "emnist-balanced": _MERGED,
    "emnist-byclass": (*_DIGITS, *_UPPER, *_LOWER),
    "emnist-bymerge": _MERGED,
    "emnist-digits": _DIGITS,
    "emnist-letters": _UPPER,
    "emnist-mnist": _DIGITS,
}


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel 1, row, column) uint8 0–255 and labels from 0.

    EMNIST's images are stored lying on their side and its letters numbered from 1; both are put right here.
    """
    source = SOURCES[name]
    stem = f"{name}-" if name.startswith("emnist") else ""
    images, labels = {}, {}
    for part in wanted(split):
        published = "t10k" if part == "test" and not stem else part
        base = f"{stem}{published}-"
        images[part] = find(root, _spellings(f"{base}images", 3), source)
        labels[part] = find(root, _spellings(f"{base}labels", 1), source)
    x, ends = read_idx(list(images.values()))
    y, label_ends = read_idx(list(labels.values()))
    for part, end, label_end in zip(images, ends, label_ends, strict=True):
        if end != label_end:
            raise ValueError(
                f"images and labels must be of the same samples, but got {end} images in {images[part]} "
                f"and {label_end} labels in {labels[part]} (counted from the start of the first split)"
            )
    if x.ndim != 3 or y.ndim != 1:
        raise ValueError(
            f"images must be (sample, row, column) and labels (sample,), but got {x.shape} in {images[part]} "
            f"and {y.shape} in {labels[part]}. Are their names swapped?"
        )
    first = int(name == "emnist-letters")  # their labels start at 1
    if y.size and not first <= y.min() <= y.max() < first + len(CLASSES[name]):
        raise ValueError(
            f"labels must be {first} to {first + len(CLASSES[name]) - 1}, but got {y.min()} to {y.max()} in "
            f"{' and '.join(map(str, labels.values()))}. Download them again."
        )
    sizes = np.diff([0, *ends])
    for part, size in zip(images, sizes, strict=True):
        check_rows(source, part, int(size), images[part].parent)
    if stem:
        x = np.ascontiguousarray(x.swapaxes(1, 2))
        y = y - first
    which = np.repeat(np.array(list(images), dtype=object), sizes)
    data = dataset(x[:, None], y, which, source, ("channel", "row", "column"))
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list(CLASSES[name])
    return data


def read_idx(paths: list[Path]) -> tuple[np.ndarray, list[int]]:
    """Arrays of several idx files of bytes, one after the other in a single array.

    Parameters
    ----------
    paths : list of Path
        Files whose entries have the same shape, gzipped or not.

    Returns
    -------
    array (entry, ...), uint8
        Read-write and contiguous.
    ends : list of int
        Entries up to and with each file.

    Raises
    ------
    ValueError
        If a header is not idx of unsigned bytes, a file is shorter or longer than its header says, or it is larger
        than the limit of what is read.
    """
    heads = [_shape(path) for path in paths]
    if len({h[1:] for h in heads}) > 1:
        raise ValueError(f"entries must have one shape, but got {[h[1:] for h in heads]} in {[str(p) for p in paths]}")
    ends = [int(e) for e in np.cumsum([h[0] for h in heads])]
    with reading(paths[0]):
        out = np.empty((ends[-1], *heads[0][1:]), dtype=np.uint8)
    for path, shape, end in zip(paths, heads, ends, strict=True):
        _fill(path, 4 + 4 * len(shape), out[end - shape[0] : end])
    return out, ends


def _fill(path: Path, start: int, part: np.ndarray) -> None:
    left = part.reshape(-1).data
    with opened(path) as stream:
        stream.read(start)
        while left and (some := stream.readinto(left[:CHUNK])):  # type: ignore[attr-defined]
            left = left[some:]
        got = part.size - len(left)
        if got != part.size or stream.read(1):
            more = "more" if got == part.size else start + got
            raise damaged(
                path,
                f"byte {start + got} of the unzipped bytes",
                f"the header says {start + part.size} bytes, but got {more}",
            )


def _shape(path: Path) -> tuple[int, ...]:
    """Shape in the header, once it is checked against the limit and the length of the file, if it is not zipped."""
    with opened(path) as stream:
        head = stream.read(20)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] not in range(1, 5):
        raise damaged(
            path, 0, f"idx of unsigned bytes starts with 00 00 08 and the dimensions, but got {head[:4].hex(' ')}"
        )
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise damaged(path, len(head), f"it ends within its header of {start} bytes")
    shape = struct.unpack(f">{head[3]}I", head[4:start])
    promised, length = start + math.prod(shape), path.stat().st_size
    if not zipped(path) and length != promised:
        raise damaged(path, min(length, promised), f"the header says {promised} bytes, but got {length}")
    guard.size(path, promised)
    return shape


DIGITS = {
    "digits": Source(
        "Optical recognition of handwritten digits",
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        {"train": 1797},
    )
}


def load_digits(name: str, _root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel 1, row 8, column 8) uint8 0–16; all are "train", for no split was published."""
    from sklearn.datasets import load_digits

    if split == "test":
        raise ValueError('digits has no published test split, but got split="test". Use partition.train_test.')
    bunch = load_digits()
    x = bunch.images.astype(np.uint8)[:, None]
    which = np.full(len(x), "train", dtype=object)
    data = dataset(x, bunch.target, which, DIGITS[name], ("channel", "row", "column"))
    data.x.attrs["scale"] = 16
    data.y.attrs["names"] = list("0123456789")
    return data
