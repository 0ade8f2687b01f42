"""Rows of clients in memory, of which versions share what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from fedstat._later import torch

if TYPE_CHECKING:
    from torch import Tensor


def unnamed(versions: Iterable[Any], number: int) -> np.ndarray:
    """Which of the slots, of so many, no version has in its ``slot`` (client,), where negative numbers are none."""
    used = np.zeros(number, bool)
    for version in versions:
        used[version.slot[version.slot >= 0]] = True
    return np.flatnonzero(~used)


class _Slots:
    """Places for rows, more than there are clients; memory that no row was written to is not taken up."""

    def __init__(self, like: Mapping[str, Tensor], number: int) -> None:
        self.of = {name: row.new_empty(number, *row.shape) for name, row in like.items()}
        self.number = number
        self.versions: WeakSet[Rows] = WeakSet()

    def free(self, n: int) -> np.ndarray:
        """Numbers of n slots that no version names, so that writing them changes none."""
        found = unnamed(self.versions, self.number)[:n]
        if len(found) < n:  # many versions are in use
            more = max(n, self.number)
            self.of = {name: torch.cat([p, p.new_empty(more, *p.shape[1:])]) for name, p in self.of.items()}
            self.number += more
            return self.free(n)
        return found


class Rows(Mapping[str, "Tensor"]):
    """Rows of all clients after some round; a change is a new version, and this one stays as it is.

    ``rows[name]`` is a copy, (client, ...).

    Parameters
    ----------
    slots : _Slots
    slot : int array (client,)
        Number of each client's slot.

    Examples
    --------
    >>> old = Rows.equal({"w": torch.zeros(2)}, 3)
    >>> new = old.changed(np.array([1]), {"w": torch.ones(1, 2)})
    >>> old["w"][1], new["w"][1], new.take("w", np.array([1, 2])).shape
    (tensor([0., 0.]), tensor([1., 1.]), torch.Size([2, 2]))
    """

    def __init__(self, slots: _Slots, slot: np.ndarray) -> None:
        self.slots, self.slot = slots, slot
        slots.versions.add(self)

    @classmethod
    def equal(cls, row: Mapping[str, Tensor], clients: int) -> Rows:
        """The same row (...) for each client."""
        slots = _Slots(row, 2 * clients)
        for name, p in slots.of.items():
            p[0] = row[name]
        return cls(slots, np.zeros(clients, np.int64))

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> Rows:
        """Rows (client, ...)."""
        n = len(next(iter(rows.values())))
        slots = _Slots({name: p[0] for name, p in rows.items()}, 2 * n)
        for name, p in slots.of.items():
            p[:n] = rows[name]
        return cls(slots, np.arange(n))

    def __getitem__(self, name: str) -> Tensor:
        return self.slots.of[name][self.slot]

    def __iter__(self) -> Iterator[str]:
        return iter(self.slots.of)

    def __len__(self) -> int:
        return len(self.slots.of)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows.of, (dict(self),)

    def take(self, name: str, clients: np.ndarray) -> Tensor:
        """Rows (client, ...) of some clients, to be read at once: perhaps a view of what will change."""
        slot = self.slot[clients]
        if len(slot) and (np.diff(slot) == 1).all():
            return self.slots.of[name][slot[0] : slot[-1] + 1]
        return self.slots.of[name][slot]

    def rows(self, clients: np.ndarray) -> dict[str, Tensor]:
        """The same by name, copied."""
        return {name: p[self.slot[clients]] for name, p in self.slots.of.items()}

    def changed(self, clients: np.ndarray, rows: Mapping[str, Tensor]) -> Rows:
        """With other rows of some clients."""
        free, slot = self.slots.free(len(clients)), self.slot.copy()
        for name, p in self.slots.of.items():
            p.index_copy_(0, torch.from_numpy(free), rows[name])
        slot[clients] = free
        return Rows(self.slots, slot)
