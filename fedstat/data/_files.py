"""Files of published data sets: folder, checksums, decompression, and a data set kept as a folder of arrays."""

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
    """Write a data set to a new folder, one .npy file for each variable; ``open_folder`` maps it.

    For sets that do not fit in memory, or take long to decode (Tiny-ImageNet's JPEG files, windows of text).

    Parameters
    ----------
    data : xarray.Dataset
        As ``load`` or a partition gives it.
    path : path
        Folder to make. Its parent must exist.

    Raises
    ------
    FileExistsError
        If it exists.
    ValueError
        If the name of a variable is not a plain file name, two names are equal as text, or a name is missing.
    """
    folder = Path(path)
    names = [str(key) for key in data.variables]
    for text in names:
        _plain(text, "the data set")
        if names.count(text) > 1:
            raise ValueError(f"every variable needs a name of its own as text, but got {text!r} twice. Rename one.")
    folder.mkdir()
    index = {}
    for name, variable in data.variables.items():
        values = variable.values
        levels: list[str] | None = None
        if values.dtype == object:
            # The text "nan" would stand for a gap.
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
    """Open what ``save_folder`` wrote; arrays are read from disk as they are used, and writing to them leaves it alone.

    Raises
    ------
    FileNotFoundError
        If the folder or a file in it is missing.
    ValueError
        If a file is damaged, or lies outside of the folder; names it.

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
        raise FileNotFoundError(f"{folder} must be a folder that save_folder made, but it has no {_INDEX}")
    index = folder / _INDEX
    with reading(index, _AGAIN):
        content = guard.parsed(index, guard.content(index, share=guard.HEAD))
        entries = {name: (tuple(e["dims"]), e["attrs"], e["levels"], e["coord"]) for name, e in _variables(content)}
        data = xr.Dataset(attrs=content["attrs"])
    for name, (dims, attrs, levels, coord) in entries.items():
        _plain(name, index)
        file = guard.regular(guard.inside(folder, f"{name}.npy", index))
        with reading(file, _AGAIN):
            values = np.load(file, mmap_mode="c", allow_pickle=False)
            data[name] = (dims, values if levels is None else _named(values, levels, file), attrs)
        if coord:
            data = data.set_coords(name)
    return data


def _variables(content: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    for name, entry in content["variables"].items():
        if missing := [key for key in ("dims", "attrs", "levels", "coord") if key not in entry]:
            raise ValueError(f"variable {name!r:.100} has no {missing[0]}")
        yield name, entry


def _named(codes: np.ndarray, levels: list[str], file: Path) -> np.ndarray:
    if codes.dtype.kind not in "iu" or codes.min(initial=0) < 0 or codes.max(initial=-1) >= len(levels):
        raise ValueError(f"its codes must be 0 to {len(levels) - 1}, but got {codes.dtype} outside of them")
    guard.size(file, 8 * codes.size, "the names it stands for")
    return np.array(levels, dtype=object)[codes]


def _plain(name: str, where: object) -> None:
    """Raise ValueError if ``name`` is not the name of one file in the folder."""
    if name != Path(name).name or name in ("", "..") or {"/", "\\", "\0"} & set(name):
        raise ValueError(
            f"{where} has a variable {name!r:.200}, which is not a plain name: its file would lie outside the folder. "
            "Rename it."
        )


Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = ("train", "test")
CHUNK = 1 << 20
_MOST_INFLATION = 1032  # the most bytes that one byte of deflate can stand for
SAMPLE = 64
"""Bytes that a sample takes beside x, at least: class, split and user; or a word of the vocabulary."""


class Source(NamedTuple):
    """A published data set.

    Attributes
    ----------
    title : str
    home : str
        Where to download its files.
    rows : mapping from split to int
        Published numbers of rows.
    places : tuple of str
        Folders below the folder of data where its files may lie.
    first : tuple of str
        Names that the first file to be read may have; empty for a data set without files.
    """

    title: str
    home: str
    rows: Mapping[str, int]
    places: tuple[str, ...] = ()
    first: tuple[str, ...] = ()


class Part(NamedTuple):
    """Samples of one split: x (sample, ...), y (sample,), and further coordinates of the samples."""

    x: np.ndarray
    y: np.ndarray
    extra: Mapping[str, np.ndarray] = {}


def folder(data_dir: str | os.PathLike[str] | None) -> Path:
    """Folder of data: the argument, else the environment's FEDSTAT_DATA, else ``fedstat_data`` at home."""
    return Path(data_dir or os.environ.get("FEDSTAT_DATA") or Path.home() / "fedstat_data").expanduser()


def find(root: Path, names: Sequence[str], source: Source, places: Sequence[str] | None = None) -> Path:
    """Return the first of ``names`` (files or folders) in one of the source's places, or those given, under ``root``.

    Raises
    ------
    FileNotFoundError
        Names what was looked for, where, and where to download the data set.
    """
    places = source.places if places is None else places
    if path := _first(root, places, names):
        return note(path)
    raise FileNotFoundError(
        f"{source.title} needs {' or '.join(names)}, looked for in {', '.join(str(root / place) for place in places)}, "
        f"but there is none. Download it from {source.home}, and name its folder by data_dir or the environment "
        "variable FEDSTAT_DATA."
    )


def located(root: Path, source: Source) -> Path | None:
    """Return the path of the data set's first file, or None if there is none; nothing is read."""
    return _first(root, source.places, source.first)


def _first(root: Path, places: Sequence[str], names: Sequence[str]) -> Path | None:
    paths = (root / place / name for place in places for name in names)
    return next((path for path in paths if guard.status(path)), None)


P = ParamSpec("P")
R = TypeVar("R")
_noted: ContextVar[dict[Path, Any] | None] = ContextVar("_noted", default=None)


