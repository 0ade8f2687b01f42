"""Client rows on disk: a run reads and writes only rows of the selected clients."""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, finalize

import numpy as np

from fedstat._utils import guard
from fedstat._utils.lazy import torch
from fedstat.fl.nets import Params
from fedstat.store import DamageError, journal

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "client_rows"
"""Name of the folder of rows beside the state that names them."""

_BLOCK = 256  # clients whose rows are compared at a time


class DiskRows:
    """Client rows on disk, see :class:`~fedstat.fl.client_rows.ClientRows`.

    A client without a slot has the initial row of all clients.

    Parameters
    ----------
    file : SlotFile
    slot : int array (client,)
        Number of each client's slot, −1 for none.
    crc : uint32 array (client,)
        CRC-32 of each client's row in the file.
    first : Params (...)
        The row of clients without a slot.
    device : torch.device
        Device of the rows when read.
    """

    def __init__(self, file: SlotFile, slot: np.ndarray, crc: np.ndarray, first: Params, device: torch.device) -> None:
        self.file, self.slot, self.crc, self.first, self.device = file, slot, crc, first, device
        self.disk_bytes = file.row.itemsize
        file.versions.add(self)

    @classmethod
    def create(cls, path: Path, params: Mapping[str, Tensor], device: torch.device) -> DiskRows:
        """Write stacked rows (client, ...) that differ from the first one."""
        n_clients = len(next(iter(params.values())))
        first = {name: p[0].detach().cpu().clone() for name, p in params.items()}
        path.parent.mkdir(exist_ok=True)
        file = SlotFile(path, first, new=True)
        rows = cls(file, np.full(n_clients, -1, np.int64), np.zeros(n_clients, np.uint32), first, device)
        common = _bytes({name: p.unsqueeze(0) for name, p in first.items()})
        for low in range(0, 0 if is_expanded(params) else n_clients, _BLOCK):
            block = {name: p[low : low + _BLOCK].cpu() for name, p in params.items()}
            differs = [(part != row).any(1) for part, row in zip(_bytes(block), common, strict=True)]
            if len(index := np.flatnonzero(np.any(differs, axis=0))):
                rows = rows.updated(low + index, {name: p[index] for name, p in block.items()})
        return rows

    @classmethod
    def reopen(cls, path: Path, saved: tuple[Tensor, Tensor, Params], device: torch.device) -> DiskRows:
        """Reopen the rows of a state from what :meth:`saved` returned.

        Raises
        ------
        DamageError
            If the file is missing or truncated.
        """
        slot, crc = (part.cpu().numpy() for part in saved[:2])
        first = {name: p.cpu() for name, p in saved[2].items()}
        file = SlotFile(path, first, new=False) if path.is_file() else None
        if file is None or file.number <= slot.max():
            raise DamageError(f"{path} is damaged: it is missing or truncated. Delete the run and train again.")
        rows = cls(file, slot, crc.view(np.uint32), first, device)
        rows.commit()
        return rows

    def borrow(self, clients: np.ndarray) -> Params:
        """Read rows of some clients at once: a client's row is one record of the file."""
        return self.read(clients)

    def read(self, clients: np.ndarray) -> Params:
        """Read rows of some clients.

        Raises
        ------
        DamageError
            If a row has a wrong checksum.
        """
        rows = {name: torch.empty(len(clients), *p.shape, dtype=p.dtype) for name, p in self.first.items()}
        has_slot = self.slot[clients] >= 0
        for name, p in rows.items():
            p[torch.from_numpy(~has_slot)] = self.first[name]
        parts = _bytes(rows)
        for i in np.flatnonzero(has_slot):
            c = int(clients[i])
            if self.file.read(int(self.slot[c]), [part[i] for part in parts]) != self.crc[c]:
                raise DamageError(
                    f"{self.file.path} is damaged: wrong checksum for client {c}. Delete the run and train again."
                )
        return {name: p.to(self.device) for name, p in rows.items()}

    def updated(self, clients: np.ndarray, rows: Params) -> DiskRows:
        """Write rows of some clients to free slots, and return the version that names them."""
        parts = _bytes({name: rows[name].to("cpu", p.dtype) for name, p in self.first.items()})
        slot, crc = self.slot.copy(), self.crc.copy()
        slot[clients] = self.file.free(len(clients))
        with guard.written(self.file.path):
            for i, c in enumerate(clients):
                crc[c] = self.file.write(int(slot[c]), [part[i] for part in parts])
        return DiskRows(self.file, slot, crc, self.first, self.device)

    def saved(self) -> tuple[Tensor, Tensor, Params]:
        """Flush the rows and return the index that reopens them."""
        self.file.sync()
        return torch.from_numpy(self.slot), torch.from_numpy(self.crc.view(np.int32)), self.first

    def commit(self) -> None:
        """Protect these rows, which a state on disk names, until another version is committed."""
        self.file.committed = self


