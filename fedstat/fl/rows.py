"""Rows of clients in memory, of which versions share what they have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedstat._later import torch

if TYPE_CHECKING:
    from torch import Tensor

# What a tensor takes besides its entries, as the bytes that are copied into new memory in that time.
_TENSOR = 20_000


class Rows(Mapping[str, "Tensor"]):
    """Rows of all clients after some round, each a tensor; a change is a new version, and this one stays as it is.

    ``rows[name]`` is a copy, (client, ...).

    Parameters
    ----------
    of : mapping from name to sequence (client,) of Tensor (...)

    Examples
    --------
    >>> old = Rows({"w": torch.zeros(3, 2).unbind()})
    >>> new = old.changed(np.array([1]), {"w": torch.ones(1, 2)})
    >>> old["w"][1], new["w"][1], new.take("w", np.array([1, 2])).shape
    (tensor([0., 0.]), tensor([1., 1.]), torch.Size([2, 2]))
    """

    def __init__(self, of: Mapping[str, Sequence[Tensor]]) -> None:
        self._of = of

    def __getitem__(self, name: str) -> Tensor:
        return torch.stack(list(self._of[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def take(self, name: str, clients: np.ndarray) -> Tensor:
        """Rows (client, ...) of some clients, copied."""
        of = self._of[name]
        return torch.stack([of[c] for c in clients.tolist()]) if len(clients) else of[0].new_empty(0, *of[0].shape)

    def changed(self, clients: np.ndarray, rows: Mapping[str, Tensor]) -> Rows:
        """With other rows of some clients."""
        found = {name: list(of) for name, of in self._of.items()}
        for name, new in found.items():
            for client, row in zip(clients.tolist(), rows[name], strict=True):
                new[client] = row.clone()  # alone, so that it goes when it is replaced
        return Rows(found)


def sharing_pays(of: Mapping[str, Tensor], changed: np.ndarray) -> bool:
    """Whether to share the rows of clients that do not change costs less than to copy them."""
    copied = sum(p[0].nbytes * (len(p) - len(changed)) for p in of.values())
    return copied > _TENSOR * len(of) * len(changed)
