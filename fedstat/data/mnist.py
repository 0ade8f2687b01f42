"""Loaders of MNIST, Fashion-MNIST and EMNIST (IDX files), and of scikit-learn's digits, which need no files."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import xr
from fedstat.data._files import (
    CHUNK,
    Remote,
    Source,
    Split,
    build_dataset,
    check_rows,
    error_at,
    find,
    is_gzip,
    list_splits,
    open_unzipped,
)

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_UPPER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOWER = tuple("abcdefghijklmnopqrstuvwxyz")
_MERGED = (*_DIGITS, *_UPPER, *"abdefghnqrt")  # the lower-case letters that do not look like their capitals


def _list_spellings(base: str, ndim: int) -> tuple[str, ...]:
    return tuple(f"{base}{dash}idx{ndim}-ubyte{end}" for end in ("", ".gz") for dash in "-.")


def _define(
    title: str, home: str, rows: tuple[int, int], places: tuple[str, ...], classes: tuple[str, ...],
    remote: tuple[Remote, ...], stem: str = "",
) -> Source:  # fmt: skip
    test = f"{stem}test" if stem else "t10k"
    kinds = ((f"{stem}train-images", 3), (f"{stem}train-labels", 1), (f"{test}-images", 3), (f"{test}-labels", 1))
    files = tuple(_list_spellings(*kind) for kind in kinds)
    return Source(title, home, dict(zip(("train", "test"), rows, strict=True)), places, files, len(classes), remote)


def _list_remote(folder: str, addresses: tuple[str, ...], files: dict[str, tuple[int, str]]) -> tuple[Remote, ...]:
    return tuple(
        Remote(f"{folder}/{name}.gz", size, f"sha256:{digest}", tuple(f"{address}/{name}.gz" for address in addresses))
        for name, (size, digest) in files.items()
    )


_MNIST = _list_remote(
    "mnist",
    ("https://storage.googleapis.com/cvdf-datasets/mnist", "https://ossci-datasets.s3.amazonaws.com/mnist"),
    {
        "train-images-idx3-ubyte": (9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        "train-labels-idx1-ubyte": (28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        "t10k-images-idx3-ubyte": (1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        "t10k-labels-idx1-ubyte": (4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    },
)
_FASHION = _list_remote(
    "fashion",
    (
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    ),
    {
        "train-images-idx3-ubyte": (26_421_880, "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84"),
        "train-labels-idx1-ubyte": (29_515, "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845"),
        "t10k-images-idx3-ubyte": (4_422_102, "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073"),
        "t10k-labels-idx1-ubyte": (5_148, "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5"),
    },
)
_EMNIST = (
    Remote(
        "emnist/gzip.zip",
        561_753_746,
        "sha256:fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        (
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
        ),
        {"gzip/": "emnist/"},
    ),
)
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


def _define_emnist(part: str, train: int, test: int) -> Source:
    home = "https://www.nist.gov/itl/products-and-services/emnist-dataset"
    places = ("", "emnist", "gzip", "EMNIST/raw", "emnist/gzip")
    title = {"byclass": "by class", "bymerge": "by merge", "mnist": "MNIST"}.get(part, part)
    name = f"emnist-{part}"
    return _define(f"EMNIST {title}", home, (train, test), places, CLASSES[name], _EMNIST, stem=f"{name}-")


SOURCES = {
    "mnist": _define(
        "MNIST",
        "http://yann.lecun.com/exdb/mnist",
        (60_000, 10_000),
        ("", "mnist", "MNIST/raw", "MNIST"),
        _DIGITS,
        _MNIST,
    ),
    "fashion": _define(
        "Fashion-MNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        (60_000, 10_000),
        ("fashion", "fashion-mnist", "FashionMNIST/raw"),
        _CLOTHES,
        _FASHION,
    ),
    "emnist-balanced": _define_emnist("balanced", 112_800, 18_800),
    "emnist-byclass": _define_emnist("byclass", 697_932, 116_323),
    "emnist-bymerge": _define_emnist("bymerge", 697_932, 116_323),
    "emnist-digits": _define_emnist("digits", 240_000, 40_000),
    "emnist-letters": _define_emnist("letters", 124_800, 20_800),
    "emnist-mnist": _define_emnist("mnist", 60_000, 10_000),
}


def load_mnist(name: str, root: Path, split: Split | None) -> xr.Dataset:
    """Read images x (sample, channel 1, row, column) uint8 0–255 and labels from 0.

    EMNIST stores its images transposed and numbers its letters from 1; both are corrected.
    """
    source = SOURCES[name]
    stem = f"{name}-" if name.startswith("emnist") else ""
    images, labels = {}, {}
    for part in list_splits(split):
        prefix = "t10k" if part == "test" and not stem else part
        base = f"{stem}{prefix}-"
        images[part] = find(root, _list_spellings(f"{base}images", 3), source)
        labels[part] = find(root, _list_spellings(f"{base}labels", 1), source)
    x, ends = read_idx(list(images.values()))
    y, label_ends = read_idx(list(labels.values()))
    for part, end, label_end in zip(images, ends, label_ends, strict=True):
        if end != label_end:
            raise ValueError(
                f"there must be a label for each image, but got {end} images in {images[part]} "
                f"and {label_end} labels in {labels[part]} (counted from the start of the first subset)"
            )
    if x.ndim != 3 or y.ndim != 1:
        raise ValueError(
            f"images must be (sample, row, column) and labels (sample,), but got {x.shape} in {images[part]} "
            f"and {y.shape} in {labels[part]}. Are their names swapped?"
        )
    first = int(name == "emnist-letters")  # labels of letters start at 1
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
    splits = np.repeat(np.array(list(images), dtype=object), sizes)
    data = build_dataset(x[:, None], y, splits, source, ("channel", "row", "column"))
    data.x.attrs["scale"] = 255
    data.y.attrs["names"] = list(CLASSES[name])
    return data


def read_idx(paths: list[Path]) -> tuple[np.ndarray, list[int]]:
    """Read several idx files of bytes into one array, one after the other.

    Parameters
    ----------
    paths : list of Path
        Files, gzipped or not, whose entries have one shape.

    Returns
    -------
    array (entry, ...), uint8
        Read-write and contiguous.
    ends : list of int
        Cumulative number of entries at the end of each file.

    Raises
    ------
    ValueError
        If a header is not idx of unsigned bytes, or a file is shorter or longer than its header says, or larger than
        the limit.
    """
    heads = [_read_shape(path) for path in paths]
    if len({h[1:] for h in heads}) > 1:
        raise ValueError(f"entries must have one shape, but got {[h[1:] for h in heads]} in {[str(p) for p in paths]}")
    ends = [int(e) for e in np.cumsum([h[0] for h in heads])]
    with guard.wrap_errors(paths[0]):
        out = np.empty((ends[-1], *heads[0][1:]), dtype=np.uint8)
    for path, shape, end in zip(paths, heads, ends, strict=True):
        _fill(path, 4 + 4 * len(shape), out[end - shape[0] : end])
    return out, ends


def _fill(path: Path, start: int, part: np.ndarray) -> None:
    buffer = part.reshape(-1).data
    with open_unzipped(path) as stream:
        stream.read(start)
        while buffer and (n := stream.readinto(buffer[:CHUNK])):  # type: ignore[attr-defined]
            buffer = buffer[n:]
        n_read = part.size - len(buffer)
        if n_read != part.size or stream.read(1):
            actual = "more" if n_read == part.size else start + n_read
            raise error_at(
                path,
                f"byte {start + n_read} of the unzipped bytes",
                f"the header says {start + part.size} bytes, but got {actual}",
            )


def _read_shape(path: Path) -> tuple[int, ...]:
    """Read the shape in the header; check it against the limit and, if not zipped, the length of the file."""
    with open_unzipped(path) as stream:
        head = stream.read(20)
    if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] not in range(1, 5):
        raise error_at(
            path, 0, f"idx of unsigned bytes starts with 00 00 08 and the dimensions, but got {head[:4].hex(' ')}"
        )
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise error_at(path, len(head), f"it ends within its header of {start} bytes")
    shape = struct.unpack(f">{head[3]}I", head[4:start])
    total, length = start + math.prod(shape), path.stat().st_size
    if not is_gzip(path) and length != total:
        raise error_at(path, min(length, total), f"the header says {total} bytes, but got {length}")
    guard.size(path, total)
    return shape


DIGITS = {
    "digits": Source(
        "Optical recognition of handwritten digits",
        "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits",
        {"train": 1797},
        classes=10,
    )
}


def load_digits(name: str, _root: Path, split: Split | None) -> xr.Dataset:
    """Return images x (sample, channel 1, row 8, column 8) uint8 0–16, all "train", as no split was published."""
    from sklearn.datasets import load_digits

    if split == "test":
        raise ValueError('digits has no published test subset, but got split="test". Use partition.train_test.')
    digits = load_digits()
    x = digits.images.astype(np.uint8)[:, None]
    splits = np.full(len(x), "train", dtype=object)
    data = build_dataset(x, digits.target, splits, DIGITS[name], ("channel", "row", "column"))
    data.x.attrs["scale"] = 16
    data.y.attrs["names"] = list("0123456789")
    return data