class SlotFile:
    """A file of slots, each for the row of a client.

    It is in NumPy's .npy format, with a field for each parameter: ``numpy.load(path, mmap_mode="r")`` reads it.

    Parameters
    ----------
    path : Path
    like : Params (...)
        A row, for names, types and shapes.
    new : bool
        Create the file, or empty it.
    """

    def __init__(self, path: Path, like: Params, *, new: bool) -> None:
        self.path = path
        self.row = np.dtype([(name, p.numpy().dtype, tuple(p.shape)) for name, p in like.items()])
        self._file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if new else 0), 0o644)
        finalize(self, os.close, self._file)
        self._offset = len(self._header(0))
        self.number = max(0, path.stat().st_size - self._offset) // self.row.itemsize
        self.versions: WeakSet[DiskRows] = WeakSet()
        self.committed: DiskRows | None = None

    def _header(self, number: int) -> bytes:
        file, descr = io.BytesIO(), np.lib.format.dtype_to_descr(self.row)
        array = {"descr": descr, "fortran_order": False, "shape": (number,)}
        np.lib.format.write_array_header_2_0(file, array)  # NumPy leaves room for any number
        return file.getvalue()

    def free(self, n: int) -> np.ndarray:
        """Return n slots that no version names, so that writing to them changes no version."""
        unused = unused_slots(self.versions, self.number)[:n]
        added = np.arange(self.number, self.number + n - len(unused))
        self.number += len(added)
        return np.concatenate([unused, added])

    def write(self, slot: int, parts: list[np.ndarray]) -> int:
        """Write the bytes of a row and return their CRC-32."""
        crc, position = 0, self._offset + slot * self.row.itemsize
        for part in parts:
            crc, rest = zlib.crc32(part.data, crc), part.data
            while rest:
                n_bytes = os.pwrite(self._file, rest, position)
                rest, position = rest[n_bytes:], position + n_bytes
        return crc

    def read(self, slot: int, parts: list[np.ndarray]) -> int:
        """Read a row into arrays of bytes and return the CRC-32 of what was read."""
        crc, position = 0, self._offset + slot * self.row.itemsize
        for part in parts:
            rest = part.data
            while rest and (n_bytes := os.preadv(self._file, [rest], position)):
                rest, position = rest[n_bytes:], position + n_bytes
            crc = zlib.crc32(part.data, crc)
        return crc

    def sync(self) -> None:
        """Bring the file to the disk."""
        with guard.written(self.path):
            os.pwrite(self._file, self._header(self.number), 0)
        journal.sync(self.path)
        journal.sync(self.path.parent)


def unused_slots(versions: Iterable[Any], number: int) -> np.ndarray:
    """Return the slots below ``number`` that no version names in its ``slot`` (client,), where −1 means no slot."""
    used = np.zeros(number, bool)
    for version in versions:
        used[version.slot[version.slot >= 0]] = True
    return np.flatnonzero(~used)


def is_expanded(params: Mapping[str, Tensor]) -> bool:
    """Return True if the rows (client, ...) of each tensor are one row, expanded."""
    return all(p.stride(0) == 0 for p in params.values())


def _bytes(params: Params) -> list[np.ndarray]:
    """View each tensor (client, ...) as bytes (client, byte)."""
    rows = (p.detach().contiguous().numpy().reshape(len(p), math.prod(p.shape[1:])) for p in params.values())
    return [p.view(np.uint8) for p in rows]
