"""Samples that are not numbers in memory until they are used: images of bytes, and samples on disk."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._later import torch, xr
from fedstat.data import images

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 24  # bytes that are read at a time
_MAPPED = 1 << 26  # bytes read of a memory map before its pages are given back
_AROUND = 1 << 21  # bytes that the system may map for one: a huge page
_PAGEOUT = 21  # Linux's MADV_PAGEOUT, which loses nothing that was written to a private map


class Images:
    """Rows of images that are scaled when asked for, as :attr:`fedstat.fl.batches.Rows.x`.

    They take a quarter of the memory of float32, and give the same numbers.

    Parameters
    ----------
    values : uint8 Tensor (sample, ...)
    scaling : (Tensor, Tensor)
        Factor and shift, see :class:`fedstat.data.images.Scaling`.
    """

    def __init__(self, values: Tensor, scaling: tuple[Tensor, Tensor]) -> None:
        self.values, self._scaling = values, scaling
        self.shape, self.device = values.shape, values.device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Tensor:
        return _scaled(self.values[rows], self._scaling)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """As that of a tensor."""
        return _scaled(self.values.index_select(dim, rows), self._scaling)

    def part(self, rows: Any) -> Images:
        """Only some rows, unscaled."""
        return Images(self.values[rows], self._scaling)

    def blocks(self) -> Iterator[Tensor]:
        """All rows in turn."""
        step = max(1, _BLOCK // (4 * math.prod(self.shape[1:])))
        for low in range(0, len(self), step):
            yield self[low : low + step]


class Stored:
    """Rows of samples that are read when asked for, as :attr:`fedstat.fl.batches.Rows.x`.

    Parameters
    ----------
    source : Variable (client, sample, ...) or (sample, ...)
    lead : int
        Number of dims that count samples.
    at : int array (row,)
        Place of each row among the source's samples, flat.
    device : torch.device
        Where samples are wanted.
    """

    def __init__(self, source: xr.Variable, lead: int, at: np.ndarray, device: torch.device) -> None:
        self._source, self._lead, self.at, self.device = source, lead, at, device
        self._scaling = _scaling(source, source.ndim - lead, torch.device("cpu"))
        self._pages = _Pages(source)
        self.shape = torch.Size((len(at), *source.shape[lead:]))

    def __len__(self) -> int:
        return len(self.at)

    def __getitem__(self, rows: Any) -> Tensor:
        """Samples of one row, a slice, or an array of rows of any shape; ValueError if they are not finite."""
        at = self.at[rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows]
        found = _scaled(_tensor(self._values(at.reshape(-1))), self._scaling)
        return found.view(*at.shape, *self.shape[1:]).to(self.device)

    def part(self, rows: np.ndarray) -> Stored:
        """Only some rows, unread."""
        found = copy(self)
        found.at, found.shape = self.at[rows], torch.Size((len(rows), *self.shape[1:]))
        return found

    def blocks(self) -> Iterator[Tensor]:
        """All rows in turn."""
        step = max(1, _BLOCK // max(1, int(np.prod(self.shape[1:])) * self._source.dtype.itemsize))
        for low in range(0, len(self), step):
            yield self[low : low + step]

    def _values(self, at: np.ndarray) -> np.ndarray:
        if not len(at):
            return np.empty((0, *self.shape[1:]), self._source.dtype)
        places = np.unravel_index(at, self._source.shape[: self._lead])
        wanted, where = zip(*(np.unique(place, return_inverse=True) for place in places), strict=True)
        block = self._source[tuple(span(numbers) for numbers in wanted)].to_numpy()
        values = block[where]
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0])
            dims = zip(self._source.dims, places, strict=False)
            found = ", ".join(f"{dim} {place[bad]}" for dim, place in dims)
            raise ValueError(f"x must be finite, but at {found} of the data (counted from 0) it is not")
        self._pages.read(wanted[0])
        return values


class _Pages:
    """Pages of a memory map that were read, and count as this process's memory until they are given back."""

    def __init__(self, source: xr.Variable) -> None:
        self._map, self._size = _map_of(source), 0
        self._each = source.nbytes // len(source)

    def read(self, numbers: np.ndarray) -> None:
        """Note which places along the first dim were read: whole, as the system maps what is around."""
        self._size += len(numbers) * (self._each if isinstance(span(numbers), slice) else max(self._each, _AROUND))
        if self._map is not None and self._size > _MAPPED:
            self._size = 0
            self._map[0].madvise(self._map[1])


def on_disk(x: xr.DataArray) -> bool:
    """Whether samples are not in memory but in a store, or in a memory map."""
    return not x.variable._in_memory or _map_of(x.variable) is not None


def in_memory(values: np.ndarray, source: xr.DataArray, device: torch.device) -> Tensor | Images:
    """Samples of a source as networks take them: float32, or integers as they are; not copied if they are that already.

    Images of bytes with a known mean and standard deviation stay bytes, except on a GPU.
    """
    found, scaling = _tensor(values).to(device), _scaling(source, values.ndim - 1, device)
    if scaling is None:
        return found
    return Images(found, scaling) if device.type == "cpu" else _scaled(found, scaling)


def taken(x: Any, rows: Tensor) -> Tensor:
    """Samples, in memory, of rows of any shape."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])  # faster than by an index


def part(x: Any, rows: Any) -> Any:
    """Samples of some rows, which stay what they are."""
    return x[rows] if isinstance(x, torch.Tensor) else x.part(rows)


def _tensor(values: np.ndarray) -> Tensor:
    found = torch.from_numpy(np.require(values, requirements=("C", "W")))
    return found.float() if found.is_floating_point() else found


def _scaling(source: xr.DataArray | xr.Variable, ndim: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """How images of bytes, of ``ndim`` dims each, are standardised; None for other samples."""
    if source.dtype != np.uint8 or ndim < 2 or not {"mean", "sd"} <= source.attrs.keys():
        return None
    factor, shift = images.scaling(source)
    return torch.from_numpy(factor).to(device), torch.from_numpy(shift).to(device)


def _scaled(values: Tensor, scaling: tuple[Tensor, Tensor] | None) -> Tensor:
    return values if scaling is None else values.float().mul_(scaling[0]).sub_(scaling[1])


def span(numbers: np.ndarray) -> slice | np.ndarray:
    """Numbers without repeats, as a slice if they are consecutive and ascend."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def _map_of(source: xr.Variable) -> tuple[mmap.mmap, int] | None:
    """The memory map that holds a variable, and how to give back its pages."""
    values = source.data if source._in_memory else None
    shared = True
    while isinstance(values, np.ndarray):
        shared &= not isinstance(values, np.memmap) or values.mode != "c"
        values = values.base
    if not isinstance(values, mmap.mmap):
        return None
    return values, (mmap.MADV_DONTNEED if shared else _PAGEOUT)
