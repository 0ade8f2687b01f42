"""Download of published data sets: continued after an interruption, and compared with the published digest."""

from __future__ import annotations

import contextlib
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from fedstat._utils import check, guard
from fedstat._utils.loops import Bar, progress_bar
from fedstat.data._files import CHUNK, Remote, Source, find_first

TRIES = 5
"""Connections to one address after which the download ends if the last ones brought no bytes."""
PATIENCE = 60.0
"""Seconds to wait for the next bytes."""
WAIT = 1.0
"""Seconds before another connection; after each one that brought no bytes, a second more."""
_BLOCK = 1 << 16
"""Bytes written at a time; an interruption loses at most as many."""
_MB = 10**6
_ROOM = 3
"""Bytes on the disk for each byte of an archive: itself and its unpacked files, which fill whole blocks."""


def list_present(source: Source, root: Path) -> list[bool]:
    """Return for each file that the loader reads if it is in the data folder."""
    return [find_first(root, source.places, names) is not None for names in source.files]


def fetch(source: Source, root: Path, *, overwrite: bool = False, progress: bool | None = None) -> list[Path]:
    """Download the files of a data set that are missing, and unpack archives.

    Parameters
    ----------
    source : Source
    root : Path
        Data folder; it is created.
    overwrite : bool
        If True, download files again that exist but lack the published digest, and unpack archives again.
    progress : bool, optional
        Show the progress, see ``progress_bar``.

    Returns
    -------
    list of Path
        Files and folders that are new; empty if the data set is complete.

    Raises
    ------
    ValueError
        If Pooch is not installed, the disk is too full, a file exists with another digest, or a downloaded file has
        another digest than published.
    ConnectionError
        If no address can be reached or the download is cut; its bytes are kept, and the next call continues.
    """
    if not overwrite and all(list_present(source, root)):
        return []
    missing = [remote for remote in source.remote if overwrite or not _is_present(remote, source, root)]
    pooch = _require_pooch()
    _require_room(root, missing)
    paths = []
    for remote in missing:
        file = root / remote.path
        file.parent.mkdir(parents=True, exist_ok=True)
        with _lock(file), _quiet(pooch):
            _download(pooch, remote, file, source, overwrite, progress)
            paths += _unpack(remote, file, root, overwrite) if remote.unpack else [file]
    for names in source.files:  # a file in another place or spelling may come first
        path_read = find_first(root, source.places, names)
        if overwrite and path_read and not any(path == path_read or path in path_read.parents for path in paths):
            check.warn(f"{path_read} is read instead of the downloaded file. Remove it.")
    return paths


def _is_present(remote: Remote, source: Source, root: Path) -> bool:
    """Return True if a file is in the data folder, maybe in another place or spelling."""
    name = Path(remote.path).name
    if groups := [names for names in source.files if name in names]:
        return find_first(root, source.places, groups[0]) is not None
    if remote.unpack:
        return bool(source.after) and all(guard.status(root / place) for place in remote.unpack.values())
    return guard.status(root / remote.path) is not None


def _require_pooch() -> Any:
    try:
        import pooch
    except ImportError as error:
        raise ValueError(
            f"Downloads need Pooch, which is not installed ({error}): pip install 'fedstat[data]', or in a clone of "
            "the repository pip install -c constraints.txt -e '.[data]'"
        ) from None
    return pooch


@contextlib.contextmanager
def _quiet(pooch: Any) -> Iterator[None]:
    """Have Pooch write nothing; fedstat reports what is downloaded."""
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("WARNING")
    try:
        yield
    finally:
        logger.setLevel(level)


def _require_room(root: Path, missing: list[Remote]) -> None:
    if root.exists() and not root.is_dir():
        raise ValueError(f"the data folder must be a folder, but {root} is a file. Choose another by data_dir.")
    root.mkdir(parents=True, exist_ok=True)
    needed = sum(remote.size * (_ROOM if remote.unpack else 1) for remote in missing)
    if (free := shutil.disk_usage(root).free) < needed:
        raise ValueError(
            f"{root} must have {needed / _MB:,.0f} MB of free disk space, but has {free / _MB:,.0f} MB. Free some, or "
            "choose another folder by data_dir."
        )


