"""Samples of all clients, in memory, on disk or as bytes, and their batches."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from copy import copy
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils import labels, streams
from fedstat._utils.lazy import torch, xr
from fedstat.data import arrays
from fedstat.data.targets import Task
from fedstat.fl import naming

if TYPE_CHECKING:
    from torch import Tensor


_BLOCK = 1 << 24  # bytes that are read at a time
_MAPPED = 1 << 26  # bytes read of a memory map before its pages are released
_HUGE_PAGE = 1 << 21  # bytes that the system may map in order to read one: a huge page
_PAGEOUT = 21  # Linux's MADV_PAGEOUT, which keeps what was written to a private map


class Images:
    """Rows of images that are scaled when read, as :attr:`fedstat.fl.batches.Rows.x`.

    They take a quarter of the memory of float32 images, and give equal numbers.

    Parameters
    ----------
    values : uint8 Tensor (sample, ...)
    scaling : (Tensor, Tensor)
        Factor and shift, see :class:`fedstat.data.arrays.Scaling`.
    """

    def __init__(self, values: Tensor, scaling: tuple[Tensor, Tensor]) -> None:
        self.values, self._scaling = values, scaling
        self.shape, self.device = values.shape, values.device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Any) -> Tensor:
        return _scale(self.values[rows], self._scaling)

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """Return scaled rows, as ``Tensor.index_select`` does."""
        return _scale(self.values.index_select(dim, rows), self._scaling)

    def part(self, rows: Any) -> Images:
        """Return some rows, unscaled."""
        return Images(self.values[rows], self._scaling)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows, block by block."""
        step = max(1, _BLOCK // (4 * math.prod(self.shape[1:])))
        for low in range(0, len(self), step):
            yield self[low : low + step]


class Stored:
    """Rows of samples that are read from their source on demand, as :attr:`fedstat.fl.batches.Rows.x`.

    Parameters
    ----------
    source : Variable (client, sample, ...) or (sample, ...)
    lead : int
        Number of dims that count samples.
    index : int array (row,)
        Flat position of each row among the source's samples.
    device : torch.device
        Device of the samples that are read.
    """

    def __init__(self, source: xr.Variable, lead: int, index: np.ndarray, device: torch.device) -> None:
        self._source, self._lead, self.index, self.device = source, lead, index, device
        self._scaling = _scaling(source, source.ndim - lead, torch.device("cpu"))
        self._pages = _Pages(source)
        self.shape = torch.Size((len(index), *source.shape[lead:]))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: Any) -> Tensor:
        """Read samples of one row, a slice, or an array of rows of any shape; ValueError if they are not finite."""
        index = self.index[rows.cpu().numpy() if isinstance(rows, torch.Tensor) else rows]
        samples = _scale(_as_tensor(self._values(index.reshape(-1))), self._scaling)
        return samples.view(*index.shape, *self.shape[1:]).to(self.device)

    def part(self, rows: np.ndarray) -> Stored:
        """Return some rows, unread."""
        selected = copy(self)
        selected.index, selected.shape = self.index[rows], torch.Size((len(rows), *self.shape[1:]))
        return selected

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows, block by block."""
        step = max(1, _BLOCK // max(1, int(np.prod(self.shape[1:])) * self._source.dtype.itemsize))
        for low in range(0, len(self), step):
            yield self[low : low + step]

    def _values(self, index: np.ndarray) -> np.ndarray:
        if not len(index):
            return np.empty((0, *self.shape[1:]), self._source.dtype)
        places = np.unravel_index(index, self._source.shape[: self._lead])
        by_dim, positions = zip(*(np.unique(place, return_inverse=True) for place in places), strict=True)
        block = self._source[tuple(span(numbers) for numbers in by_dim)].to_numpy()
        values = block[positions]
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            bad = int(np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1))[0])
            dims = zip(self._source.dims, places, strict=False)
            where = ", ".join(f"{dim} {place[bad]}" for dim, place in dims)
            raise ValueError(f"x must be finite, but at {where} of the data (counted from 0) it is not")
        self._pages.read(by_dim[0])
        return values


class _Pages:
    """Pages of a memory map that were read; they count as this process's memory until they are released."""

    def __init__(self, source: xr.Variable) -> None:
        self._map, self._size = _find_map(source), 0
        self._sample_bytes = source.nbytes // len(source)

    def read(self, numbers: np.ndarray) -> None:
        """Count the bytes of ``numbers``, read along the first dim, and release the pages if there are many.

        The system maps neighboring pages too: scattered numbers count a huge page each, or more.
        """
        scattered = not isinstance(span(numbers), slice)
        self._size += len(numbers) * (max(self._sample_bytes, _HUGE_PAGE) if scattered else self._sample_bytes)
        if self._map is not None and self._size > _MAPPED:
            self._size = 0
            self._map[0].madvise(self._map[1])


