"""Files of published data sets: folder, damage, decompression, and a data set stored as a folder of arrays."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from stat import S_ISDIR
from typing import Any, BinaryIO, Generic, Literal, NamedTuple, ParamSpec, TypeVar, cast

import numpy as np

from fedstat._utils import check, guard, labels
from fedstat._utils.lazy import xr

_INDEX = "dataset.json"
_AGAIN = "Make the folder again with save_folder."


def save_folder(data: xr.Dataset, path: str | os.PathLike[str]) -> Path:
    """Write a data set to a new folder, one .npy file per variable; ``open_folder`` maps it.

    Use it for data sets that exceed the memory or take long to decode (Tiny-ImageNet's JPEG files, windows of text).

    Parameters
    ----------
    data : xarray.Dataset
        As ``load`` or a partition returns it.
    path : path
        Folder to create. Its parent must exist.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    FileExistsError
        If the folder exists.
    ValueError
        If the name of a variable is not a plain file name, two names are equal as text, or a value is missing.
    """
    folder = Path(path)
    names = [str(key) for key in data.variables]
    for text in names:
        _require_plain_name(text, "the data set")
        if names.count(text) > 1:
            raise ValueError(f"names of variables must differ as text, but two are {text!r}. Rename one.")
    folder.mkdir()
    index = {}
    for name, variable in data.variables.items():
        values = variable.values
        levels: list[str] | None = None
        if values.dtype == object:
            # str would turn a missing value into the text "nan".
            labels.complete(str(name), np.atleast_1d(values), str(next(iter(variable.dims), "data set")))
            unique, values = np.unique(values, return_inverse=True)
            levels = [str(u) for u in unique]
        with guard.written(folder / f"{name}.npy"):
            np.save(folder / f"{name}.npy", values)
        index[str(name)] = {
            "dims": variable.dims,
            "attrs": variable.attrs,
            "levels": levels,
            "coord": name in data.coords,
        }
    with guard.written(folder / _INDEX):
        (folder / _INDEX).write_text(json.dumps({"variables": index, "attrs": data.attrs}, indent=1))
    return folder


def open_folder(path: str | os.PathLike[str]) -> xr.Dataset:
    """Open a folder of ``save_folder``; arrays are read on access, and changes to them are not written.

    Parameters
    ----------
    path : path
        Folder that ``save_folder`` wrote.

    Returns
    -------
    xarray.Dataset
        The data set that ``save_folder`` took.

    Raises
    ------
    FileNotFoundError
        If the folder or a file in it is missing.
    ValueError
        If a file is damaged, or lies outside the folder; the message names the file.

    Examples
    --------
    >>> from tempfile import TemporaryDirectory
    >>> from fedstat.data import load
    >>> with TemporaryDirectory() as place:
    ...     bool(open_folder(save_folder(load("digits"), Path(place) / "digits")).equals(load("digits")))
    True
    """
    folder = Path(path)
    if not guard.status(folder / _INDEX):
        raise FileNotFoundError(f"{folder} must be a folder that save_folder wrote, but has no {_INDEX}")
    index = folder / _INDEX
    with guard.wrap_errors(index, _AGAIN):
        content = guard.parsed(index, guard.content(index, share=guard.HEAD))
        entries = {name: (tuple(e["dims"]), e["attrs"], e["levels"], e["coord"]) for name, e in _get_variables(content)}
        data = xr.Dataset(attrs=content["attrs"])
    for name, (dims, attrs, levels, coord) in entries.items():
        _require_plain_name(name, index)
        file = guard.regular(guard.inside(folder, f"{name}.npy", index))
        with guard.wrap_errors(file, _AGAIN):
            values = np.load(file, mmap_mode="c", allow_pickle=False)
            data[name] = (dims, values if levels is None else _decode_names(values, levels, file), attrs)
        if coord:
            data = data.set_coords(name)
    return data


def _get_variables(content: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    for name, entry in content["variables"].items():
        if missing := [key for key in ("dims", "attrs", "levels", "coord") if key not in entry]:
            raise ValueError(f"variable {name!r:.100} has no {missing[0]}")
        yield name, entry


def _decode_names(codes: np.ndarray, levels: list[str], file: Path) -> np.ndarray:
    if codes.dtype.kind not in "iu" or codes.min(initial=0) < 0 or codes.max(initial=-1) >= len(levels):
        raise ValueError(f"its codes must be integers from 0 to {len(levels) - 1}, but got others ({codes.dtype})")
    guard.size(file, 8 * codes.size, "the names of its codes")
    return np.array(levels, dtype=object)[codes]


def _require_plain_name(name: str, owner: object) -> None:
    """Raise ValueError unless ``name`` is the name of a file in the folder."""
    if name != Path(name).name or name in ("", "..") or {"/", "\\", "\0"} & set(name):
        raise ValueError(
            f"{owner} has a variable {name!r:.200}, which is not a plain name: its file would lie outside the folder. "
            "Rename it."
        )


Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
CHUNK = 1 << 20
_MOST_INFLATION = 1032  # largest number of bytes that one byte of deflate expands to
SAMPLE = 64
"""Least number of bytes of a sample without x (class, split and user), or of a word of the vocabulary."""


class Remote(NamedTuple):
    """File of a data set on the web.

    Attributes
    ----------
    path : str
        Its place in the data folder.
    size : int
        Number of bytes.
    digest : str
        Published digest, such as "sha256:8d42..." or "md5:7957...".
    urls : tuple of str
        Addresses, in the order in which they are tried.
    unpack : mapping from str to str
        Of an archive: first characters of the names of members to unpack, and what replaces them in the data folder.
    """

    path: str
    size: int
    digest: str
    urls: tuple[str, ...]
    unpack: Mapping[str, str] = {}


class Source(NamedTuple):
    """Published data set.

    Attributes
    ----------
    title : str
    home : str
        Address of the page that describes it.
    rows : mapping from split to int
        Published numbers of rows.
    places : tuple of str
        Folders in the data folder that may hold its files.
    files : tuple of tuple of str
        Files and folders that its loader reads, each with its possible names; empty for a data set without files.
    classes : int
        Number of classes.
    remote : tuple of Remote
        Files to download.
    after : str
        What the user runs after the download, if the loader cannot read the files as they are.
    """

    title: str
    home: str
    rows: Mapping[str, int]
    places: tuple[str, ...] = ()
    files: tuple[tuple[str, ...], ...] = ()
    classes: int = 0
    remote: tuple[Remote, ...] = ()
    after: str = ""

    @property
    def first(self) -> tuple[str, ...]:
        """Possible names of the first file to read."""
        return self.files[0] if self.files else ()


class Part(NamedTuple):
    """Samples of one subset: x (sample, ...), y (sample,), and further coordinates of the samples."""

    x: np.ndarray
    y: np.ndarray
    extra: Mapping[str, np.ndarray] = {}


def folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the data folder: ``data_dir``, else FEDSTAT_DATA of the environment, else ``fedstat_data`` at home."""
    return Path(data_dir or os.environ.get("FEDSTAT_DATA") or Path.home() / "fedstat_data").expanduser()


def find(root: Path, names: Sequence[str], source: Source, places: Sequence[str] | None = None) -> Path:
    """Return the first of ``names`` (files or folders) in ``places`` under ``root``; by default, places of the source.

    Raises
    ------
    FileNotFoundError
        If there is none; names the files and the folders searched.
    """
    places = source.places if places is None else places
    if path := find_first(root, places, names):
        return note(path)
    raise FileNotFoundError(
        f"{source.title} needs {' or '.join(names)}, not found in {', '.join(str(root / place) for place in places)}. "
        "Set data_dir or the environment variable FEDSTAT_DATA to the folder of its files"
    )


def locate(root: Path, source: Source) -> Path | None:
    """Return the path of the data set's first file, or None if there is none, without reading it."""
    return find_first(root, source.places, source.first)


def find_first(root: Path, places: Sequence[str], names: Sequence[str]) -> Path | None:
    """Return the first of ``names`` in ``places`` under ``root``, or None if there is none."""
    paths = (root / place / name for place in places for name in names)
    return next((path for path in paths if guard.status(path)), None)


P = ParamSpec("P")
R = TypeVar("R")
_watched_files: ContextVar[dict[Path, Any] | None] = ContextVar("_watched_files", default=None)


class Remembered(Generic[P, R]):
    """Cache of a function's latest results, each valid until a file that it read changes.

    Parameters
    ----------
    function : callable
        Passes the files that it reads to :func:`note`; its arguments are hashable.
    size : int
        Number of results in the cache.
    """

    def __init__(self, function: Callable[P, R], size: int = 1) -> None:
        self._function, self._size = function, size
        self._results: dict[Any, tuple[R, dict[Path, Any]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, *sorted(kwargs.items()))
        entry = self._results.pop(key, None)
        if entry is None or any(_stamp(path) != stamp for path, stamp in entry[1].items()):
            files: dict[Path, Any] = {}
            token = _watched_files.set(files)
            try:
                entry = self._function(*args, **kwargs), files
            finally:
                _watched_files.reset(token)
        self._results[key] = entry
        for oldest in [*self._results][: -self._size]:
            self._results.pop(oldest, None)
        if (outer := _watched_files.get()) is not None:
            outer |= entry[1]
        return entry[0]

    def forget(self) -> None:
        """Delete all results."""
        self._results.clear()


def note(path: Path) -> Path:
    """Return the path of a file or folder to read; :class:`Remembered` watches it for changes."""
    if (files := _watched_files.get()) is not None:
        files[path] = _stamp(path)
    return path


def _stamp(path: str | Path) -> Any:
    """Return the identity, size and times of a file, and of the files in a folder; rewriting a file changes them."""
    try:
        status = os.stat(path)  # noqa: PTH116 a folder may hold 100,000 images
        children = {child.name: _stamp(child.path) for child in os.scandir(path)} if S_ISDIR(status.st_mode) else None
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, children


def error_at(path: Path, offset: int | str, what: str) -> ValueError:
    """Return the ValueError for a file that violates its format at a byte (or line)."""
    return ValueError(f"{path} is damaged at {offset if isinstance(offset, str) else f'byte {offset}'}: {what}")


@contextmanager
def open_unzipped(path: Path) -> Iterator[BinaryIO]:
    """Open a file; unzip it if its first bytes, not its name, say that it is gzip."""
    with guard.opened(path) as stream:
        if not is_gzip(path):
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as content:
                yield cast(BinaryIO, content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise error_at(path, stream.tell(), f"{error}. Download it again.") from error


def is_gzip(path: Path) -> bool:
    """Return True if a file is gzip."""
    with guard.opened(path) as stream:
        return stream.read(2) == b"\x1f\x8b"


def read(path: Path) -> bytes:
    """Return the bytes of a file, unzipped; count them first if a gzip file may exceed the limit."""
    if is_gzip(path) and path.stat().st_size * _MOST_INFLATION > guard.limit():
        total = 0
        with open_unzipped(path) as stream:
            while n := len(stream.read(CHUNK)):
                total = guard.size(path, total + n, "its unzipped content, counted so far,")
    with open_unzipped(path) as stream:
        return stream.read()


def check_rows(source: Source, split: str, rows: int, path: Path) -> None:
    """Warn if a subset does not have the published number of rows; raise ValueError if it has none.

    ``path`` is the folder of the subset, for the message.
    """
    if rows == 0:
        raise ValueError(
            f"{source.title}: the {split} subset in {path} has no rows. Download its files again from {source.home}."
        )
    guard.size(path, rows * SAMPLE, f"the labels of {rows:,} samples ({split})")
    n_published = source.rows.get(split, rows)
    if rows != n_published:
        check.warn(f"{source.title}: the {split} subset has {rows:,} rows, but {n_published:,} were published")


def list_splits(split: str | None) -> tuple[Split, ...]:
    """Return the subsets to read: ``split``, or both if it is None."""
    return SPLITS if split is None else (split,)  # type: ignore[return-value]


def join_parts(parts: Mapping[Split, Part], source: Source, dims: tuple[str, ...], path: Path) -> xr.Dataset:
    """Join the subsets that were read from the folder ``path`` into one sample-major data set, in their order."""
    for split, part in parts.items():
        check_rows(source, split, len(part.y), path)
    x = [p.x for p in parts.values()]
    y = np.concatenate([p.y for p in parts.values()])
    data = build_dataset(x[0] if len(x) == 1 else np.concatenate(x), y, name_splits(parts), source, dims)
    for name in next(iter(parts.values())).extra:
        data.coords[name] = ("sample", np.concatenate([p.extra[name] for p in parts.values()]))
    return data


def name_splits(parts: Mapping[Split, Part]) -> np.ndarray:
    """Return the name of the subset for every sample, as objects, which zarr stores without a warning."""
    return np.concatenate([np.full(len(p.y), split, dtype=object) for split, p in parts.items()])


def build_dataset(x: np.ndarray, y: np.ndarray, split: np.ndarray, source: Source, dims: tuple[str, ...]) -> xr.Dataset:
    """Build a data set with x (sample, *dims), y (sample) int64 and the coordinate split (sample)."""
    return xr.Dataset(
        {"x": (("sample", *dims), x), "y": ("sample", y.astype(np.int64))},
        coords={"split": ("sample", split)},
        attrs={"title": source.title, "source": source.home},
    )
