"""A folder that loses nothing: files are written beside their places, noted with checksums, and then put in place.

The folder ``journal`` of a store holds the file ``log``, with one line per commit: the files of the commit, each with
its size, its CRC-32 and the name under which it was staged. A commit (1) brings the staged files to the disk, (2) adds
its line to the log and brings that to the disk, (3) renames the files to their places. After any interruption, what the
log names is on the disk, in its place or still staged, and what the log does not name was never written.
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
"""Staged name given to the files that a store began with."""
_BLOCK = 1 << 22
# A log of more lines than this is written anew, with one line for all files.
_LINES = 1000
_LOG = 32  # fraction of the limit that the log may take
_INFLATION = 1032  # holes and blocks of zeros may stand for so many times their room on the disk


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
            _require_folders(root, self.files)
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
            with guard.written(log), log.open("ab") as file:
                file.write(_line(files, without))
            sync(log)
        except BaseException:
            os.truncate(log, size)  # or the next line would stand behind half a line
            raise
        self._lines += 1

    def _rewrite(self) -> None:
        draft = self.root / FOLDER / next(self._names)
        with guard.written(draft):
            draft.write_bytes(_line(self.files))
        sync(draft)
        draft.replace(self.root / FOLDER / "log")
        sync(self.root / FOLDER)
        self._lines = 1


@contextmanager
def checked(draft: Path) -> Iterator[Checked]:
    """File to write, which is removed if writing fails; then an OSError names it, whatever its writer made of that."""
    made: Checked | None = None
    try:
        with guard.written(draft), draft.open("wb") as file:
            made = Checked(file)
            yield made
    except BaseException as error:
        draft.unlink(missing_ok=True)
        if made and made.failed and error is not made.failed:
            made.failed.filename = str(draft)
            raise made.failed from error
        raise


class Checked:
    """A file that counts and checks what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self.crc = file, 0, 0
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        """Write bytes."""
        block = memoryview(data).cast("B")
        with self._noting():
            self._file.write(block)
        self.size += len(block)
        self.crc = zlib.crc32(block, self.crc)
        return len(block)

    def flush(self) -> None:
        """Hand them to the system."""
        with self._noting():
            self._file.flush()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # torch raises an error of its own in its place
            self.failed = error
            raise


def hold(root: Path) -> FileLock:
    """Take the lock of a store, which no dead process holds.

    Raises
    ------
    BlockingIOError
        If another process has it.
    """
    path = root / FOLDER / "lock"
    if path.is_symlink() or (guard.status(path) and not path.is_file()):  # the lock is emptied as it is opened
        raise DamageError(f"the run at {root} is damaged: {FOLDER}/lock is not a regular file. Remove it.")
    lock = FileLock(path, blocking=False, thread_local=False)
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
        with guard.written(path):
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
        stream = io.BytesIO(guard.content(root / FOLDER / "log", share=_LOG))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        why = f"{FOLDER}/log cannot be read ({guard.reason(error)})"
        raise DamageError(f"the run at {root} is damaged: {why}") from None
    files: dict[str, Entry] = {}
    number, sound = 0, False
    for number, line in enumerate(stream, 1):
        sound, found = line.endswith(b"\n"), _parse(line.removesuffix(b"\n"))
        if found is None:
            if number > 1 and not stream.read(1) and _torn(line.removesuffix(b"\n"), ended=sound):
                return files, False
            raise DamageError(f"the run at {root} is damaged: line {number} of {FOLDER}/log")
        files.update(found[0])
        for key in found[1]:
            files.pop(key, None)
    if number == 0:
        raise DamageError(f"the run at {root} is damaged: line 1 of {FOLDER}/log")
    return files, sound


def _line(files: dict[str, Entry], without: tuple[str, ...] = ()) -> bytes:
    text = json.dumps({"files": files, "without": without}, separators=(",", ":")).encode()
    return b"%08x %d %b\n" % (zlib.crc32(text), len(text), text)


def _parse(line: bytes) -> tuple[dict[str, Entry], list[str]] | None:
    """Files and removals of a commit; None if the line is damaged, or names what cannot be in the store."""
    check, _, rest = line.partition(b" ")
    length, _, text = rest.partition(b" ")
    if check != b"%08x" % zlib.crc32(text) or length != b"%d" % len(text):
        return None
    try:
        found = guard.parsed("a line of the log", text)
        files = {key: Entry(*entry) for key, entry in found["files"].items()}
        without = list(found["without"])
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
    """Raise DamageError if a folder that is written to is a link, which may lead out of the store."""
    folders = {parent for key in files for parent in Path(key).parents if parent.name} | {Path(FOLDER)}
    for folder in sorted(folders):
        if (root / folder).is_symlink():
            raise DamageError(
                f"the run at {root} is damaged: {folder} is a link, and nothing is written through one. Copy the run."
            )


def _torn(line: bytes, *, ended: bool) -> bool:
    """Whether a line may be what a power cut left of a commit that never counted: cut off, or blocks of it zero."""
    head = re.match(rb"[0-9a-f]{8} ([0-9]{1,12}) ", line)
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
        found = guard.status(path)
        if found is None:
            return "is missing"
        if not stat.S_ISREG(found.st_mode):
            return "is a folder" if stat.S_ISDIR(found.st_mode) else "is not a regular file"
        if found.st_size != entry.size:
            return f"has {found.st_size} bytes in place of {entry.size}"
        if not checksum:
            return None
        if entry.size > guard.limit() and getattr(found, "st_blocks", entry.size) * 512 * _INFLATION < entry.size:
            return f"has {entry.size} bytes, but nearly all are holes"
        if crc(path) != entry.crc:
            return "has another checksum than when it was written"
    except (OSError, ValueError) as error:
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return None
