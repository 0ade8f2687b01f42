"""Data sets that are damaged, careless or made to do harm; each function writes one and returns its reading."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hostile_weights import HOSTILE, LIMIT, NORMAL, case, hostile, zeros
from PIL import Image
from scipy.io import savemat

from fedstat.data import load

Read = Callable[[], object]


@cache
def zipped_zeros() -> bytes:
    """Gzip file of 6.4 GiB of zeros."""
    return gzip.compress(bytes(1 << 24), 9) * 400


def idx(shape: tuple[int, ...], content: bytes = b"") -> bytes:
    return b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + content


def mnist(at: Path, images: bytes | None, labels: bytes = idx((2,), b"\1\2")) -> Read:
    if images is not None:
        (at / "train-images-idx3-ubyte").write_bytes(images)
    (at / "train-labels-idx1-ubyte").write_bytes(labels)
    return lambda: load("mnist", at, split="train")


def own(at: Path) -> Path:
    """A user's own arrays."""
    np.savez(at / "own.npz", x=np.ones((4, 3), np.float32), y=np.arange(4) % 2)
    return at / "own.npz"


def table(at: Path) -> Path:
    """A user's own table."""
    (at / "own.csv").write_text("a,b,y\n" + "".join(f"{i},{i / 7},{i % 2}\n" for i in range(40)))
    return at / "own.csv"


IMAGES = idx((2, 28, 28), bytes(2 * 784))


