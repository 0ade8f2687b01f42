"""Paths of stores, and the origin that stores record."""

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
LAYOUT = 4
"""Version of what stores hold, and under which names. Stores of another version are refused."""
# A draft without a lock may be about to be locked if it is younger than this, in seconds.
_YOUNG = 60
_TRIES, _PAUSE = 5, 0.05
# Suffixes of a half-replaced store, of a draft, and of a grid's draft of a repeated run.
_REPLACED, _PARTIAL, REPEATED = "replaced-[0-9a-f]{8}", "partial-[0-9a-z_]{8}", ".repeat"
_LEFTOVER = re.compile(rf"\.({_REPLACED}|{_PARTIAL}|{REPEATED[1:]})$")


def require_available(
    path: str | Path, command: str, *, resume: bool = False, overwrite: bool = False, hint: str = "Pass resume=True"
) -> None:
    """Raise an error if a command must not write to a path; all commands that write call it.

    An existing store is left alone, unless the command itself wrote it and may resume or replace it.

    Parameters
    ----------
    path : path
        Store to write.
    command : str
        Command that wants to write, such as ``"fedstat.sim"``.
    resume, overwrite : bool
        Permit the command to resume, or to replace, a store that it wrote.
    hint : str
        Advice of the message: the argument that permits it.

    Raises
    ------
    FileExistsError
        If the path exists, and is not a store that the command may resume or replace; if it lies inside a store.
    NotADirectoryError, PermissionError
        If the path cannot be written.
    """
    path = Path(path)
    guard.status(path.parent / f"{path.name}.replaced-01234567")  # the longest name that the store has temporarily
    settle(path)
    if os.path.lexists(path):
        maker = command_of(path)
        if maker != command:
            what = "is not a store of this version of fedstat"
            if maker is not None:
                what = f"was made by {maker}, not by {command}"
            raise FileExistsError(f"{path} exists already and {what}. Choose another path; it is left as it is.")
        if not (resume or overwrite):
            raise FileExistsError(f"{path} exists already. {hint}, choose another path, or remove it first.")
    else:
        _require_outside(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{path} cannot be written: {folder} is not a folder. Choose another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} cannot be written: you may not write to {folder}. Choose another path.")


def _require_outside(path: Path) -> None:
    """Raise FileExistsError if a path lies inside a store."""
    for parent in path.resolve().parents:
        if any(guard.status(parent / name) for name in ("zarr.json", f"{journal.FOLDER}/log")):
            raise FileExistsError(f"{path} lies inside of {parent}, which is a store. Choose a path outside of it.")


def is_store(path: Path) -> bool:
    """Return True if a folder is a store, sound or damaged, by its files or its name."""
    inside = any(guard.status(path / name) for name in ("zarr.json", journal.FOLDER))
    return inside or (path.suffix == ".zarr" and path.is_dir())


def stores(path: str | Path) -> list[Path]:
    """Return the store at a path, or all stores in a folder, sorted, without leftovers of killed processes.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    """
    path = Path(path)
    if is_store(path):
        return [path]
    children = sorted(path.iterdir()) if path.is_dir() else []
    paths = [child for child in children if is_store(child) and not _LEFTOVER.search(child.name)]
    if not paths:
        raise FileNotFoundError(
            f"there is no run at {path}, and none in it: a run is a folder with a file zarr.json in it"
        )
    return paths


def distinct_stores(sources: Iterable[str | Path]) -> list[Path]:
    """Return the stores of several paths, see :func:`stores`.

    Raises
    ------
    FileNotFoundError
        If there is no store at a path.
    ValueError
        If the paths name a store twice, also by a folder or a link.
    """
    paths = [store for source in sources for store in stores(source)]
    names: dict[Path, Path] = {}
    for path in paths:
        if (first := names.setdefault(path.resolve(), path)) is not path:
            also = "" if first == path else f", as {first} and as {path}"
            raise ValueError(f"the run {first} is named twice{also}. Name it once.")
    return paths


def command_of(path: Path) -> str | None:
    """Return the command that wrote a store, of any layout, or None if the store does not say."""
    try:
        return str(_read_attributes(path)["command"])
    except (OSError, ValueError, KeyError):
        return None