def on_disk(x: xr.DataArray) -> bool:
    """Return True if samples are in a store or a memory map, not in memory."""
    return not x.variable._in_memory or _find_map(x.variable) is not None


def in_memory(values: np.ndarray, source: xr.DataArray, device: torch.device) -> Tensor | Images:
    """Return samples of a source as networks take them: float32, or integers unchanged.

    Samples of these types are not copied. Images of bytes with a known mean and standard deviation stay bytes, except
    on a GPU.
    """
    samples, scaling = _as_tensor(values).to(device), _scaling(source, values.ndim - 1, device)
    if scaling is None:
        return samples
    return Images(samples, scaling) if device.type == "cpu" else _scale(samples, scaling)


def take_rows(x: Any, rows: Tensor) -> Tensor:
    """Return samples, in memory, for an array of rows of any shape."""
    return x.index_select(0, rows.flatten()).view(*rows.shape, *x.shape[1:])  # faster than x[rows]


def select_samples(x: Any, rows: Any) -> Any:
    """Return samples of some rows, in their present form: Tensor, Images or Stored."""
    return x[rows] if isinstance(x, torch.Tensor) else x.part(rows)


def _as_tensor(values: np.ndarray) -> Tensor:
    tensor = torch.from_numpy(np.require(values, requirements=("C", "W")))
    return tensor.float() if tensor.is_floating_point() else tensor