@hostile(LIMIT)
def idx_of_a_terabyte_of_holes(at: Path) -> Read:
    read = mnist(at, idx(((1 << 40) // 784, 28, 28)))
    os.truncate(at / "train-images-idx3-ubyte", 16 + (1 << 40) // 784 * 784)
    return read


def cifar(at: Path, test: bytes, meta: bytes | None = None) -> Read:
    (at / "test_batch").write_bytes(test)
    (at / "batches.meta").write_bytes(pickle.dumps({b"label_names": [b"a"] * 10}) if meta is None else meta)
    return lambda: load("cifar-10", at, split="test")


def batch(**changes: object) -> dict[bytes, Any]:
    content = {"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2], **changes}
    return {k.encode(): v for k, v in content.items()}


@hostile("labels must be integers")
def cifar_of_a_billion_labels_by_reference(at: Path) -> Read:
    labels: list[Any] = [0] * 10
    for _ in range(12):
        labels = [labels] * 10
    return cifar(at, pickle.dumps(batch(labels=labels)))


def svhn(at: Path, content: dict[str, Any] | bytes) -> Read:
    path = at / "test_32x32.mat"
    path.write_bytes(content) if isinstance(content, bytes) else savemat(path, content, do_compression=True)
    return lambda: load("svhn", at, split="test")


def element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + bytes(-len(content) % 8)


def matrix(kind: int, dims: tuple[int, ...], content: bytes, name: bytes = b"X") -> bytes:
    flags, shape = element(6, struct.pack("<II", kind, 0)), element(5, struct.pack(f"<{len(dims)}i", *dims))
    return element(14, flags + shape + element(1, name) + content)


MAT = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"


@hostile(LIMIT)
def mat_bomb(at: Path) -> Read:
    n = 24 << 26
    squeeze = zlib.compressobj(1)
    head = matrix(9, (32, 32, 3, n // 3072), struct.pack("<II", 2, n))
    head = head[:4] + struct.pack("<I", len(head) - 8 + n) + head[8:]
    body = squeeze.compress(head) + squeeze.flush(zlib.Z_FULL_FLUSH) + zeros() * 24
    return svhn(at, MAT + struct.pack("<II", 15, len(body)) + body)


@hostile("test_32x32.mat")
def mat_that_holds_more_than_its_shape(at: Path) -> Read:
    lie = matrix(9, (32, 32, 3, 1), struct.pack("<II", 2, 0xFFFFFFF0))
    return svhn(at, MAT + lie[:4] + struct.pack("<I", 0xFFFFFFF8) + lie[8:])


@hostile("it must hold X once, but holds it twice")
def mat_with_copies_of_an_array(at: Path) -> Read:
    n = 10_000
    squeezed = zlib.compress(matrix(9, (32, 32, 3, n), element(2, bytes(3072 * n))))
    part = struct.pack("<II", 15, len(squeezed)) + squeezed
    return svhn(at, MAT + part * 40)


@hostile("must be numbers")
def mat_of_cells_nested_deeply(at: Path) -> Read:
    body = b""
    for _ in range(3_000):
        body = matrix(1, (1, 1), body, b"")
    return svhn(at, MAT + matrix(1, (1, 1), body))


def tiny(at: Path, image: bytes | None = None, wnids: str | bytes = "n01", list_: str = "a.JPEG\tn01\n") -> Path:
    (at / "val" / "images").mkdir(parents=True)
    (at / "train" / "n01" / "images").mkdir(parents=True)
    (at / "wnids.txt").write_bytes(wnids if isinstance(wnids, bytes) else wnids.encode())
    (at / "val" / "val_annotations.txt").write_text(list_)
    if image is None:
        stream = io.BytesIO()
        Image.new("RGB", (64, 64)).save(stream, "JPEG")
        image = stream.getvalue()
    for folder in ("val/images", "train/n01/images"):
        (at / folder / "a.JPEG").write_bytes(image)
    (at.parent / "outside.JPEG").write_bytes(image)
    return at


def tiny_test(at: Path, *changes: Any, split: Any = "test") -> Read:
    tiny(at, *changes)
    return lambda: load("tiny-imagenet", at, split=split)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(side: int, *more: bytes) -> bytes:
    rows = zlib.compress(bytes(64 * (64 * 3 + 1)))
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(more) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@hostile("more pixels than Pillow reads")
def jpeg_of_absurd_size(at: Path) -> Read:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "JPEG")
    raw = stream.getvalue()
    where = raw.index(b"\xff\xc0") + 5
    return tiny_test(at, raw[:where] + struct.pack(">HH", 65_500, 65_500) + raw[where + 4 :])


@hostile("'a.JPEG'")
def annotation_of_a_link_to_the_outside(at: Path) -> Read:
    read = tiny_test(at)
    (at / "val" / "images" / "a.JPEG").unlink()
    (at / "val" / "images" / "a.JPEG").symlink_to(at.parent / "outside.JPEG")
    return read


@hostile("'b.JPEG'")
def link_to_the_outside_among_the_training_images(at: Path) -> Read:
    read = tiny_test(at, split="train")
    (at / "train" / "n01" / "images" / "b.JPEG").symlink_to(at.parent / "outside.JPEG")
    return read


@hostile("is not a regular file")
def pipe_among_the_images(at: Path) -> Read:
    read = tiny_test(at, split="train")
    os.mkfifo(at / "train" / "n01" / "images" / "b.JPEG")
    return read


HOSTILE |= {
    "idx_of_absurd_shape": case("is damaged at byte", lambda at: mnist(at, idx((0xFFFFFFFF,) * 3))),
    "idx_of_absurd_shape_zipped": case(LIMIT, lambda at: mnist(at, gzip.compress(idx((0xFFFFFFFF,) * 3)))),
    "idx_that_promises_more_than_its_gzip_can_hold": case(
        "is damaged at byte", lambda at: mnist(at, gzip.compress(idx((250_000, 28, 28))))
    ),
    "idx_with_a_gzip_bomb_behind_it": case(
        "is damaged at byte", lambda at: mnist(at, gzip.compress(IMAGES) + zipped_zeros())
    ),
    "idx_of_labels_for_images": case("swapped", lambda at: mnist(at, idx((2,), b"\1\2"))),
    "idx_of_labels_that_are_no_digits": case("labels must be", lambda at: mnist(at, IMAGES, idx((2,), b"\1\xc8"))),
    "idx_of_nothing": case("no rows", lambda at: mnist(at, idx((0, 28, 28)), idx((0,)))),
    "cifar_with_an_absurd_memo": case("is damaged at byte", lambda at: cifar(at, b"\x80\x02}r\xff\xff\xff\x7f.")),
    "cifar_of_absurdly_many_bytes": case(
        "is damaged at byte", lambda at: cifar(at, b"\x80\x02c__builtin__\nbytes\nJ\xff\xff\xff\x7f\x85R.")
    ),
    "cifar_of_an_absurd_bytearray": case(
        "is damaged at byte", lambda at: cifar(at, b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".")
    ),
    "cifar_with_a_key_nested_deeply": case(
        "is damaged at byte", lambda at: cifar(at, b"\x80\x02})" + b"\x85" * 400_000 + b"K\x01s.")
    ),
    "cifar_of_empty_lists": case(LIMIT, lambda at: cifar(at, gzip.compress(b"\x80\x02(" + b"]" * 2_200_000 + b"l."))),
    "cifar_without_names_of_classes": case(
        "must hold the names of the classes", lambda at: cifar(at, pickle.dumps(batch()), pickle.dumps([1, 2]))
    ),
    "cifar_of_nothing": case(
        "no rows", lambda at: cifar(at, pickle.dumps(batch(data=np.zeros((0, 3072), np.uint8), labels=[]), protocol=2))
    ),
    "mat_of_absurd_shape": case(
        LIMIT, lambda at: svhn(at, MAT + matrix(9, (32, 32, 3, 2_000_000_000), element(2, bytes(8))))
    ),
    "mat_of_an_unknown_version": case(
        "test_32x32.mat is damaged", lambda at: svhn(at, MAT[:124] + b"\0\2IM" + bytes(64))
    ),
    "png_of_absurd_size": case("more pixels than Pillow reads", lambda at: tiny_test(at, png(2_000_000_000))),
    "png_of_15000_by_15000": case("more pixels than Pillow reads", lambda at: tiny_test(at, png(15_000))),
    "png_with_a_text_bomb": case(
        "is damaged at byte",
        lambda at: tiny_test(at, png(64, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 24))))),
    ),
    "postscript_for_a_jpeg": case(
        "is damaged at byte",
        lambda at: tiny_test(at, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\n(x) run\n%%EOF\n"),
    ),
    "annotation_that_leaves_the_folder": case(
        "'../../../outside.JPEG'", lambda at: tiny_test(at, None, "n01", "../../../outside.JPEG\tn01\n")
    ),
    "annotation_that_is_an_absolute_path": case(
        "outside.JPEG'", lambda at: tiny_test(at, None, "n01", f"{at.parent / 'outside.JPEG'}\tn01\n")
    ),
    "class_that_leaves_the_folder": case("'../n01'", lambda at: tiny_test(at, None, "../n01", "", split="train")),
    "classes_that_are_no_text": case("wnids.txt", lambda at: tiny_test(at, None, b"\xff\xfe\x00n")),
    "class_named_twice": case("twice", lambda at: tiny_test(at, None, "n01 n01")),
}
NORMAL |= {
    "idx_images": lambda at: mnist(at, gzip.compress(IMAGES)),
    "cifar_batch": lambda at: cifar(at, pickle.dumps(batch(), protocol=2)),
    "mat": lambda at: svhn(at, {"X": np.zeros((32, 32, 3, 200), np.uint8), "y": np.ones((200, 1), np.uint8)}),
    "jpeg_images": lambda at: tiny_test(at, split=None),
    "png_images": lambda at: tiny_test(at, png(64)),
}