def attributes(path: Path) -> dict[str, Any]:
    """Read the attributes of a store.

    Raises
    ------
    FileNotFoundError
        If there is no store.
    DamageError
        If the attributes cannot be read.
    VersionError
        If another version of fedstat wrote the store, with another layout.
    """
    attrs = _read_attributes(path)
    if "command" in attrs:
        require_version(attrs.get("layout", 1), LAYOUT, path)
    return attrs


class VersionError(ValueError):
    """Error of a store or a result that another version of fedstat wrote."""


def require_version(number: Any, supported: int, where: object) -> None:
    """Raise an error if a store or a result has another layout than this version reads."""
    if not isinstance(number, int | np.integer) or number < 1:
        raise journal.DamageError(f"{where} has no valid number of its layout, but {number!r:.100}. It is damaged.")
    if number != supported:
        age, hint = "an earlier", "Make it again, or read it with the fedstat that wrote it."
        if number > supported:
            age, hint = "a newer", "Update fedstat: pip install --upgrade fedstat"
        raise VersionError(
            f"{where} has layout {number} of {age} fedstat, but this fedstat reads layout {supported}. {hint}"
        )


def _read_attributes(path: Path) -> dict[str, Any]:
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
    """Create a folder beside ``path`` for a new store, with its lock; delete it if an error occurs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.name}.partial-", dir=path.parent))
    try:
        (folder / journal.FOLDER).mkdir()
        journal.sync(folder)  # marks the folder as a draft before it has other files
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
    """Rename a finished draft to the path of its store.

    Raises
    ------
    FileExistsError
        If the path exists by now.
    """
    try:
        if os.path.lexists(path):  # a rename would replace an empty folder
            raise OSError
        folder.rename(path)
    except OSError as error:
        if os.path.lexists(path):
            message = f"{path} was made by another process in the meantime. Choose another path."
            raise FileExistsError(message) from error
        raise
    journal.sync(path.parent)


def replace(folder: Path, path: str | Path) -> None:
    """Replace a store by a finished draft.

    After any interruption, one of the two stores is in place or can be restored. Between the two renames, the old store
    has a temporary name, from which :func:`settle` restores it.
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
    """Restore half-replaced stores and delete drafts.

    Only folders beside ``path`` with names and content of :func:`draft` and :func:`replace` are touched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        return
    for old in _list_beside(path, _REPLACED):
        if command_of(path) is not None:
            remove(old)
        elif not os.path.lexists(path) and command_of(old) is not None:
            old.rename(path)
    for folder in _list_beside(path, _PARTIAL):
        if _is_abandoned(folder):
            remove(folder)


def remove(folder: Path) -> None:
    """Delete a store or a draft, its journal last, so that a later call recognizes a half-deleted one."""
    journal_folder = folder / journal.FOLDER
    for path in folder.iterdir():
        if not path.is_dir():
            path.unlink(missing_ok=True)
        elif path != journal_folder:
            shutil.rmtree(path, ignore_errors=True)
    journal.sync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a partial store; retry while zarr still writes."""
    for _ in range(_TRIES):
        if folder.exists():
            remove(folder)
        time.sleep(_PAUSE)


def _list_beside(path: Path, ending: str) -> list[Path]:
    """Return folders beside ``path``, named ``path`` and a suffix, that are empty or hold a journal."""
    pattern = re.compile(re.escape(path.name) + r"\." + ending)
    paths = (p for p in path.parent.iterdir() if pattern.fullmatch(p.name) and p.is_dir() and not p.is_symlink())
    return sorted(p for p in paths if (p / journal.FOLDER).is_dir() or not any(p.iterdir()))


def _is_abandoned(folder: Path) -> bool:
    """Return True if the process that wrote a draft has ended."""
    if not (folder / journal.FOLDER / "lock").exists():
        return time.time() - folder.stat().st_mtime > _YOUNG
    try:
        journal.hold(folder).release()
    except BlockingIOError:
        return False
    return True


PACKAGES = ("fedstat", "numpy", "torch", "scipy", "xarray", "zarr")
# Sources that do not affect any number: command lines, figures and reports.
_COMMAND_FILES = ("__main__.py", "_cli.py", "lazy.py")
_DISPLAY_FOLDERS = {"plot", "reporting"}
_PACKAGE = Path(__file__).resolve().parents[1]


