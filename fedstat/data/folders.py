"""Images of users, in one folder for each class."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedstat._utils import check, guard
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.data._files import note
from fedstat.data._images import MODES, Size, decode, many, read_head
from fedstat.data._samples import SUBSETS, build_samples

_ENDINGS = (".png", ".jpg", ".jpeg")
_SUBSET_NAMES = (*SUBSETS, "training", "testing", "val", "valid", "dev")
_LEVELS = "CLASS/IMAGE.png or CLIENT/CLASS/IMAGE.png, maybe with train/ and test/ above"


@check.named_options()
def from_folder(path: str | os.PathLike[str], *, size: int | Size | None = None, mode: str | None = None) -> xr.Dataset:
    """Build a data set from images in one folder for each class, or for each client and class.

    The folder holds CLASS/IMAGE.png or CLIENT/CLASS/IMAGE.png. If the names of its folders are "train", "test" and
    "validation", they are subsets, and each of them is such a folder. Hidden files and folders, whose names begin with
    a dot, are left out.

    Parameters
    ----------
    path : path
        Folder with PNG and JPEG files.
    size : int or (int, int), optional
        Rows and columns of the result; an int is both. Images of other sizes are interpolated. By default, all images
        must have one size.
    mode : {"L", "RGB", "RGBA"}, optional
        Convert all images to gray or color. By default, all images must have one of these modes.

    Returns
    -------
    xarray.Dataset
        x (sample, channel, row, column) uint8 0–255, in the order of the paths; y (sample) int64, whose
        ``attrs["names"]`` are the folders of classes; coordinates split (sample) and, if there are folders of clients,
        user (sample), their names. Hold sets that exceed the memory by :func:`fedstat.data.save_folder`.

    Raises
    ------
    FileNotFoundError
        If there is no folder, or no image in it.
    ValueError
        If a file is no image, is damaged or a link, has another size or mode than the first, or lies in more or fewer
        folders than others; the message names the file. If all images would take more than 4 GiB; the environment
        variable FEDSTAT_MAX_BYTES sets another limit. If there is only one class.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from PIL import Image
    >>> with TemporaryDirectory() as place:
    ...     for name in ("cat", "dog"):
    ...         (Path(place) / name).mkdir()
    ...         Image.new("RGB", (5, 4)).save(Path(place) / name / "a.png")
    ...     data = from_folder(place)
    >>> data.x.shape, data.y.attrs["names"]
    ((2, 3, 4, 5), ['cat', 'dog'])
    """
    root = Path(path).expanduser()
    if mode is not None:
        check.choice("mode", mode, list(MODES))
    shape = _check_size(size)
    if not (status := guard.status(root)) or not root.is_dir():
        raise FileNotFoundError(f"{root} must be a folder of images, but {'is none' if status else 'does not exist'}.")
    note(root)
    files = list(_list_files(root, ()))
    if not files:
        raise FileNotFoundError(f"{root} must hold images ({', '.join(_ENDINGS)}) as {_LEVELS}, but holds none.")
    has_split = {parts[0] for parts in files} <= set(SUBSETS)
    levels = len(files[0]) - 1 - has_split
    other = {parts[0] for parts in files if parts[0].lower() in _SUBSET_NAMES}
    if other and not has_split:
        raise ValueError(
            f"folders of subsets in {root} must be named {', '.join(SUBSETS)}, but there is {few(sorted(other))}. "
            "Rename it, or pass a folder in it."
        )
    for parts in files:
        if len(parts) != len(files[0]) or levels not in (1, 2):
            raise ValueError(
                f"images in {root} must lie as {_LEVELS}, but there {_join(files[0], parts)}. Move them, or pass a "
                "folder in it."
            )
    with many():
        x = _decode_images([root.joinpath(*parts) for parts in files], root, shape, mode)
    columns = np.array([parts[has_split:-1] for parts in files])
    return build_samples(
        str(root),
        x,
        columns[:, -1],
        client=columns[:, 0] if levels == 2 else None,
        split=[parts[0] for parts in files] if has_split else None,
    )


def _join(first: tuple[str, ...], other: tuple[str, ...]) -> str:
    paths = dict.fromkeys(("/".join(first), "/".join(other)))
    return f"{'are' if len(paths) > 1 else 'is'} {' and '.join(paths)}"


def _check_size(size: int | Size | None) -> Size | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2:
        raise ValueError(f"size must be a number, or rows and columns, but got {size!r:.200}")
    rows, columns = (check.integer("size", n) for n in pair)
    return rows, columns


def _list_files(folder: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Iterate over the images in a folder, sorted by path; raise ValueError for links and other files."""
    with os.scandir(folder) as entries:
        visible = sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    for entry in visible:
        if entry.is_symlink():
            raise ValueError(
                f"{entry.path} is not a regular file but a link, which is not followed. Put "
                "the file or folder itself there."
            )
        if entry.is_dir():
            yield from _list_files(Path(entry.path), (*parts, entry.name))
        elif entry.name.lower().endswith(_ENDINGS):
            yield (*parts, entry.name)
        else:
            raise ValueError(f"{entry.path} must be an image ({', '.join(_ENDINGS)}). Move it out of the folder.")


def _decode_images(files: list[Path], root: Path, size: Size | None, mode: str | None) -> np.ndarray:
    """Decode images of one size and mode, by default the size and the mode of the first image."""
    first_mode, first_size = read_head(files[0])
    shape = size or first_size
    channels = MODES.get(mode or first_mode, 1)
    guard.size(root, len(files) * channels * shape[0] * shape[1], f"its {len(files):,} images")
    x = np.empty((len(files), channels, *shape), dtype=np.uint8)
    for pixels, path in zip(x, files, strict=True):
        actual_mode, actual_size = read_head(path)
        if actual_mode.startswith(("I", "F")):
            raise ValueError(
                f"{path} must have 8 bits per channel, but has Pillow's mode {actual_mode}. Convert it first."
            )
        if mode is None and (actual_mode not in MODES or actual_mode != first_mode):
            wanted = f"{first_mode}, as {files[0]} has" if first_mode in MODES else f"one of {', '.join(MODES)}"
            raise ValueError(
                f"{path} must have the mode {wanted}, but has {actual_mode}. Convert all images by mode='RGB' or 'L'."
            )
        if size is None and actual_size != first_size:
            raise ValueError(
                f"{path} must have {shape[0]} × {shape[1]} pixels, as {files[0]} has, but has {actual_size[0]} × "
                f"{actual_size[1]}. Interpolate all images by size=(rows, columns)."
            )
        pixels[...] = decode(path, mode or first_mode, shape, resize=size is not None)
    return x