@contextlib.contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Prevent other processes from downloading the file at the same time."""
    path = _part_of(file).with_suffix(".lock")
    try:
        with FileLock(path, blocking=False):
            try:
                yield
            finally:
                path.unlink()
    except Timeout:
        raise BlockingIOError(f"{file} is being downloaded by another process. Wait until that process ends.") from None


def _part_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")


def _download(pooch: Any, remote: Remote, file: Path, source: Source, overwrite: bool, progress: bool | None) -> None:
    """Download a file from the first of its addresses that serves it; a file with the digest stays as it is."""
    if file.exists():
        if (actual := _digest(pooch, file, remote)) == remote.digest:
            return
        if not overwrite:
            raise ValueError(
                f"{file} must have the published digest {remote.digest}, but has {actual}. Remove it to download it "
                "again."
            )
    errors: list[Exception] = []
    total = max(1, remote.size // _MB)
    shown = progress_bar(total, "megabyte", progress if remote.size else False, label=file.name)
    with shown as bar, _draft(file) as draft:
        for url in remote.urls:
            receiver = _Receiver(pooch, remote, file, bar)
            try:
                path = pooch.retrieve(url, remote.digest, file.name, draft, downloader=receiver)
                Path(path).replace(file)
                return
            except (ConnectionError, ValueError) as error:
                errors.append(error)
    if len(errors) == 1 and isinstance(errors[0], ValueError):
        raise errors[0]
    hint = f"Or download {file.name} by hand from {source.home} to {file}"
    raise ConnectionError(f"{'. '.join(str(error).removesuffix('.') for error in errors)}. {hint}")


@contextlib.contextmanager
def _draft(file: Path) -> Iterator[Path]:
    """Make an empty folder beside a file, and remove it; one that a killed process left is emptied."""
    draft = file.with_name(f".{file.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest(pooch: Any, file: Path, remote: Remote) -> str:
    kind = remote.digest.partition(":")[0]
    return f"{kind}:{pooch.file_hash(str(file), alg=kind)}"


class _Receiver:
    """Downloader for Pooch that continues a .part file by an HTTP range, and leaves it after an interruption."""

    def __init__(self, pooch: Any, remote: Remote, file: Path, bar: Bar) -> None:
        self._pooch, self._remote, self._file, self._part, self._bar = pooch, remote, file, _part_of(file), bar
        self._shown = 0

    def __call__(self, url: str, output_file: str, pooch: Any) -> None:  # noqa: ARG002 - the signature of Pooch
        """Download ``url`` to ``output_file``."""
        import requests

        if not url.startswith(("https://", "http://")):
            raise ValueError(f"an address must start with https:// or http://, but got {url!r:.200}")
        best, failures = -1, 0
        while (problem := self._try(requests, url)) is not None:
            n_bytes = self._size()
            best, failures = (n_bytes, 0) if n_bytes > best else (best, failures + 1)
            if failures == TRIES - 1:
                hint = f"; {n_bytes:,} bytes are kept in {self._part}: the same call continues" if n_bytes else ""
                raise ConnectionError(f"{url} could not be downloaded in {TRIES} attempts: {problem}{hint}")
            time.sleep(WAIT * failures)
        if (actual := _digest(self._pooch, self._part, self._remote)) != self._remote.digest:
            self._part.unlink()
            raise ValueError(
                f"{url} must have the published digest {self._remote.digest}, but has {actual}. The download was "
                "deleted. Try again; if the digest is the same again, the file or its address has changed."
            )
        self._part.replace(output_file)

    def _try(self, requests: Any, url: str) -> str | None:
        """Continue the download by one connection; return what interrupted it, or None if it is complete."""
        try:
            return None if self._receive(requests, url) else "the connection was cut"
        except requests.RequestException as error:
            is_late = isinstance(error, requests.Timeout) or "timed out" in str(error)
            return f"no bytes arrived for {PATIENCE:g} seconds" if is_late else guard.reason(error)

    def _size(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _receive(self, requests: Any, url: str) -> bool:
        """Append the bytes of one connection to the .part file; return True if it is complete."""
        start, size = self._size(), self._remote.size
        if size and start >= size:
            return True  # the digest decides
        headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={start}-"} if start else {})}
        with requests.get(url, headers=headers, stream=True, timeout=PATIENCE) as response:
            if response.status_code == requests.codes.requested_range_not_satisfiable:
                self._part.unlink()
                return False
            if not response.ok:
                raise ConnectionError(f"{url} answers with HTTP status {response.status_code} ({response.reason})")
            offered = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            start = start if response.status_code == requests.codes.partial and offered else 0
            length = int(response.headers.get("Content-Length") or 0)
            if size and length and start + length != size:
                raise ValueError(
                    f"{url} must have {size:,} bytes, as published, but the server offers {start + length:,}. The file "
                    "or its address has changed: do not use it."
                )
            done = self._write(response, start, size)
        return done == (size or start + length or done)

    def _write(self, response: Any, start: int, size: int) -> int:
        """Append blocks to the .part file; return the number of its bytes, at most one block above ``size``."""
        done = start
        with guard.written(self._part), self._part.open("ab" if start else "wb") as file:
            self._show(done)
            for block in response.iter_content(_BLOCK):
                file.write(block)
                done += len(block)
                self._show(done)
                if size and done > size:
                    break
        return done

    def _show(self, done: int) -> None:
        self._bar.update(done // _MB - self._shown)
        self._shown = done // _MB


def _unpack(remote: Remote, archive: Path, root: Path, overwrite: bool) -> list[Path]:
    """Unpack the members of an archive to the data folder, each file in one step, and delete the archive."""
    with _draft(archive) as draft:
        for name, content in _members(archive):
            for prefix, place in remote.unpack.items():
                if name.startswith(prefix):
                    target = guard.inside(draft, f"{place}{name.removeprefix(prefix)}", archive)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with guard.written(target), target.open("wb") as file:
                        shutil.copyfileobj(content, file, CHUNK)
        for place in remote.unpack.values():
            _move(draft / place, root / place, overwrite)
    archive.unlink()
    return [root / place for place in remote.unpack.values()]


def _move(source: Path, target: Path, overwrite: bool) -> None:
    """Move a file, or a folder file by file, to its place; files that exist stay unless ``overwrite`` is True."""
    if source.is_dir() and target.is_dir():
        for child in source.iterdir():
            _move(child, target / child.name, overwrite)
    elif overwrite or not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        source.replace(target)


def _members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Iterate over names and contents of the regular files in a zip or tar archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    with zipped.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and (part := tar.extractfile(member)) is not None:
                yield member.name, part
