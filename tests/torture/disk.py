"""A disk that forgets: what a process did to files is recorded, and a power cut at any point is acted out.

Only what was brought to the disk outlives a power cut for certain: the content of a file by fsync of the file, names in
a folder by fsync of the folder. Of all else anything may be there or not: contents empty, cut off, or full of zeros;
creations, renames and removals in order up to some point ("ordered", as ext4 does) or each for itself ("loose", as
POSIX allows).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Operation(NamedTuple):
    """One change: create, write, rename, link, remove, mkdir, sync (of a file with its content, or a folder), mark."""

    kind: str
    path: str = ""
    to: str = ""
    content: bytes = b""
    number: int = 0


def watch(root: Path, notice: Any) -> None:
    """Call ``notice(Operation)`` before every change that this process makes below a folder, while it lives."""
    base = str(root.resolve())

    def named(path: Any, folder: Any = -1) -> str | None:
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        if isinstance(folder, int) and folder >= 0:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        full = os.path.abspath(os.fsdecode(path))
        return full[len(base) + 1 :] if full.startswith(base + os.sep) else None

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            if (path := named(args[0])) is not None:
                notice(Operation("write" if os.path.exists(args[0]) else "create", path))
        elif event in ("os.rename", "os.link"):
            source, target = named(args[0], args[2]), named(args[1], args[3])
            if source is not None and target is not None:
                notice(Operation(event.removeprefix("os."), source, target, _content(args[0])))
        elif event in ("os.remove", "os.rmdir", "os.mkdir"):
            if (path := named(args[0], args[-1])) is not None:
                kind = "mkdir" if event == "os.mkdir" else "remove"
                notice(Operation(kind, path, content=_content(os.path.join(base, path))))
        elif event == "os.truncate" and (path := named(args[0])) is not None:
            notice(Operation("write", path))

    sys.addaudithook(hook)
    fsync = os.fsync

    def watched(handle: int) -> None:
        fsync(handle)
        full = os.readlink(f"/proc/self/fd/{handle}")
        if (path := named(full)) is not None or full == base:
            notice(Operation("sync", path or "", content=_content(full), number=int(os.path.isdir(full))))

    os.fsync = watched


def _content(path: str) -> bytes:
    return Path(path).read_bytes() if os.path.isfile(path) else b""


class _File(NamedTuple):
    synced: bytes | None = None
    dirty: bool = True


def power_cut(log: list[Operation], at: int, target: Path, rng: np.random.Generator, *, loose: bool) -> None:
    """Make in ``target`` what a disk may hold after a power cut before operation ``at``."""
    files: dict[int, _File] = {}
    names: dict[str, int | None] = {}  # to files by number, or None for a folder
    pending: list[tuple[Operation, int | None]] = []
    forced: set[int] = set()
    for number, op in enumerate(log[:at]):
        if op.kind == "create":
            files[number], names[op.path] = _File(), number
        elif op.kind == "write" and names.get(op.path) is not None:
            files[names[op.path]] = files[names[op.path]]._replace(dirty=True)
        elif op.kind == "sync" and not op.number and names.get(op.path) is not None:
            files[names[op.path]] = _File(op.content, dirty=False)
        elif op.kind == "sync" and op.number:
            forced |= {
                i
                for i, (p, _) in enumerate(pending)
                if op.path in {os.path.dirname(p.path), os.path.dirname(p.to or p.path)}
            }
        if op.kind == "create":
            pending.append((op, number))
        elif op.kind in ("mkdir", "remove", "rename", "link"):
            pending.append((op, None))
            _apply(names, op, None)
    kept = _kept(len(pending), forced, rng, loose)
    disk: dict[str, int | None] = {}
    for i, (op, number) in enumerate(pending):
        if i in kept:
            _apply(disk, op, number)
    eventually = _eventually(log, at, names)
    for path, number in sorted(disk.items(), key=lambda item: item[0].count("/")):
        where = target / path
        if not where.parent.is_dir():
            continue
        if number is None:
            where.mkdir(exist_ok=True)
        else:
            where.write_bytes(_remains(files[number], eventually.get(number, b""), rng))
    age(target)


def age(target: Path) -> None:
    """Make folders old: it takes a while until a machine is up again, or somebody looks."""
    for folder in target.rglob("*/"):
        os.utime(folder, (0, 0))


def _apply(names: dict[str, int | None], op: Operation, number: int | None) -> None:
    """Change the names as the operation does, if it can."""
    if op.kind in ("create", "mkdir"):
        names[op.path] = number
    elif op.kind == "remove":
        names.pop(op.path, None)
    elif op.kind == "link" and op.path in names:
        names[op.to] = names[op.path]
    elif op.path in names:
        moved = {p: n for p, n in names.items() if p == op.path or p.startswith(op.path + "/")}
        for path, n in moved.items():
            del names[path]
            names[op.to + path[len(op.path) :]] = n


def _kept(n: int, forced: set[int], rng: np.random.Generator, loose: bool) -> set[int]:
    if loose:
        return forced | {i for i in range(n) if rng.random() < 0.5}
    certain = max(forced, default=-1) + 1
    return set(range(int(rng.integers(certain, n + 1))))


def _eventually(log: list[Operation], at: int, names: dict[str, int | None]) -> dict[int, bytes]:
    """What files that stand at the cut were going to hold, as far as the rest of the log tells."""
    found: dict[int, bytes] = {}
    now = dict(names)
    for op in log[at:]:
        number = now.get(op.path)
        if number is not None and number not in found and op.content:
            found[number] = op.content
        if op.kind in ("create", "mkdir", "remove", "rename", "link"):
            _apply(now, op, None)
    return found


def _remains(file: _File, later: bytes, rng: np.random.Generator) -> bytes:
    """Content of a file after the cut: what was synced stays, what was written since may be there in part."""
    old = file.synced or b""
    if not file.dirty:
        return old
    cut = int(rng.integers(len(old) if later.startswith(old) else 0, len(later) + 1))
    return [old, later[:cut], later[:cut] + bytes(len(later) - cut), later][int(rng.integers(4))]
