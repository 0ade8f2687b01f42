"""Rows of clients in memory, of which versions share what they have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedstat._later import torch

if TYPE_CHECKING:
    from torch import Tensor

_LARGE = 1 << 14  # bytes of a row from which a tensor of its own, some 600 bytes, hardly counts
_TENSOR = 20_000  # bytes that are copied into new memory in the time that it takes to make one


class Rows(Mapping[str, "Tensor"]):
    """Rows of all clients after some round; a change is a new version, and this one stays as it is.

    ``rows[name]`` is for reading: (client, ...), a copy where rows are shared.

    Parameters
    ----------
    of : mapping from name to Tensor (client, ...) or sequence (client,) of Tensor (...)
        Together, or each row alone, to be shared with other versions.

    Examples
    --------
    >>> old = Rows.equal({"w": torch.zeros(2)}, 3)
    >>> new = old.changed(np.array([1]), {"w": torch.ones(1, 2)})
    >>> old["w"][1], new["w"][1], new.take("w", np.array([1, 2])).shape
    (tensor([0., 0.]), tensor([1., 1.]), torch.Size([2, 2]))
    """

    def __init__(self, of: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        self._of = of

    @classmethod
    def equal(cls, row: Mapping[str, Tensor], clients: int) -> Rows:
        """The same row (...) for each client."""
        return cls(
            {
                name: [p.clone()] * clients if _is_large(p) else p.expand(clients, *p.shape).clone()
                for name, p in row.items()
            }
        )

    def __getitem__(self, name: str) -> Tensor:
        of = self._of[name]
        return of if isinstance(of, torch.Tensor) else torch.stack(list(of))

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def take(self, name: str, clients: np.ndarray) -> Tensor:
        """Rows (client, ...) of some clients, perhaps as a view."""
        of = self._of[name]
        return of[_span(clients)] if isinstance(of, torch.Tensor) else _stacked(of, clients)

    def rows(self, clients: np.ndarray) -> dict[str, Tensor]:
        """The same by name, copied."""
        return {
            name: of[clients] if isinstance(of, torch.Tensor) else _stacked(of, clients)
            for name, of in self._of.items()
        }

    def changed(self, clients: np.ndarray, rows: Mapping[str, Tensor]) -> Rows:
        """With other rows of some clients."""
        return Rows({name: _changed(of, clients, rows[name]) for name, of in self._of.items()})


def _changed(of: Tensor | Sequence[Tensor], clients: np.ndarray, rows: Tensor) -> Tensor | list[Tensor]:
    if isinstance(of, torch.Tensor) and not _sharing_pays(of, len(clients)):
        return of.index_copy(0, torch.from_numpy(clients).to(of.device), rows)
    new = dict(zip(clients.tolist(), rows, strict=True))
    if isinstance(of, torch.Tensor):
        return [new.get(c, row).clone() for c, row in enumerate(of)]  # alone, so that each goes when it is replaced
    return [new[c].clone() if c in new else row for c, row in enumerate(of)]


def _stacked(of: Sequence[Tensor], clients: np.ndarray) -> Tensor:
    return torch.stack([of[c] for c in clients.tolist()]) if len(clients) else of[0].new_empty(0, *of[0].shape)


def _is_large(row: Tensor) -> bool:
    return row.device.type == "cpu" and row.nbytes >= _LARGE


def _sharing_pays(of: Tensor, changed: int) -> bool:
    """Whether to share the rows that do not change costs less than to copy them."""
    return _is_large(of[0]) and of[0].nbytes * (len(of) - changed) > _TENSOR * changed


def _span(clients: np.ndarray) -> slice | np.ndarray:
    """Consecutive clients as a slice."""
    if len(clients) and len(clients) == clients[-1] - clients[0] + 1 and (np.diff(clients) == 1).all():
        return slice(int(clients[0]), int(clients[-1]) + 1)
    return clients
