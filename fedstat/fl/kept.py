"""Rows of clients that outlast rounds: tensors in memory or, beyond a budget, rows on disk."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import numpy as np

from fedstat import _guard
from fedstat._later import torch
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.rows import Rows, unnamed
from fedstat.store import DamageError, journal

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "kept"
"""Name of the folder of rows beside the state that names them."""

_BLOCK = 256  # clients that are written at a time


class Slots:
    """A file of places of one size, each for the row of a client.

    It is in NumPy's .npy format, with a field for each parameter: ``numpy.load(path, mmap_mode="r")`` reads it.

    Parameters
    ----------
    path : Path
    like : Params (...)
        A row.
    new : bool
        Whether to begin the file anew.
    """

    def __init__(self, path: Path, like: Params, *, new: bool) -> None:
        self.path = path
        self.row = np.dtype([(name, p.numpy().dtype, tuple(p.shape)) for name, p in like.items()])
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0), 0o644)
        finalize(self, os.close, self._file)
        self._header = len(self._head(0))
        self.number = max(0, path.stat().st_size - self._header) // self.row.itemsize
        self.versions: WeakSet[Kept] = WeakSet()
        self.committed: Kept | None = None

    def _head(self, number: int) -> bytes:
        file, descr = io.BytesIO(), np.lib.format.dtype_to_descr(self.row)
        about = {"descr": descr, "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_2_0(file, about)  # NumPy leaves room for any number
        return file.getvalue()

    def free(self, n: int) -> np.ndarray:
        """Numbers of n slots that no version of the rows names, so that writing them changes none."""
        found = unnamed(self.versions, self.number)[:n]
        more = np.arange(self.number, self.number + n - len(found))
        self.number += len(more)
        return np.concatenate([found, more])

    def write(self, slot: int, parts: list[np.ndarray]) -> int:
        """Write the bytes of a row and return their CRC-32."""
        check, at = 0, self._header + slot * self.row.itemsize
        for part in parts:
            check, left = zlib.crc32(part.data, check), part.data
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done
        return check

    def read(self, slot: int, into: list[np.ndarray]) -> int:
        """Read a row and return the CRC-32 of what was read."""
        check, at = 0, self._header + slot * self.row.itemsize
        for part in into:
            left = part.data
            while left and (done := os.preadv(self._file, [left], at)):
                left, at = left[done:], at + done
            check = zlib.crc32(part.data, check)
        return check

    def sync(self) -> None:
        """Bring what was written to the disk."""
        with _guard.written(self.path):
            os.pwrite(self._file, self._head(self.number), 0)
        journal.sync(self.path)
        journal.sync(self.path.parent)


class Kept:
    """Rows of all clients as they are after some round; a change is a new version, and this one stays as it is.

    A client that has no slot has the row that all began with. Rows are read and written for the clients asked for.

    Parameters
    ----------
    slots : Slots
    slot : int array (client,)
        Number of each client's slot, −1 for none.
    check : uint32 array (client,)
        CRC-32 of its row.
    first : Params (...)
        The row of clients without a slot.
    device : torch.device
        Where rows are wanted.
    """

    def __init__(self, slots: Slots, slot: np.ndarray, check: np.ndarray, first: Params, device: torch.device) -> None:
        self.slots, self.slot, self.check, self.first, self.device = slots, slot, check, first, device
        slots.versions.add(self)

    def rows(self, clients: np.ndarray) -> Params:
        """Rows (client, ...) of some clients.

        Raises
        ------
        DamageError
            If a row is not as it was written.
        """
        found = {name: torch.empty(len(clients), *p.shape, dtype=p.dtype) for name, p in self.first.items()}
        idle = torch.from_numpy(self.slot[clients] < 0)
        for name, p in found.items():
            p[idle] = self.first[name]
        parts = _bytes(found)
        for i in np.flatnonzero(~idle.numpy()):
            c = int(clients[i])
            if self.slots.read(int(self.slot[c]), [part[i] for part in parts]) != self.check[c]:
                raise DamageError(
                    f"the run is damaged: {self.slots.path} does not hold what was written of client {c}. Remove the "
                    "run and run again."
                )
        return {name: p.to(self.device) for name, p in found.items()}

    def changed(self, clients: np.ndarray, rows: Params) -> Kept:
        """With other rows of some clients."""
        parts = _bytes({name: rows[name].to("cpu", p.dtype) for name, p in self.first.items()})
        slot, check = self.slot.copy(), self.check.copy()
        slot[clients] = self.slots.free(len(clients))
        with _guard.written(self.slots.path):
            for i, c in enumerate(clients):
                check[c] = self.slots.write(int(slot[c]), [part[i] for part in parts])
        return Kept(self.slots, slot, check, self.first, self.device)

    def saved(self) -> tuple[Tensor, Tensor, Params]:
        """What to remember in order to find the rows again, which are brought to the disk."""
        self.slots.sync()
        return torch.from_numpy(self.slot), torch.from_numpy(self.check.view(np.int32)), self.first

    def commit(self) -> None:
        """Leave these rows as they are until others are committed: a state on disk names them."""
        self.slots.committed = self


Clients = Mapping[str, "Tensor"] | Kept
"""Rows of all clients (client, ...)."""


def _bytes(params: Params) -> list[np.ndarray]:
    """Bytes (client, byte) of each parameter's rows."""
    rows = (p.detach().contiguous().numpy().reshape(len(p), math.prod(p.shape[1:])) for p in params.values())
    return [p.view(np.uint8) for p in rows]


