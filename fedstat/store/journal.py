"""Journal of a store: commits that survive interruptions, with a checksum of every file.

The folder ``journal`` of a store holds the file ``log``, with one line per commit. A line names the files of the
commit, each with its size, its CRC-32 and the name under which it was staged. A commit has three steps:

1. It syncs the staged files to the disk.
2. It adds its line to the log and syncs the log.
3. It renames the files to their places.

After any interruption, every file that the log names is on the disk, in its place or still staged. A file that the log
does not name counts as never written.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from filelock import FileLock, Timeout

from fedstat._utils import guard

FOLDER = "journal"
FIRST = "0"
"""Staged name of the files that a new store holds."""
METADATA = "zarr.json"
"""File that describes a group or an array."""
_BLOCK = 1 << 22
# A longer log is rewritten as one line for all files.
_LINES = 1000
_LOG = 32  # fraction of the limit that the log may take
_HINT = "Read what is sound with fedstat.open_run(path, verify=False)."
_INFLATION = 1032  # a sparse file may have this many times the bytes that it takes on the disk


class Entry(NamedTuple):
    """Entry of the log for one file: its size in bytes, its CRC-32, and the name under which it was staged."""

    size: int
    crc: int
    staged: str


class DamageError(ValueError):
    """Error of a store whose content differs from what was written."""


class Journal:
    """Files of a store, open for writing by this process alone.

    Parameters
    ----------
    root : Path
        The store; its folder ``journal`` exists.
    lock : FileLock, optional
        Lock of the store, if this process holds it already.

    Raises
    ------
    BlockingIOError
        If another process, or another writer in this process, is writing to the store.
    DamageError
        If the log cannot be read.
    """

    def __init__(self, root: Path, *, lock: FileLock | None = None) -> None:
        self.root = root
        self._staged: dict[str, Entry] = {}
        self._logged: set[str] = set()
        self._lines = 0
        self._lock = hold(root) if lock is None else lock
        try:
            self.files, sound = _read(root)
            _require_folders(root, self.files)
            self._names = map(str, itertools.count(1 + max((int(e.staged) for e in self.files.values()), default=0)))
            self._recover()
            if not sound:
                self._rewrite()
        except BaseException:
            self._lock.release()
            raise

    def _recover(self) -> None:
        """Finish an interrupted commit, and delete files that no commit names."""
        for key, entry in self.files.items():
            if self._draft(entry).is_file() and find_problem(self._draft(entry), entry) is None:
                self._place(self._draft(entry), key)
        for path in find_leftovers(self.root):
            if path.name != "lock":
                path.unlink()

    def _place(self, draft: Path, key: str) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.replace(target)

    def path(self, key: str) -> Path:
        """Return the path of a file's newest content, staged or committed."""
        if (entry := self._staged.get(key)) and (draft := self._draft(entry)).exists():
            return draft
        return self.root / key

    def _draft(self, entry: Entry) -> Path:
        return self.root / FOLDER / entry.staged

    def draft(self) -> Path:
        """Return a new path to write content to, before :meth:`adopt`."""
        return self.root / FOLDER / next(self._names)

    @contextmanager
    def stage(self, key: str) -> Iterator[IO[bytes]]:
        """Open a draft of the new content of ``key``; the next commit puts it into its place."""
        draft = self.draft()
        with open_checked(draft) as file:
            yield file  # type: ignore[misc]
        self.adopt(key, draft, file.size, file.crc)

    def adopt(self, key: str, draft: Path, size: int, crc: int) -> None:
        """Stage a draft as the new content of ``key``, for the next commit."""
        old_entry, self._staged[key] = self._staged.get(key), Entry(size, crc, draft.name)
        if old_entry and old_entry.staged not in self._logged:
            self._draft(old_entry).unlink(missing_ok=True)

    def commit(self) -> None:
        """Commit all staged files at once.

        A commit that fails or is interrupted can be repeated: files stay staged until they are in their places.
        """
        entries = {key: entry for key, entry in self._staged.items() if self._draft(entry).exists()}
        if entries:
            for entry in entries.values():
                sync(self._draft(entry))
            sync(self.root / FOLDER)
            self._logged.update(entry.staged for entry in entries.values())
            self._log(entries)
            self.files.update(entries)
            for key, entry in entries.items():
                self._place(self._draft(entry), key)
        self._staged, self._logged = {}, set()
        if self._lines > _LINES:
            self._rewrite()

    def forget(self, keys: Iterable[str]) -> None:
        """Delete files, so that they read as never written."""
        keys = tuple(keys)
        for key in keys:
            self.files.pop(key, None)
            (self.root / key).unlink(missing_ok=True)
        self._log({}, keys)

    def finish(self) -> None:
        """Commit, sync all folders to the disk, and rewrite the log as one line."""
        self.commit()
        for folder in {(self.root / key).parent for key in self.files}:
            sync(folder)
        self._rewrite()

    def close(self) -> None:
        """Release the lock; files that are not committed count as never written."""
        if self._lock.is_locked:
            (self.root / FOLDER / "lock").unlink(missing_ok=True)
            self._lock.release()

    def _log(self, files: dict[str, Entry], without: tuple[str, ...] = ()) -> None:
        log = self.root / FOLDER / "log"
        size = log.stat().st_size if log.exists() else 0
        try:
            with guard.written(log), log.open("ab") as file:
                file.write(_format_commit(files, without))
            sync(log)
        except BaseException:
            os.truncate(log, size)  # else the next line would follow half a line
            raise
        self._lines += 1

    def _rewrite(self) -> None:
        draft = self.root / FOLDER / next(self._names)
        with guard.written(draft):
            draft.write_bytes(_format_commit(self.files))
        sync(draft)
        draft.replace(self.root / FOLDER / "log")
        sync(self.root / FOLDER)
        self._lines = 1


