"""Client rows: parameters of all clients between rounds, in memory or on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl.disk_rows import DiskRows, is_expanded, unused_slots
from fedstat.fl.job import Job
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


class ClientRows(Protocol):
    """Immutable rows (client, ...) of all clients; updating returns a new version.

    :func:`create` and :func:`restore` decide between memory and disk. In memory, rows are stacked in one tensor per
    parameter. When a round updates only some clients, the CPU moves them to slots, so that the rows of the other
    clients are not copied; a GPU, which has less memory, stacks them again.
    """

    disk_bytes: int = 0
    """Bytes of a client's row on disk, 0 in memory."""

    def borrow(self, clients: np.ndarray) -> Mapping[str, Tensor]:
        """Return rows (client, ...) of some clients, perhaps views: read them before the next update."""

    def read(self, clients: np.ndarray) -> Params:
        """Copy rows (client, ...) of some clients, which the caller may change."""

    def updated(self, clients: np.ndarray, rows: Params) -> ClientRows:
        """Return a version with new rows (client, ...) of some clients.

        The version may keep these tensors: do not change them afterwards.
        """

    def saved(self) -> object:
        """Return the part of the rows that the file of a state holds; flush rows that are on disk."""

    def commit(self) -> None:
        """Protect rows on disk, which a committed state names, until another version is committed."""
        return  # the file of a state holds the rows that are in memory


def create(job: Job, rows: Mapping[str, Mapping[str, Tensor]]) -> dict[str, ClientRows]:
    """Create client rows: in memory if two versions of all rows fit into the memory budget, else on disk.

    Parameters
    ----------
    job : Job
    rows : mapping from str to Params (client, ...)
        Rows by the name of their file. Expand a row that all clients have: it is then stored once.
    """
    size = sum(p[0].nbytes for params in rows.values() for p in params.values())
    folder = job.rows_folder if job.room is not None and 2 * job.clients * size > job.room else None
    return {
        name: DiskRows.create(folder / f"{name}.npy", params, job.device) if folder and params else StackedRows(params)
        for name, params in rows.items()
    }


def restore(job: Job, saved: Mapping[str, Any], folder: Path) -> dict[str, ClientRows]:
    """Restore rows from what :meth:`ClientRows.saved` returned, by the name of the file in a folder.

    Rows in memory move to the disk if they do not fit into the memory budget.

    Raises
    ------
    DamageError
        If a file is missing or truncated.
    """
    in_memory = {name: part for name, part in saved.items() if not isinstance(part, tuple)}
    on_disk = {name: part for name, part in saved.items() if isinstance(part, tuple)}
    opened = {name: DiskRows.reopen(folder / f"{name}.npy", part, job.device) for name, part in on_disk.items()}
    return {**create(job, in_memory), **opened}


@dataclass(frozen=True, eq=False)
class StackedRows(ClientRows):
    """Client rows in one tensor (client, ...) per parameter.

    Parameters
    ----------
    params : mapping from str to Tensor (client, ...)
    """

    params: Mapping[str, Tensor] = field(default_factory=dict)

    def borrow(self, clients: np.ndarray) -> Mapping[str, Tensor]:
        """Return rows of some clients, by name when they are read."""
        return _Selection(self.params, clients)

    def read(self, clients: np.ndarray) -> Params:
        """Copy rows of some clients."""
        return {name: p[clients] for name, p in self.params.items()}

    def updated(self, clients: np.ndarray, rows: Params) -> ClientRows:
        """Return a version with new rows of some clients."""
        if not self.params:
            return self
        first = next(iter(self.params.values()))
        if _are_all(clients, len(first)):
            return StackedRows(rows)
        if first.device.type == "cpu":
            return SlotRows.of(self.params, len(first)).updated(clients, rows)
        index = torch.from_numpy(clients).to(first.device)
        return StackedRows({name: p.index_copy(0, index, rows[name]) for name, p in self.params.items()})

    def saved(self) -> Params:
        """Return the tensors."""
        return dict(self.params)