def _scaling(source: xr.DataArray | xr.Variable, ndim: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return factor and shift that standardize images of bytes with ``ndim`` dims each; None for other samples."""
    if source.dtype != np.uint8 or ndim < 2 or not {"mean", "sd"} <= source.attrs.keys():
        return None
    factor, shift = arrays.scaling(source)
    return torch.from_numpy(factor).to(device), torch.from_numpy(shift).to(device)


def _scale(values: Tensor, scaling: tuple[Tensor, Tensor] | None) -> Tensor:
    return values if scaling is None else values.float().mul_(scaling[0]).sub_(scaling[1])


def span(numbers: np.ndarray) -> slice | np.ndarray:
    """Return numbers without repeats, as a slice if they are consecutive and ascending."""
    if len(numbers) and (np.diff(numbers) == 1).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1)
    return numbers


def _find_map(source: xr.Variable) -> tuple[mmap.mmap, int] | None:
    """Return the memory map that holds a variable, and the advice (madvise) that releases its pages."""
    values = source.data if source._in_memory else None
    shared = True
    while isinstance(values, np.ndarray):
        shared &= not isinstance(values, np.memmap) or values.mode != "c"
        values = values.base
    if not isinstance(values, mmap.mmap):
        return None
    return values, (mmap.MADV_DONTNEED if shared else _PAGEOUT)


class Rows(NamedTuple):
    """Samples of all clients, one client after the other, without padding.

    Attributes
    ----------
    x : Tensor (sample, ...), Images or Stored
        float32 (integer inputs, such as token ids, stay integers).
    y : Tensor
        int64 (sample,) class numbers; in regression float32 (sample, target).
    start : int array (client + 1,)
        Client c holds rows start[c] to start[c + 1].
    numbers : int array (client,), optional
        The clients' numbers among all clients, if the rows are those of some clients only.
    """

    x: Any
    y: Tensor
    start: np.ndarray
    numbers: np.ndarray | None = None

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples of each client."""
        return np.diff(self.start)

    @property
    def ids(self) -> np.ndarray:
        """Numbers (client,) that name the clients' random streams."""
        return np.arange(len(self.start) - 1) if self.numbers is None else self.numbers


def part(data: Rows, clients: np.ndarray) -> Rows:
    """Return samples of some clients, with the numbers that name their random streams unchanged."""
    rows = np.concatenate([np.arange(data.start[c], data.start[c + 1]) for c in clients])
    start = np.concatenate([[0], np.cumsum(data.sizes[clients])])
    return Rows(select_samples(data.x, rows), data.y[rows], start, data.ids[clients])


def load_clients(data: Rows, clients: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Load samples of some clients; return them and the clients' rows in them. Data in memory stay as they are."""
    if not isinstance(data.x, Stored):
        return data, clients
    selected = part(data, clients)
    return selected._replace(x=selected.x[:]), np.arange(len(clients))


def digest(*parts: Rows) -> str:
    """Return a fingerprint of data sets, by which a run recognizes its data."""
    fingerprint = sha256()
    for rows in parts:
        for a in (rows.x, rows.y, rows.start):
            fingerprint.update(str(tuple(a.shape)).encode())
            for block in a.blocks() if isinstance(a, Stored | Images) else (a,):
                values = block.cpu().numpy() if isinstance(block, torch.Tensor) else block
                fingerprint.update(np.ascontiguousarray(values).data)
    return fingerprint.hexdigest()[:16]


def count_equal(train: Rows, test: Rows) -> int:
    """Count test samples that equal a training sample of some client in x, by a hash of each sample.

    Images are compared as they are stored, other samples as networks take them.
    """
    return int(np.isin(_hashes(test.x), _hashes(train.x)).sum())


def _hashes(x: Any) -> np.ndarray:
    """Return a hash of every sample, int64 (sample,); hashes of two processes differ."""
    blocks = x.blocks() if isinstance(x, Stored) else (x.values if isinstance(x, Images) else x,)
    return np.fromiter((hash(row.tobytes()) for block in blocks for row in block.cpu().numpy()), np.int64, len(x))


class Schedule(NamedTuple):
    """Batches of some clients, by descending number of samples: step s concerns the first ``live[s]`` clients.

    Attributes
    ----------
    rows : int64 Tensor (step, client, batch)
        Rows of the samples; positions past the end of a batch hold row 0 with weight 0.
    weight : float32 Tensor (step, client, batch)
        1 / (samples in this batch), so that the batch's loss is their mean.
    live : int array (step,)
        Number of clients that still have a batch at this step.
    """

    rows: Tensor
    weight: Tensor
    live: np.ndarray


def rows_of(
    data: xr.Dataset, subset: str, device: torch.device, *, stored: bool = False, task: Task = "classification"
) -> Rows:
    """Return samples of one subset ("train", "test", ...) of a federated data set.

    Parameters
    ----------
    data : Dataset
        Either dense, x (client, sample, ...) and y (client, sample), or sample-major with a coordinate
        ``client`` (sample). A coordinate ``split`` (sample) names the subset; without it every sample is "train".
    subset : str
    device : torch.device
    stored : bool
        Leave x on disk, to be read when clients train.
    task : {"classification", "regression"}
        In regression y holds real numbers, and may have one more dim: several targets.

    Raises
    ------
    ValueError
        If x or y is missing, inputs or targets are not finite, y does not fit the task, or a client has no sample in
        this subset.
    """
    for name in ("x", "y"):
        if name not in data:
            raise ValueError(f"the data must hold variables x and y, but {name} is missing; it has {list(data)}")
    names, source, places = _clients(data), data["x"], np.arange(data.sizes.get("sample", 0))
    if stored:
        data = data.drop_vars("x")
    if "split" in data.coords:
        places = np.flatnonzero(data["split"].to_numpy() == subset)
        data = data.isel(sample=span(places))
    elif subset != "train":
        places = places[:0]
        data = data.isel(sample=places)
    order: Any = None
    lead = tuple(dim for dim in ("client", "sample") if dim in source.dims)
    if "client" in source.dims:
        start = np.arange(len(names) + 1) * len(places)
        index = (np.arange(len(names))[:, None] * source.sizes["sample"] + places).reshape(-1)
    else:
        code = np.searchsorted(names, data["client"].to_numpy())
        order = span(np.argsort(code, kind="stable"))
        start = np.concatenate([[0], np.cumsum(np.bincount(code, minlength=len(names)))])
        index = places[order]
    y = _real_targets(data["y"], lead) if task == "regression" else _numbers(labels.classes("y", data["y"], lead))
    y_rows = torch.from_numpy(y.reshape(-1, *y.shape[len(lead) :]) if order is None else y[order]).to(device)
    if not len(names):
        raise ValueError("the data must have at least 1 client, but got 0. Check how the clients were selected.")
    empty = np.flatnonzero(np.diff(start) == 0)
    if empty.size:
        nobody = "" if len(places) else " Divide every client's: fedstat.data.partition.train_test(data, test=0.2)"
        raise ValueError(
            f"every client needs {subset} samples, but client(s) {names[empty][:5].tolist()} have none.{nobody}"
        )
    if stored:
        return Rows(Stored(source.transpose(*lead, ...).variable, len(lead), index, device), y_rows, start)
    x = data["x"].transpose(*lead, ...).to_numpy()
    x_rows = x.reshape(-1, *x.shape[2:]) if order is None else x[order]
    if np.issubdtype(x_rows.dtype, np.floating) and not np.isfinite(x_rows).all():
        bad = int(np.flatnonzero(~np.isfinite(x_rows).reshape(len(x_rows), -1).all(1))[0])
        client_of = names[np.searchsorted(start, bad, side="right") - 1]
        raise ValueError(f"x must be finite, but client {client_of} has NaN or infinite values in its {subset} samples")
    return Rows(in_memory(x_rows, data["x"], device), y_rows, start)


def _clients(data: xr.Dataset) -> np.ndarray:
    """Return labels of the clients, sorted if the data are sample-major."""
    if "client" in data["x"].dims:
        return naming.sample_clients(data)
    if "client" not in data.coords or data["client"].dims != ("sample",):
        raise ValueError(
            f"x must have a dim client, or the data a coordinate client (sample), but got dims {data['x'].dims} and "
            f"coordinates {list(data.coords)}. Deal the samples to clients, as fedstat.data.partition.iid(data, "
            "clients=10) does, and divide them by partition.train_test."
        )
    return np.unique(naming.sample_clients(data))


def _numbers(y: np.ndarray) -> np.ndarray:
    """Return class numbers as int64; ValueError for names."""
    if y.dtype.kind not in "iubf":
        raise ValueError(f"y must hold class numbers 0, 1, ..., but got {y.flat[0]!r}. Number the classes.")
    return y.astype(np.int64)


def _real_targets(y: xr.DataArray, lead: tuple[str, ...]) -> np.ndarray:
    """Return targets (..., target) as float32; ValueError if they are not finite or have several further dims."""
    if not set(lead) <= set(y.dims) or y.ndim > len(lead) + 1:
        raise ValueError(
            f"y must hold one number for each sample, with the dims {', '.join(lead)}, or several, with one more dim, "
            f"but has {y.dims}"
        )
    values = y.transpose(*lead, ...).to_numpy().astype(np.float32)
    values = values if values.ndim > len(lead) else values[..., None]
    if not np.isfinite(values).all():
        bad = np.argwhere(~np.isfinite(values).all(-1))[0].tolist()
        where = ", ".join(f"{dim} {i}" for dim, i in zip(lead, bad, strict=True))
        raise ValueError(
            f"y must be finite as float32, but at {where} of the data (counted from 0) it is not. Remove the sample, "
            "or scale the targets."
        )
    return values


def schedule(
    data: Rows,
    clients: Sequence[int] | np.ndarray,
    *,
    epochs: int,
    batch_size: int | None,
    seed: int,
    key: tuple[int | str, ...],
    steps: int | None = None,
) -> Schedule:
    """Shuffle each client's samples anew in every epoch and cut them into batches; the last may be smaller.

    A client's shuffle depends only on (seed, key, its number): not on other clients, the chunk or the device.

    Parameters
    ----------
    data : Rows
    clients : sequence of int
        By descending number of samples.
    epochs : int
    batch_size : int or None
        None takes all of a client's samples as one batch.
    seed : int
    key : tuple
        Names the stream, usually ("batches", round).
    steps : int, optional
        Number of batches of every client, instead of epochs.
    """
    sizes = data.sizes[np.asarray(clients)]
    size = np.minimum(sizes if batch_size is None else batch_size, sizes)
    per_epoch = -(-sizes // size)  # batches per epoch
    repeats = np.full(len(sizes), epochs) if steps is None else -(-steps // per_epoch)
    n = repeats * per_epoch if steps is None else np.full(len(sizes), steps)
    rows = np.full((len(sizes), n.max(), size.max()), -1)
    ids = data.ids
    for i, c in enumerate(clients):
        rng = streams.generator(seed, *key, int(ids[c]))
        shuffled = rng.permuted(np.tile(np.arange(data.start[c], data.start[c + 1]), (repeats[i], 1)), axis=1)
        full = per_epoch[i] * size[i]
        if full > sizes[i]:
            shuffled = np.pad(shuffled, ((0, 0), (0, full - sizes[i])), constant_values=-1)
        rows[i, : n[i], : size[i]] = shuffled.reshape(-1, size[i])[: n[i]]
    rows = np.ascontiguousarray(rows.swapaxes(0, 1))
    real = rows >= 0
    weight = real / np.maximum(real.sum(-1, keepdims=True), 1)
    device = data.x.device
    return Schedule(
        torch.from_numpy(np.maximum(rows, 0)).to(device),
        torch.from_numpy(weight.astype(np.float32)).to(device),
        (n > np.arange(n.max())[:, None]).sum(1),
    )


def pad_rows(data: Rows, clients: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return all rows of some clients, padded with each client's last row: rows and bool ``live`` (client, sample)."""
    sizes, first = data.sizes[clients], data.start[clients]
    index = np.arange(sizes.max())
    rows = first[:, None] + np.minimum(index, sizes[:, None] - 1)
    device = data.x.device
    return torch.from_numpy(rows).to(device), torch.from_numpy(index < sizes[:, None]).to(device)