@contextmanager
def open_checked(draft: Path) -> Iterator[Checked]:
    """Open a new file that computes its checksum; delete it if writing fails.

    An OSError of the file replaces the error that its writer makes of it, and names the file.
    """
    output: Checked | None = None
    try:
        with guard.written(draft), draft.open("wb") as file:
            output = Checked(file)
            yield output
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if output and output.failed and error is not output.failed:
            output.failed.filename = str(draft)
            raise output.failed from error
        raise


class Checked:
    """File that counts the bytes written to it and computes their CRC-32."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self.crc = file, 0, 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        block = memoryview(data).cast("B")
        with self._record_error():
            self._file.write(block)
        self.size += len(block)
        self.crc = zlib.crc32(block, self.crc)
        return len(block)

    def flush(self) -> None:
        """Pass buffered bytes to the operating system."""
        with self._record_error():
            self._file.flush()

    @contextmanager
    def _record_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # torch replaces this error by another
            self.failed = error
            raise


def hold(root: Path) -> FileLock:
    """Acquire the lock of a store; a process that ends releases it.

    Raises
    ------
    BlockingIOError
        If another process holds it.
    DamageError
        If the lock is not a regular file.
    """
    path = root / FOLDER / "lock"
    if path.is_symlink() or (guard.status(path) and not path.is_file()):  # opening the lock empties the file
        raise DamageError(f"the run at {root} is damaged: {FOLDER}/lock is not a regular file. Remove it.")
    lock = FileLock(path, blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{root} is being written by another process. Wait until that process ends, or stop it."
        ) from None
    return lock


def start(root: Path) -> None:
    """Write the first log of a new store, with all its files, and sync them to the disk."""
    folder = root / FOLDER
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path != folder / "lock":
            files[path.relative_to(root).as_posix()] = Entry(path.stat().st_size, compute_crc(path), FIRST)
    (folder / "log").write_bytes(_format_commit(files))
    for path in [*root.rglob("*"), root]:
        sync(path)


def find_leftovers(root: Path) -> list[Path]:
    """Return files in the journal that its log does not name: a lock, and files that a killed process staged.

    Folders of the journal are left out: they grow, and the state verifies their files.
    """
    named = {root / FOLDER / "log", *(root / key for key in read_log(root))}
    return [path for path in (root / FOLDER).iterdir() if path not in named and not path.is_dir()]


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with guard.written(path):
            os.fsync(handle)
    finally:
        os.close(handle)


def read_log(root: Path) -> dict[str, Entry]:
    """Read the log of a store: its files, by their path in the store.

    Raises
    ------
    FileNotFoundError
        If there is no log.
    DamageError
        If a line cannot be read, unless it is the truncated last line of an interrupted commit.
    """
    return _read(root)[0]


def _read(root: Path) -> tuple[dict[str, Entry], bool]:
    """Return the files that the log names, and True if its last line is complete."""
    try:
        stream = io.BytesIO(guard.content(root / FOLDER / "log", share=_LOG))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = f"{FOLDER}/log cannot be read ({guard.reason(error)})"
        raise DamageError(f"the run at {root} is damaged: {why}. {_HINT}") from None
    files: dict[str, Entry] = {}
    number, sound = 0, False
    for number, line in enumerate(stream, 1):
        sound, commit = line.endswith(b"\n"), _parse_commit(line.removesuffix(b"\n"))
        if commit is None:
            if number > 1 and not stream.read(1) and _is_torn(line.removesuffix(b"\n"), ended=sound):
                return files, False
            raise DamageError(f"the run at {root} is damaged: line {number} of {FOLDER}/log is not valid. {_HINT}")
        files.update(commit[0])
        for key in commit[1]:
            files.pop(key, None)
    if number == 0:
        raise DamageError(f"the run at {root} is damaged: {FOLDER}/log is empty. {_HINT}")
    return files, sound


def _format_commit(files: dict[str, Entry], without: tuple[str, ...] = ()) -> bytes:
    text = json.dumps({"files": files, "without": without}, separators=(",", ":")).encode()
    return b"%08x %d %b\n" % (zlib.crc32(text), len(text), text)


def _parse_commit(line: bytes) -> tuple[dict[str, Entry], list[str]] | None:
    """Return the files and removals of a commit; None if the line is damaged or names a file outside the store."""
    check, _, rest = line.partition(b" ")
    length, _, text = rest.partition(b" ")
    if check != b"%08x" % zlib.crc32(text) or length != b"%d" % len(text):
        return None
    try:
        content = guard.parsed("a line of the log", text)
        files = {key: Entry(*entry) for key, entry in content["files"].items()}
        without = list(content["without"])
        sound = all(map(_is_entry, files.values())) and all(map(_is_inside, (*files, *without)))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (files, without) if sound else None


def _is_entry(entry: Entry) -> bool:
    """Return True if an entry has a size, a CRC-32 and the number of a staged file."""
    numbers = type(entry.size) is type(entry.crc) is int and entry.size >= 0
    return numbers and isinstance(entry.staged, str) and re.fullmatch("[0-9]{1,18}", entry.staged) is not None


def _is_inside(key: str) -> bool:
    """Return True if a file named by the log is inside the store."""
    return "\0" not in key and {"", ".", ".."}.isdisjoint(re.split(r"[/\\]", key))


def _require_folders(root: Path, files: Iterable[str]) -> None:
    """Raise DamageError if a folder is a link, through which files would be written outside the store."""
    folders = {parent for key in files for parent in Path(key).parents if parent.name} | {Path(FOLDER)}
    for folder in sorted(folders):
        if (root / folder).is_symlink():
            raise DamageError(
                f"the run at {root} is damaged: {folder} is a link, through which nothing is written. Copy the run."
            )


def _is_torn(line: bytes, *, ended: bool) -> bool:
    """Return True if a power cut may explain a damaged last line: it is truncated, or blocks of it are zero."""
    head = re.match(rb"[0-9a-f]{8} ([0-9]{1,12}) ", line)
    return b"\0" in line or (not ended and (head is None or len(line) - head.end() < int(head[1])))


def compute_crc(path: Path) -> int:
    """Compute the CRC-32 of a file; CRC-32C is equal for all chunks, which end in their CRC-32C."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def find_problem(path: Path, entry: Entry, *, checksum: bool = True) -> str | None:
    """Describe the damage to a file, or return None if it matches its entry of the log.

    The content of the file is read only if ``checksum`` is True.
    """
    try:
        status = guard.status(path)
        if status is None:
            return "is missing"
        if not stat.S_ISREG(status.st_mode):
            return "is a folder" if stat.S_ISDIR(status.st_mode) else "is not a regular file"
        if status.st_size != entry.size:
            return f"has {status.st_size} bytes in place of {entry.size}"
        if not checksum:
            return None
        if entry.size > guard.limit() and getattr(status, "st_blocks", entry.size) * 512 * _INFLATION < entry.size:
            return f"has {entry.size} bytes, but nearly all are holes"
        if compute_crc(path) != entry.crc:
            return "has another checksum than when it was written"
    except (OSError, ValueError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return None
