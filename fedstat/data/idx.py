"""MNIST, Fashion-MNIST and EMNIST in the idx format, gzipped or not."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import xarray as xr

from fedstat.data._files import Source, Split, check_rows, damaged, dataset, find, read, wanted

_EMNIST = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_UPPER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOWER = tuple("abcdefghijklmnopqrstuvwxyz")
_MERGED = (*_DIGITS, *_UPPER, *"abdefghnqrt")  # the lower-case letters that do not look like their capitals


def _rows(train: int, test: int) -> dict[str, int]:
    return {"train": train, "test": test}


SOURCES = {
    "mnist": Source("MNIST", "http://yann.lecun.com/exdb/mnist", _rows(60_000, 10_000)),
    "fashion": Source("Fashion-MNIST", "https://github.com/zalandoresearch/fashion-mnist", _rows(60_000, 10_000)),
    "emnist-balanced": Source("EMNIST balanced", _EMNIST, _rows(112_800, 18_800)),
    "emnist-byclass": Source("EMNIST by class", _EMNIST, _rows(697_932, 116_323)),
    "emnist-bymerge": Source("EMNIST by merge", _EMNIST, _rows(697_932, 116_323)),
    "emnist-digits": Source("EMNIST digits", _EMNIST, _rows(240_000, 40_000)),
    "emnist-letters": Source("EMNIST letters", _EMNIST, _rows(124_800, 20_800)),
    "emnist-mnist": Source("EMNIST MNIST", _EMNIST, _rows(60_000, 10_000)),
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
_PLACES = {
    "mnist": ("", "mnist", "MNIST/raw", "MNIST"),
    "fashion": ("fashion", "fashion-mnist", "FashionMNIST/raw"),
    "emnist": ("", "emnist", "gzip", "EMNIST/raw", "emnist/gzip"),
}


def load(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Images x (sample, channel 1, row, column) uint8 0–255 and labels from 0.

    EMNIST's images are stored lying on their side and its letters numbered from 1; both are put right here.
    """
    source = SOURCES[name]
    stem, family = (f"{name}-", "emnist") if name.startswith("emnist") else ("", name)
    images, labels = {}, {}
    for part in wanted(split):
        published = "t10k" if part == "test" and not stem else part
        base = f"{stem}{published}-"
        images[part] = find(root, _PLACES[family], _spellings(f"{base}images", 3), source)
        labels[part] = find(root, _PLACES[family], _spellings(f"{base}labels", 1), source)
    x, ends = read_idx(list(images.values()))
    y, label_ends = read_idx(list(labels.values()))
    for part, end, label_end in zip(images, ends, label_ends, strict=True):
        if end != label_end:
            raise ValueError(
                f"images and labels must be of the same samples, but got {end} images in {images[part]} "
                f"and {label_end} labels in {labels[part]} (counted from the start of the first split)"
            )
    sizes = np.diff([0, *ends])
    for part, size in zip(images, sizes, strict=True):
        check_rows(source, part, int(size))
    if stem:
        x = np.ascontiguousarray(x.swapaxes(1, 2))
        y = y - (name == "emnist-letters")
    which = np.repeat(np.array(list(images), dtype=object), sizes)
    data = dataset(x[:, None], y, which, source, ("channel", "row", "column"))
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list(CLASSES[name])
    return data


def _spellings(base: str, ndim: int) -> list[str]:
    return [f"{base}{dash}idx{ndim}-ubyte{end}" for end in ("", ".gz") for dash in "-."]


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
        If a header is not idx of unsigned bytes, or a file is shorter or longer than its header says.
    """
    whole = [read(p) if _zipped(p) else None for p in paths]
    heads = [_header(p, w) for p, w in zip(paths, whole, strict=True)]
    if len({h[1:] for h in heads}) > 1:
        raise ValueError(f"entries must have one shape, but got {[h[1:] for h in heads]} in {[str(p) for p in paths]}")
    ends = [int(e) for e in np.cumsum([h[0] for h in heads])]
    out = np.empty((ends[-1], *heads[0][1:]), dtype=np.uint8)
    for path, content, shape, end in zip(paths, whole, heads, ends, strict=True):
        part, start = out[end - shape[0] : end], 4 + 4 * len(shape)
        if content is not None:
            part[...] = np.frombuffer(content, np.uint8, offset=start).reshape(shape)
        else:
            with path.open("rb") as stream:
                stream.seek(start)
                stream.readinto(part.data)
    return out, ends


def _zipped(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def _header(path: Path, content: bytes | None) -> tuple[int, ...]:
    """Shape in the header, once it is checked against the length of the (unzipped) file."""
    if content is None:
        length = path.stat().st_size
        with path.open("rb") as stream:
            head = stream.read(20)
    else:
        length, head = len(content), content[:20]
    if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] not in range(1, 5):
        raise damaged(
            path, 0, f"idx of unsigned bytes starts with 00 00 08 and the dimensions, but got {head[:4].hex(' ')}"
        )
    start = 4 + 4 * head[3]
    if length < start:
        raise damaged(path, length, f"it ends within its header of {start} bytes")
    shape = struct.unpack(f">{head[3]}I", head[4:start])
    promised = start + math.prod(shape)
    if length != promised:
        unzipped = "" if content is None else " of the unzipped bytes"
        raise damaged(
            path, f"byte {min(length, promised)}{unzipped}", f"the header says {promised} bytes, but got {length}"
        )
    return shape