class SlotRows(ClientRows):
    """Client rows in slots of memory: versions share the slots of rows that are equal.

    Parameters
    ----------
    slots : _Slots
    slot : int array (client,)
        Number of each client's slot.

    Examples
    --------
    >>> old = SlotRows.of({"w": torch.zeros(3, 2)}, 3)
    >>> new = old.updated(np.array([1]), {"w": torch.ones(1, 2)})
    >>> old.read(np.array([1]))["w"], new.read(np.array([1]))["w"]
    (tensor([[0., 0.]]), tensor([[1., 1.]]))
    """

    def __init__(self, slots: _Slots, slot: np.ndarray) -> None:
        self.slots, self.slot = slots, slot
        slots.versions.add(self)

    @classmethod
    def of(cls, params: Mapping[str, Tensor], n_clients: int) -> SlotRows:
        """Copy stacked rows into slots; a row expanded to all clients takes one slot."""
        if is_expanded(params):
            first = {name: p[:1] for name, p in params.items()}
            return cls(_Slots(first, 2 * n_clients), np.zeros(n_clients, np.int64))
        return cls(_Slots(params, 2 * n_clients), np.arange(n_clients))

    def __reduce__(self) -> tuple[Any, ...]:
        return StackedRows, (self.saved(),)  # without the rows of other versions

    def borrow(self, clients: np.ndarray) -> Mapping[str, Tensor]:
        """Return rows of some clients, by name when they are read."""
        return _Selection(self.slots.params, self.slot[clients])

    def read(self, clients: np.ndarray) -> Params:
        """Copy rows of some clients."""
        return {name: p[self.slot[clients]] for name, p in self.slots.params.items()}

    def updated(self, clients: np.ndarray, rows: Params) -> ClientRows:
        """Return a version with new rows of some clients."""
        if _are_all(clients, len(self.slot)):
            return StackedRows(rows)
        free, slot = self.slots.free(len(clients)), self.slot.copy()
        for name, p in self.slots.params.items():
            p.index_copy_(0, torch.from_numpy(free), rows[name])
        slot[clients] = free
        return SlotRows(self.slots, slot)

    def saved(self) -> Params:
        """Stack the rows."""
        return self.read(np.arange(len(self.slot)))


class _Slots:
    """Slots for rows, more than there are clients; a slot takes up memory when a row is first written to it.

    Parameters
    ----------
    params : mapping from str to Tensor (row, ...)
        Rows of the first slots.
    number : int
    """

    def __init__(self, params: Mapping[str, Tensor], number: int) -> None:
        self.params, self.versions = params, WeakSet[SlotRows]()
        self._enlarge(number)

    def _enlarge(self, number: int) -> None:
        """Copy the rows to more slots."""
        larger = {name: p.new_empty(number, *p.shape[1:]) for name, p in self.params.items()}
        for name, p in self.params.items():
            larger[name][: len(p)] = p
        self.params, self.number = larger, number

    def free(self, n: int) -> np.ndarray:
        """Return n slots that no version names, so that writing to them changes no version."""
        free = unused_slots(self.versions, self.number)
        if len(free) < n:  # the caller holds many versions
            self._enlarge(self.number + max(n, self.number))
            return self.free(n)
        return free[:n]


class _Selection(Mapping[str, "Tensor"]):
    """Rows of tensors by name, views of them if the rows are consecutive."""

    def __init__(self, params: Mapping[str, Tensor], rows: np.ndarray) -> None:
        self._params = params
        is_range = len(rows) and (np.diff(rows) == 1).all()
        self._rows = slice(int(rows[0]), int(rows[-1]) + 1) if is_range else rows

    def __getitem__(self, name: str) -> Tensor:
        return self._params[name][self._rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._params)

    def __len__(self) -> int:
        return len(self._params)


def _are_all(clients: np.ndarray, n_clients: int) -> bool:
    """Return True if the clients are all clients in their order."""
    return len(clients) == n_clients and bool((np.diff(clients) > 0).all())
