"""Places that stores may take, and the origin that they note."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
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


PACKAGES = ("fedstat", "numpy", "torch", "scipy", "xarray", "zarr")
# Sources that decide no number: how commands end, figures and reports.
_ELSE = ("__main__.py", "lazy.py")
_SHOWING = {"_cli", "plot", "reporting"}
_PACKAGE = Path(__file__).resolve().parents[1]


def provenance(
    title: str,
    config: Mapping[str, Any],
    *,
    command: str,
    device: str = "cpu",
    references: str = "",
    own: Sequence[object] = (),
) -> dict[str, Any]:
    """Attributes of a store that say where it comes from.

    Parameters
    ----------
    title : str
    config : mapping
        Settings; a run is resumed only with equal ones.
    command : str
        Command that makes the store, such as ``"fedstat.sim"``; no other command resumes or replaces it.
    device, references : str
    own : sequence
        What may be a user's own code behind the numbers, see :func:`code`.
    """
    return {
        "title": title,
        "command": command,
        "source": f"fedstat {_versions()['fedstat']}",
        "references": references,
        "config": to_json(config),
        "seed": json.loads(to_json(config)).get("seed"),
        "device": device,
        "versions": json.dumps({"python": platform.python_version()} | _versions()),
        "revision": revision(),
        "code": code(*own),
        "started": now(),
        "run": uuid.uuid4().hex,
    }


def to_json(config: Mapping[str, Any]) -> str:
    """Settings as JSON; NumPy scalars and arrays become numbers and lists."""
    return json.dumps(config, default=lambda value: np.asarray(value).tolist())


def now() -> str:
    """Time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code(*own: object) -> str:
    """Fingerprint of the sources that numbers come from.

    Parameters
    ----------
    *own
        Functions that may be a user's own, or tuples and mappings of functions, as an Algorithm is.

    Returns
    -------
    str
        Digest of the package without figures and command lines. Where ``own`` leads to functions from elsewhere, also
        through closures, "+" and a digest follow: of the files that define them, or of their compiled code where there
        is no file, as in a notebook. Imports of these files are not followed.
    """
    found: dict[str, bytes] = {}
    for function in _functions(own, set()):
        path = Path(function.__code__.co_filename)
        if path.is_file() and not _noted(path):
            found[str(path)] = path.read_bytes()
        elif not path.is_file():
            found[f"{function.__module__}.{function.__qualname__}"] = _compiled(function.__code__)
    if not found:
        return _of_package()
    return f"{_of_package()}+{hashlib.sha256(b''.join(sorted(found.values()))).hexdigest()[:16]}"


@cache
def _noted(path: Path) -> bool:
    """Whether a file is of this package, of Python, or of a package whose version is noted anyway."""
    places = [_PACKAGE, *(Path(sysconfig.get_path("purelib")) / name for name in PACKAGES)]
    python = Path(sysconfig.get_path("stdlib")) in path.parents and "site-packages" not in path.parts
    return python or any(place in path.resolve().parents or place in path.parents for place in places)


def _functions(thing: object, seen: set[int]) -> Iterator[FunctionType]:
    """Python functions that a function, a partial, a method, a tuple or a mapping leads to, each once."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    parts: list[object] = []
    if isinstance(thing, FunctionType):
        yield thing
        parts = [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
    elif isinstance(thing, partial):
        parts = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        parts = [thing.__func__]
    elif isinstance(thing, tuple | list):
        parts = list(thing)
    elif isinstance(thing, Mapping):
        parts = list(thing.values())
    elif callable(thing):
        parts = [vars(type(thing)).get("__call__")]
    for part in parts:
        yield from _functions(part, seen)


def _compiled(code_: CodeType) -> bytes:
    """What a function does, without the place where it stands."""
    consts = [_compiled(c) if isinstance(c, CodeType) else repr(c).encode() for c in code_.co_consts]
    return b"\0".join([code_.co_code, repr((code_.co_names, code_.co_varnames)).encode(), *consts])


@cache
def _of_package() -> str:
    found = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        if name.name not in _ELSE and _SHOWING.isdisjoint(name.parts):
            found.update(name.as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


@cache
def revision() -> str:
    """Git revision of the package's own source when it was first asked for, "" where it is not a checkout."""
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return ""
    command = [git, "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return done.stdout.strip()
