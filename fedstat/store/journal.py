"""A folder that loses nothing: files are written beside their places, noted with checksums, and then put in place.

The folder ``journal`` of a store holds the file ``log``, with one line per commit: the files of the commit, each with
its size, its CRC-32 and the name under which it was staged. A commit (1) brings the staged files to the disk, (2) adds
its line to the log and brings that to the disk, (3) renames the files to their places. After any interruption, what the
log names is on the disk, in its place or still staged, and what the log does not name was never written.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from filelock import FileLock, Timeout

FOLDER = "journal"
FIRST = "0"
"""Staged name given to the files that a store began with."""
_BLOCK = 1 << 22
# A log of more lines than this is written anew, with one line for all files.
_LINES = 1000


class Entry(NamedTuple):
    """What the log says of one file: its size in bytes, its CRC-32, and the name under which it was staged."""

    size: int
    crc: int
    staged: str


class DamageError(ValueError):
    """A store does not hold what was written to it."""


class Journal:
    """The files of a store, open for writing by this process alone.

    Parameters
    ----------
    root : Path
        The store; its folder ``journal`` exists.
    lock : FileLock, optional
        The store's lock, if this process has it already.

    Raises
    ------
    BlockingIOError
        If another process, or another part of this one, is writing to the store.
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
            self._names = map(str, itertools.count(1 + max((int(e.staged) for e in self.files.values()), default=0)))
            self._recover()
            if not sound:
                self._rewrite()
        except BaseException:
            self._lock.release()
            raise

    def _recover(self) -> None:
        """Finish a commit that was cut off, and remove files that no commit names."""
        for key, entry in self.files.items():
            if self._draft(entry).is_file() and problem(self._draft(entry), entry) is None:
                self._place(self._draft(entry), key)
        for path in left_over(self.root):
            if path.name != "lock":
                path.unlink()

    def _place(self, staged: Path, key: str) -> None:
        target = self.root / key
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)

    def path(self, key: str) -> Path:
        """Where the newest content of a file stands."""
        if (entry := self._staged.get(key)) and (draft := self._draft(entry)).exists():
            return draft
        return self.root / key

    def _draft(self, entry: Entry) -> Path:
        return self.root / FOLDER / entry.staged

    def draft(self) -> Path:
        """Where new content may be written, before :meth:`adopt`."""
        return self.root / FOLDER / next(self._names)

    @contextmanager
    def stage(self, key: str) -> Iterator[IO[bytes]]:
        """File to write the new content of ``key`` to; it counts from the next commit on."""
        draft = self.draft()
        with checked(draft) as file:
            yield file  # type: ignore[misc]
        self.adopt(key, draft, file.size, file.crc)

    def adopt(self, key: str, draft: Path, size: int, crc: int) -> None:
        """Let a draft be the new content of ``key`` from the next commit on."""
        before, self._staged[key] = self._staged.get(key), Entry(size, crc, draft.name)
        if before and before.staged not in self._logged:
            self._draft(before).unlink(missing_ok=True)

    def commit(self) -> None:
        """Commit all staged files at once.

        A commit that is interrupted or fails can be done again: what is staged stays so until it is in its place.
        """
        staged = {key: entry for key, entry in self._staged.items() if self._draft(entry).exists()}
        if staged:
            for entry in staged.values():
                sync(self._draft(entry))
            sync(self.root / FOLDER)
            self._logged.update(entry.staged for entry in staged.values())
            self._log(staged)
            self.files.update(staged)
            for key, entry in staged.items():
                self._place(self._draft(entry), key)
        self._staged, self._logged = {}, set()
        if self._lines > _LINES:
            self._rewrite()

    def forget(self, keys: Iterable[str]) -> None:
        """Remove files, so that they read as never written."""
        keys = tuple(keys)
        for key in keys:
            self.files.pop(key, None)
            (self.root / key).unlink(missing_ok=True)
        self._log({}, keys)

    def finish(self) -> None:
        """Commit, bring all names to the disk, and leave a log of one line."""
        self.commit()
        for folder in {(self.root / key).parent for key in self.files}:
            sync(folder)
        self._rewrite()

    def close(self) -> None:
        """Let others write; what is not committed was never written."""
        if self._lock.is_locked:
            (self.root / FOLDER / "lock").unlink(missing_ok=True)
            self._lock.release()

    def _log(self, files: dict[str, Entry], without: tuple[str, ...] = ()) -> None:
        log = self.root / FOLDER / "log"
        size = log.stat().st_size if log.exists() else 0
        try:
            with log.open("ab") as file:
                file.write(_line(files, without))
            sync(log)
        except BaseException:
            os.truncate(log, size)  # or the next line would stand behind half a line
            raise
        self._lines += 1

    def _rewrite(self) -> None:
        draft = self.root / FOLDER / next(self._names)
        draft.write_bytes(_line(self.files))
        sync(draft)
        draft.replace(self.root / FOLDER / "log")
        sync(self.root / FOLDER)
        self._lines = 1