class Remembered(Generic[P, R]):
    """A function whose latest results are kept until a file that it read changes.

    Parameters
    ----------
    function : callable
        Its files are those of :func:`note`; its arguments are hashable.
    size : int
        Number of results that are kept.
    """

    def __init__(self, function: Callable[P, R], size: int = 1) -> None:
        self._function, self._size = function, size
        self._kept: dict[Any, tuple[R, dict[Path, Any]]] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, *sorted(kwargs.items()))
        held = self._kept.pop(key, None)
        if held is None or any(_stamp(path) != stamp for path, stamp in held[1].items()):
            files: dict[Path, Any] = {}
            before = _noted.set(files)
            try:
                held = self._function(*args, **kwargs), files
            finally:
                _noted.reset(before)
        self._kept[key] = held
        for oldest in [*self._kept][: -self._size]:
            self._kept.pop(oldest, None)
        if (outer := _noted.get()) is not None:
            outer |= held[1]
        return held[0]

    def forget(self) -> None:
        """Delete all results."""
        self._kept.clear()


def note(path: Path) -> Path:
    """Return the path of a file or folder that is about to be read, for :class:`Remembered` to watch it."""
    if (noted := _noted.get()) is not None:
        noted[path] = _stamp(path)
    return path


def _stamp(path: str | Path) -> Any:
    """Return the identity, size and times of a file, and of the files in a folder; they change with a new writing."""
    try:
        found = os.stat(path)  # noqa: PTH116 a folder may hold 100,000 images
        inside = {one.name: _stamp(one.path) for one in os.scandir(path)} if S_ISDIR(found.st_mode) else None
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, inside


def damaged(path: Path, offset: int | str, what: str) -> ValueError:
    """Error for a file whose content is not what its format says, at a byte (or line) of the file."""
    return ValueError(f"{path} is damaged at {offset if isinstance(offset, str) else f'byte {offset}'}: {what}")


@contextmanager
def reading(path: Path, advice: str = "Download it again.", stream: BinaryIO | None = None) -> Iterator[None]:
    """Turn whatever a parser raises on malformed bytes into one ValueError naming the file and the stream's byte."""
    try:
        yield
    except guard.LimitError:
        raise
    except MemoryError as error:
        raise ValueError(f"{path} takes more memory than this process can get. Free some, or read a part.") from error
    except Exception as error:  # parsers raise many kinds on damaged bytes, and most are not documented
        what = f"{guard.reason(error)}. {advice}"
        if stream is not None:
            raise damaged(path, stream.tell(), what) from error
        raise ValueError(f"{path} is damaged: {what}") from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Stream of a file's bytes, unzipped if it is gzip by its first bytes, whatever its name."""
    with guard.opened(path) as stream:
        if not zipped(path):
            yield stream
            return
        try:
            with gzip.GzipFile(fileobj=stream) as content:
                yield cast(BinaryIO, content)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise damaged(path, stream.tell(), f"{error}. Download it again.") from error


def zipped(path: Path) -> bool:
    """Whether a file is gzip."""
    with guard.opened(path) as stream:
        return stream.read(2) == b"\x1f\x8b"


def read(path: Path) -> bytes:
    """Bytes of a file, unzipped; those of a gzip file that may pass the limit are counted before any is kept."""
    if zipped(path) and path.stat().st_size * _MOST_INFLATION > guard.limit():
        total = 0
        with opened(path) as stream:
            while more := len(stream.read(CHUNK)):
                total = guard.size(path, total + more, "its unzipped content, counted so far,")
    with opened(path) as stream:
        return stream.read()


def check_rows(source: Source, split: str, rows: int, where: Path) -> None:
    """Warn where a split does not have the published number of rows; raise ValueError where it has none.

    ``where`` is its folder, for the message.
    """
    if rows == 0:
        raise ValueError(
            f"{source.title}: the {split} split in {where} has no rows. Download its files again from {source.home}."
        )
    guard.size(where, rows * SAMPLE, f"the labels of {rows:,} samples ({split})")
    published = source.rows.get(split, rows)
    if rows != published:
        check.warn(f"{source.title}: the {split} split has {rows:,} rows, but {published:,} were published")


def wanted(split: str | None) -> tuple[Split, ...]:
    """The splits to read: both for None."""
    return SPLITS if split is None else (split,)  # type: ignore[return-value]


def joined(parts: Mapping[Split, Part], source: Source, dims: tuple[str, ...], where: Path) -> xr.Dataset:
    """One sample-major data set out of the splits that were read from a folder, in their order."""
    for split, part in parts.items():
        check_rows(source, split, len(part.y), where)
    x = [p.x for p in parts.values()]
    y = np.concatenate([p.y for p in parts.values()])
    data = dataset(x[0] if len(x) == 1 else np.concatenate(x), y, parts_split(parts), source, dims)
    for name in next(iter(parts.values())).extra:
        data.coords[name] = ("sample", np.concatenate([p.extra[name] for p in parts.values()]))
    return data


def parts_split(parts: Mapping[Split, Part]) -> np.ndarray:
    """Name of the split for every sample, as object strings (what zarr stores without a warning)."""
    return np.concatenate([np.full(len(p.y), split, dtype=object) for split, p in parts.items()])


def dataset(x: np.ndarray, y: np.ndarray, split: np.ndarray, source: Source, dims: tuple[str, ...]) -> xr.Dataset:
    """Data set with x (sample, *dims), y (sample) int64 and the coordinate split (sample)."""
    return xr.Dataset(
        {"x": (("sample", *dims), x), "y": ("sample", y.astype(np.int64))},
        coords={"split": ("sample", split)},
        attrs={"title": source.title, "source": source.home},
    )
