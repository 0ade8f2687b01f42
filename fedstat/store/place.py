"""Where a store may stand: the one rule for what exists already, and how a new store takes its place."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedstat._utils import guard
from fedstat.store import journal

AGAIN = "Remove it and run again."
# A draft without a lock is not yet locked rather than left over if it is younger than this, in seconds.
_YOUNG = 60
_TRIES, _PAUSE = 5, 0.05
# What follows a store's name in those of a half replaced store and of a draft; a grid's draft of a run made again.
_REPLACED, _PARTIAL, REPEATED = "replaced-[0-9a-f]{8}", "partial-[0-9a-z_]{8}", ".repeat"
_LEFT = re.compile(rf"\.({_REPLACED}|{_PARTIAL}|{REPEATED[1:]})$")


def claim(
    path: str | Path, command: str, *, resume: bool = False, overwrite: bool = False, hint: str = "Pass resume=True"
) -> None:
    """Refuse a path that a command must not write to; the one rule for every command that writes.

    What exists is left alone unless the same command made it and it is asked to go on with it or to replace it.

    Parameters
    ----------
    path : path
        Store to write.
    command : str
        Command that wants to write, such as ``"fedstat.sim"``.
    resume, overwrite : bool
        What may be done with a store of that command.
    hint : str
        How to allow it, for the message.

    Raises
    ------
    FileExistsError
        If something is there that is not a store of that command, or that must not be touched.
    NotADirectoryError, PermissionError
        If nothing can be written there.
    """
    path = Path(path)
    guard.status(path.parent / f"{path.name}.replaced-01234567")  # a name that it may have for a moment
    settle(path)
    if os.path.lexists(path):
        theirs = command_of(path)
        if theirs != command:
            what = "is not a store of this version of fedstat"
            if theirs is not None:
                what = f"was made by {theirs}, not by {command}"
            raise FileExistsError(f"{path} exists already and {what}. Choose another path; it is left as it is.")
        if not (resume or overwrite):
            raise FileExistsError(f"{path} exists already. {hint}, choose another path, or remove it first.")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder. Choose another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: you may not write to {folder}. Choose another path.")


def is_store(path: Path) -> bool:
    """Whether a folder is a store, sound or damaged: it has what stores have in them, or their name."""
    inside = any(guard.status(path / name) for name in ("zarr.json", journal.FOLDER))
    return inside or (path.suffix == ".zarr" and path.is_dir())


def stores(path: str | Path) -> list[Path]:
    """The store at a path, or those in the folder there, sorted, without what killed processes left beside them.

    Raises
    ------
    FileNotFoundError
        If there is none.
    """
    path = Path(path)
    if is_store(path):
        return [path]
    inside = sorted(path.iterdir()) if path.is_dir() else []
    found = [one for one in inside if is_store(one) and not _LEFT.search(one.name)]
    if not found:
        raise FileNotFoundError(
            f"there is no run at {path}, and none in it: a run is a folder with a file zarr.json in it"
        )
    return found


def command_of(path: Path) -> str | None:
    """Command that made a store, None if it cannot be told."""
    try:
        return str(attributes(path)["command"])
    except (OSError, ValueError, KeyError):
        return None


def attributes(path: Path) -> dict[str, Any]:
    """Attributes of a store.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    DamageError
        If they cannot be read.
    """
    guard.status(path)
    try:
        text = guard.content(path / "zarr.json", share=guard.HEAD)
        return dict(guard.parsed("zarr.json", text, finite=False).get("attributes", {}))
    except FileNotFoundError:
        if (path / journal.FOLDER).is_dir():
            raise journal.DamageError(f"the run at {path} is damaged: zarr.json is missing. {AGAIN}") from None
        raise FileNotFoundError(f"there is no run at {path}: a run is a folder with a file zarr.json in it") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"zarr.json cannot be read ({guard.reason(error)})"
        raise journal.DamageError(f"the run at {path} is damaged: {why}. {AGAIN}") from None


@contextmanager
def draft(path: Path) -> Iterator[tuple[Path, FileLock]]:
    """Folder beside ``path`` to make a store in, and its lock; removed if the store is not made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        (folder / journal.FOLDER).mkdir()
        journal.sync(folder)  # so that it is known as ours before anything else can be in it
        lock = journal.hold(folder)
        try:
            folder.chmod(0o755)
            with guard.written(path):
                yield folder, lock
        except BaseException:
            lock.release()
            raise
    except BaseException:
        discard(folder)
        raise


def put(folder: Path, path: Path) -> None:
    """Give a finished draft its name.

    Raises
    ------
    FileExistsError
        If something stands there now.
    """
    try:
        if os.path.lexists(path):  # a rename would replace an empty folder
            raise OSError
        folder.rename(path)
    except OSError as error:
        if os.path.lexists(path):
            made = f"{path} was made by another process in the meantime. Choose another path."
            raise FileExistsError(made) from error
        raise
    journal.sync(path.parent)


def replace(folder: Path, path: str | Path) -> None:
    """Replace a store by a finished one; after any interruption one of the two is in place, or will be put back.

    Between the two renames the old store has a name of its own, from which :func:`settle` brings it back.
    """
    path = Path(path).resolve()
    old = path.with_name(f"{path.name}.replaced-{uuid.uuid4().hex[:8]}")
    try:
        path.rename(old)
        folder.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    journal.sync(path.parent)
    remove(old)


def settle(path: str | Path) -> None:
    """Clear up what killed processes left beside ``path``: a store half replaced comes back, drafts go.

    Only folders with the names and the content that :func:`draft` and :func:`replace` give are touched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        return
    for old in _beside(path, _REPLACED):
        if command_of(path) is not None:
            remove(old)
        elif not os.path.lexists(path) and command_of(old) is not None:
            old.rename(path)
    for folder in _beside(path, _PARTIAL):
        if _left_over(folder):
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a store or a draft, its journal last: what a killed process leaves of it is still known as ours."""
    ours = folder / journal.FOLDER
    for path in folder.iterdir():
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path != ours:
            shutil.rmtree(path, ignore_errors=True)
    journal.sync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a store whose writing failed, until it stays away: zarr's threads may not have noticed yet."""
    for _ in range(_TRIES):
        if folder.exists():
            remove(folder)
        time.sleep(_PAUSE)


def _beside(path: Path, ending: str) -> list[Path]:
    """Folders beside ``path`` with its name and that ending, which are ours by what is in them."""
    named = re.compile(re.escape(path.name) + r"\." + ending)
    found = (p for p in path.parent.iterdir() if named.fullmatch(p.name) and p.is_dir() and not p.is_symlink())
    return sorted(p for p in found if (p / journal.FOLDER).is_dir() or not any(p.iterdir()))


def _left_over(folder: Path) -> bool:
    """Whether a draft is abandoned."""
    if not (folder / journal.FOLDER / "lock").exists():
        return time.time() - folder.stat().st_mtime > _YOUNG
    try:
        journal.hold(folder).release()
    except BlockingIOError:
        return False
    return True
