"""Images in JPEG and PNG files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import guard
from fedstat.data._files import error_at

if TYPE_CHECKING:
    from PIL import Image

MODES = {"L": 1, "RGB": 3, "RGBA": 4}
"""Pillow's modes of images of bytes, and their numbers of channels."""
Size = tuple[int, int]
Result = TypeVar("Result")


@contextmanager
def many() -> Iterator[None]:
    """Context in which images are read: Pillow does not warn of large images, which their readers refuse."""
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield


def read_head(path: Path) -> tuple[str, Size]:
    """Return the mode and the size (rows, columns) of an image, without decoding it."""
    return _apply(path, lambda image: (image.mode, image.size[::-1]))


def decode(path: Path, mode: str, size: Size, *, resize: bool = False) -> NDArray[np.uint8]:
    """Return an image, converted to a mode of ``MODES``, as uint8 (channel, row, column).

    Parameters
    ----------
    path : Path
    mode : str
        Mode of the result.
    size : (int, int)
        Rows and columns.
    resize : bool
        If True, interpolate images of another size linearly, with antialiasing; else they are an error.
    """
    actual = read_head(path)[1]
    if actual != size and not resize:
        raise error_at(path, 0, f"an image must be {size[0]} × {size[1]}, but got {actual[0]} × {actual[1]}")
    guard.size(path, actual[0] * actual[1] * 4, f"its {actual[0]:,} × {actual[1]:,} pixels")
    return _apply(path, lambda image: to_array(image, mode, size))


def to_array(image: Image.Image, mode: str, size: Size) -> NDArray[np.uint8]:
    """Return an image of Pillow as uint8 (channel, row, column), converted and interpolated if necessary."""
    image = image if image.mode == mode else image.convert(mode)
    if image.size[::-1] != size:
        from PIL import Image

        image = image.resize(size[::-1], Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _apply(path: Path, work: Callable[[Image.Image], Result]) -> Result:
    from PIL import Image

    with guard.opened(path) as stream:
        try:
            return work(Image.open(stream, formats=("JPEG", "PNG")))  # decoders of some other formats run programs
        except Image.DecompressionBombError as error:
            raise error_at(path, 0, f"it has more pixels than Pillow reads: {error}") from error
        except Exception as error:  # on damaged bytes, Pillow raises undocumented errors
            raise error_at(path, stream.tell(), f"{guard.reason(error)}. Download it again.") from error