def where(job: Job, *rows: Params) -> Job:
    """The job, which keeps rows on disk only if those of all clients, before and after a round, need it."""
    size = sum(p.nbytes for parts in rows for p in parts.values())
    return job if job.room is not None and 2 * job.clients * size > job.room else replace(job, kept=None)


def equal(job: Job, name: str, first: Params) -> Clients:
    """The same row for each client; on disk if the job keeps rows there.

    Parameters
    ----------
    job : Job
    name : str
        Of the file.
    first : Params (...)
    """
    if not first:
        return {}
    if job.kept is None and job.device.type == "cpu":
        return Rows.equal(first, job.clients)
    if job.kept is None:
        return {name: p.expand(job.clients, *p.shape).clone() for name, p in first.items()}
    first = {name: p.detach().cpu().clone() for name, p in first.items()}
    job.kept.mkdir(exist_ok=True)
    slots = Slots(job.kept / f"{name}.npy", first, new=True)
    none = np.full(job.clients, -1, np.int64)
    return Kept(slots, none, np.zeros(job.clients, np.uint32), first, job.device)


def given(job: Job, name: str, rows: Mapping[str, Tensor]) -> Any:
    """Given rows (client, ...); on disk if the job keeps rows there."""
    found = equal(job, name, {of: p[0] for of, p in rows.items()}) if job.kept and rows else dict(rows)
    if isinstance(found, Kept):
        first = _bytes({of: p.unsqueeze(0) for of, p in found.first.items()})
        for low in range(0, job.clients, _BLOCK):
            block = {of: p[low : low + _BLOCK].cpu() for of, p in rows.items()}
            differs = [(own != one).any(1) for own, one in zip(_bytes(block), first, strict=True)]
            if len(own := np.flatnonzero(np.any(differs, axis=0))):
                found = found.changed(low + own, {of: p[own] for of, p in block.items()})
    return found


def taken(of: Clients, clients: np.ndarray) -> Callable[[str], Tensor]:
    """Rows of some clients by name, to be read at once."""
    if isinstance(of, Rows):
        return lambda name: of.take(name, clients)
    return of.rows(clients).__getitem__ if isinstance(of, Kept) else lambda name: _take(of[name], clients)


def copies(of: Clients, clients: np.ndarray) -> Params:
    """Rows of some clients, to be changed at will."""
    return of.rows(clients) if isinstance(of, Kept | Rows) else {name: p[clients] for name, p in of.items()}


def changed(job: Job, of: Clients, clients: np.ndarray, rows: Params) -> Any:
    """With other rows of some clients."""
    if isinstance(of, Kept):
        return of.changed(clients, rows)
    if not of or (len(clients) == job.clients and (clients[1:] > clients[:-1]).all()):
        return rows
    if job.device.type == "cpu":
        return (of if isinstance(of, Rows) else Rows.of(of)).changed(clients, rows)
    at = torch.from_numpy(clients).to(job.device)
    return {name: p.index_copy(0, at, rows[name]) for name, p in of.items()}


def saved(of: Clients) -> object:
    """What a state holds of rows."""
    return of.saved() if isinstance(of, Kept) else dict(of)


def restored(job: Job, parts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Rows as :func:`saved` gave them, by name, of files in a folder; those in memory may come to the disk.

    Raises
    ------
    DamageError
        If a file is missing or cut off.
    """
    in_memory = {name: part for name, part in parts.items() if not isinstance(part, tuple)}
    at = where(job, *({name: p[0] for name, p in part.items()} for part in in_memory.values()))
    found = {name: given(at, name, part) for name, part in in_memory.items()}
    return found | {name: _opened(job, folder / f"{name}.npy", *parts[name]) for name in parts.keys() - found.keys()}


def _opened(job: Job, path: Path, slot: Tensor, check: Tensor, first: Params) -> Kept:
    first, of = {name: p.cpu() for name, p in first.items()}, slot.cpu().numpy()
    slots = Slots(path, first, new=False) if path.is_file() else None
    if slots is None or slots.number <= of.max():
        raise DamageError(f"the run is damaged: {path} is missing or cut off. Remove the run and run again.")
    found = Kept(slots, of, check.cpu().numpy().view(np.uint32), first, job.device)
    found.commit()
    return found


def _take(p: Tensor, clients: np.ndarray) -> Tensor:
    """Rows of some clients; a view if they are consecutive."""
    if len(clients) and len(clients) == clients[-1] - clients[0] + 1 and (np.diff(clients) == 1).all():
        return p[clients[0] : clients[-1] + 1]
    return p[clients]