@contextmanager
def checked(draft: Path) -> Iterator[Checked]:
    """File to write, which is removed if writing fails."""
    try:
        with draft.open("wb") as file:
            yield Checked(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


class Checked:
    """A file that counts and checks what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self.crc = file, 0, 0

    def write(self, data: Any) -> int:
        """Write bytes."""
        block = memoryview(data).cast("B")
        self._file.write(block)
        self.size += len(block)
        self.crc = zlib.crc32(block, self.crc)
        return len(block)

    def flush(self) -> None:
        """Hand them to the system."""
        self._file.flush()


def hold(root: Path) -> FileLock:
    """Take the lock of a store, which no dead process holds.

    Raises
    ------
    BlockingIOError
        If another process has it.
    """
    lock = FileLock(root / FOLDER / "lock", blocking=False, thread_local=False)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(
            f"{root} is being written by another process. Wait until that has ended, or stop it."
        ) from None
    return lock


def start(root: Path) -> None:
    """Note all files that a new store holds, and bring them to the disk."""
    folder = root / FOLDER
    files = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and path != folder / "lock":
            files[path.relative_to(root).as_posix()] = Entry(path.stat().st_size, crc(path), FIRST)
    (folder / "log").write_bytes(_line(files))
    for path in [*root.rglob("*"), root]:
        sync(path)


def left_over(root: Path) -> list[Path]:
    """Files in the journal that its log does not name: a lock, and what a killed process had staged.

    Not those in folders of the journal, which grow and which the state checks itself.
    """
    named = {root / FOLDER / "log", *(root / key for key in read_log(root))}
    return [path for path in (root / FOLDER).iterdir() if path not in named and not path.is_dir()]


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_log(root: Path) -> dict[str, Entry]:
    """Files of a store, by their path in it, as the log names them.

    Raises
    ------
    FileNotFoundError
        If there is no log.
    DamageError
        If a line of it cannot be read, unless it is the truncated end of an interrupted commit.
    """
    return _read(root)[0]


def _read(root: Path) -> tuple[dict[str, Entry], bool]:
    """Files that the log names, and whether its last line is whole."""
    try:
        *lines, tail = (root / FOLDER / "log").read_bytes().split(b"\n")
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise DamageError(f"the run at {root} is damaged: {FOLDER}/log cannot be read ({error.strerror})") from None
    if tail:
        lines.append(tail)
    found = [_parse(line) for line in lines]
    if found and found[-1] is None and _torn(lines[-1], ended=not tail):
        found.pop()
    if None in found or not found:
        raise DamageError(f"the run at {root} is damaged: line {found.index(None) + 1 if found else 1} of {FOLDER}/log")
    files: dict[str, Entry] = {}
    for one in found:
        files.update({key: Entry(*entry) for key, entry in one["files"].items()})  # type: ignore[index]
        for key in one["without"]:  # type: ignore[index]
            files.pop(key, None)
    return files, not tail and len(found) == len(lines)


def _line(files: dict[str, Entry], without: tuple[str, ...] = ()) -> bytes:
    text = json.dumps({"files": files, "without": without}, separators=(",", ":")).encode()
    return b"%08x %d %b\n" % (zlib.crc32(text), len(text), text)


def _parse(line: bytes) -> dict[str, Any] | None:
    check, _, rest = line.partition(b" ")
    length, _, text = rest.partition(b" ")
    if check != b"%08x" % zlib.crc32(text) or length != b"%d" % len(text):
        return None
    found = json.loads(text)
    return found if isinstance(found, dict) else None


def _torn(line: bytes, *, ended: bool) -> bool:
    """Whether a line may be what a power cut left of a commit that never counted: cut off, or blocks of it zero."""
    head = re.match(rb"[0-9a-f]{8} ([0-9]+) ", line)
    return b"\0" in line or (not ended and (head is None or len(line) - head.end() < int(head[1])))


def crc(path: Path) -> int:
    """CRC-32 of a file; not CRC-32C, which is the same for all chunks that end in their own."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def problem(path: Path, entry: Entry, *, checksum: bool = True) -> str | None:
    """What is wrong with a file, None if it is as the log says; its content is read only for the checksum."""
    try:
        if path.is_dir():
            return "is a folder"
        size = path.stat().st_size
        if size != entry.size:
            return f"has {size} bytes in place of {entry.size}"
        if checksum and crc(path) != entry.crc:
            return "has another checksum than when it was written"
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None