def provenance(
    title: str,
    config: Mapping[str, Any],
    *,
    command: str,
    device: str = "cpu",
    references: str = "",
    user_code: Sequence[object] = (),
) -> dict[str, Any]:
    """Return the attributes that record the origin of a store.

    Parameters
    ----------
    title : str
    config : mapping
        Settings; a run is resumed only with equal settings.
    command : str
        Command that writes the store, such as ``"fedstat.sim"``; no other command resumes or replaces it.
    device, references : str
    user_code : sequence
        Functions that a user may have written, see :func:`code`.
    """
    return {
        "title": title,
        "command": command,
        "source": f"fedstat {_get_versions()['fedstat']}",
        "references": references,
        "config": to_json(config),
        "seed": json.loads(to_json(config)).get("seed"),
        "device": device,
        "versions": json.dumps({"python": platform.python_version()} | _get_versions()),
        "revision": get_revision(),
        "code": code(*user_code),
        "started": now(),
        "run": uuid.uuid4().hex,
    }


def to_json(config: Mapping[str, Any]) -> str:
    """Write settings as JSON; NumPy scalars and arrays become numbers and lists."""
    return json.dumps(config, default=lambda value: np.asarray(value).tolist())


def now() -> str:
    """Return the time in UTC (ISO 8601)."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def code(*functions: object) -> str:
    """Return a digest of the code that computes the numbers of a store.

    Parameters
    ----------
    *functions
        Functions that a user may have written, or tuples and mappings of functions, such as an Algorithm.

    Returns
    -------
    str
        Digest of the package without figures and command lines. If ``functions`` lead to code outside the package, also
        through closures, "+" and a second digest follow. It covers the files that define the functions, or their
        compiled code if there is no file, as in a notebook. Imports of these files are not followed.
    """
    sources: dict[str, bytes] = {}
    for function in _walk_functions(functions, set()):
        path = Path(function.__code__.co_filename)
        if path.is_file() and not _is_versioned(path):
            sources[str(path)] = path.read_bytes()
        elif not path.is_file():
            sources[f"{function.__module__}.{function.__qualname__}"] = _serialize_code(function.__code__)
    if not sources:
        return _digest_package()
    return f"{_digest_package()}+{hashlib.sha256(b''.join(sorted(sources.values()))).hexdigest()[:16]}"


@cache
def _is_versioned(path: Path) -> bool:
    """Return True if a file is of Python, of this package, or of a package whose version is recorded."""
    places = [_PACKAGE, *(Path(sysconfig.get_path("purelib")) / name for name in PACKAGES)]
    python = Path(sysconfig.get_path("stdlib")) in path.parents and "site-packages" not in path.parts
    return python or any(place in path.resolve().parents or place in path.parents for place in places)


def _walk_functions(thing: object, visited_ids: set[int]) -> Iterator[FunctionType]:
    """Iterate over the Python functions in a function, partial, method, tuple or mapping, each once."""
    if id(thing) in visited_ids:
        return
    visited_ids.add(id(thing))
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
        yield from _walk_functions(part, visited_ids)


def _serialize_code(code_object: CodeType) -> bytes:
    """Serialize the compiled code of a function without its file and line numbers."""
    consts = [_serialize_code(c) if isinstance(c, CodeType) else repr(c).encode() for c in code_object.co_consts]
    return b"\0".join([code_object.co_code, repr((code_object.co_names, code_object.co_varnames)).encode(), *consts])


@cache
def _digest_package() -> str:
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        name = path.relative_to(_PACKAGE)
        if name.name not in _COMMAND_FILES and _DISPLAY_FOLDERS.isdisjoint(name.parts):
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _get_versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in PACKAGES}


@cache
def get_revision() -> str:
    """Return the Git revision of the package at the first call, "" if it is not a checkout."""
    git = shutil.which("git")
    if git is None or not (_PACKAGE.parent / ".git").exists():
        return ""
    command = [git, "-C", str(_PACKAGE), "describe", "--always", "--dirty", "--abbrev=12"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return process.stdout.strip()
