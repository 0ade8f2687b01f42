"""The record of a layer, which verbs pass on: users' weights, checked once, with their labels and a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat._utils.lazy import torch, xr

_BLOCK = 2**26  # bytes read at once
_ROW = 2**30  # bytes of adjacent chunks; larger rows of chunks are read again for some clients at a time

KNOWN, UNLIKE = "known", "unlike_rounds"
"""Attribute of a baseline that a run holds, with the dims and clients of the weights; and of weights, True if shared
and personal units changed over unlike numbers of rounds."""

Weights = Any
"""(client, unit, weight...): NumPy array, torch tensor, or DataArray with dims ``client`` and ``unit``."""

Form = Literal["weights", "replicates", "vectors", "rows", "correlation"]
"""Form of a layer: weights, replicates of weights, vectors of clients, or a matrix (row, unit)."""
_DIMS: dict[str, tuple[str, ...]] = {
    "weights": ("client", "unit"), "replicates": ("client", "replicate", "unit"), "vectors": ("client",),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Layer:
    """Checked weights of one layer, from :func:`read_layer`, which the verbs pass on.

    Attributes
    ----------
    data : array, tensor or DataArray
        Real numbers with at least one of each dim; or a matrix (row, unit).
    labels : dict from dim to array
        Labels of clients, replicates and units; a matrix (row, unit) has no clients.
    baseline : array or tensor (unit, weight) or (client, unit, weight), or None
        Values to subtract; of vectors without units, or "mean". Of replicates and matrices, as it was passed.
    is_given : bool
        True if a user passed the baseline of weights, False if a run holds it.
    """

    data: Any
    labels: Mapping[str, NDArray[Any]]
    baseline: Any = None
    is_given: bool = False

    @property
    def clients(self) -> NDArray[Any]:
        """Labels of the clients."""
        return self.labels["client"]

    @property
    def units(self) -> NDArray[Any]:
        """Labels of the units."""
        return self.labels["unit"]

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Attributes that a run gives its weights."""
        return self.data.attrs if isinstance(self.data, xr.DataArray) else {}

    @property
    def is_lazy(self) -> bool:
        """True if the weights are not in memory."""
        return isinstance(self.data, xr.DataArray) and not self.data.variable._in_memory

    @cached_property
    def weights(self) -> Any:
        """Weights in memory as an array or tensor: dims of the labels, then one dim of all others."""
        return self._flat(self.data)

    @cached_property
    def _changes(self) -> Any:
        return _as_double(self.weights) - _as_double(self.baseline)

    @property
    def common_baseline(self) -> Any:
        """Baseline of all clients, (unit, weight); None if there is none, or one for each client."""
        return None if self.baseline is None or self.baseline.ndim == 3 else self.baseline

    def load(self) -> Layer:
        """Return the layer with its weights in memory."""
        return replace(self, data=self.data.compute()) if self.is_lazy else self

    def blocks(self, *, subtract_common: bool = True) -> Iterator[tuple[slice, Any]]:
        """Yield (clients, weights minus the baseline (client, unit, weight)) per block; one block if in memory.

        Without ``subtract_common``, :attr:`common_baseline` is not subtracted.
        """
        is_common = self.common_baseline is not None
        if not self.is_lazy and self.baseline is not None and not is_common:
            yield slice(None), self._changes
            return
        for clients in row_slices(self.data, "client") if self.is_lazy else [slice(None)]:
            block = self._flat(self.data.isel(client=clients).load()) if self.is_lazy else self.weights
            if self.baseline is not None and (subtract_common or not is_common):
                block = _as_double(block) - _as_double(self.baseline if is_common else self.baseline[clients])
            yield clients, block

    def unlabeled_blocks(self, tick: Callable[[int], object] = int) -> Iterator[Any]:
        """Yield the blocks without their clients, and without subtracting :attr:`common_baseline`."""
        for _, block in self.blocks(subtract_common=False):
            yield block
            tick(len(block))

    def of_units(self, units: slice) -> Any:
        """Return the weights of some units as an array or tensor (client, replicate, unit, weight)."""
        return self._flat(self.data.isel(unit=units).load()) if self.is_lazy else self.weights[:, :, units]

    def _flat(self, data: Any) -> Any:
        values = data.transpose(*self.labels, ...).values if isinstance(data, xr.DataArray) else data
        return values.reshape(*values.shape[: len(self.labels)], -1)


def read_layer(data: Any, baseline: Any = None, form: Form = "weights") -> Layer:
    """Check the weights of a layer, and the baseline of weights, and find the labels of clients and units.

    Raises
    ------
    ValueError
        If the weights are no real numbers, dims are missing or empty, or there are several models of a client in a form
        other than "replicates". If the baseline has another shape, is not finite, or is not correlated with the
        weights.
    """
    if form == "correlation" or (form == "rows" and not _is_weights(data)):
        return _read_rows(data, baseline, is_correlation=form == "correlation")
    if form == "replicates":
        data = _dense(_labels.labelled(data, stack=("client", "replicate")))
    name = "vectors" if form == "vectors" else "weights"
    values = check.numbers(name, data)
    values = values.detach() if is_torch_array(values) else values  # no verb needs an autograd graph
    dims = _DIMS.get(form, _DIMS["weights"])
    if isinstance(values, xr.DataArray):
        if form == "replicates":
            _require_replicates(values)
        elif form != "vectors":
            refuse_replicates(values)
        need_dims(values, *dims)
    is_array = form == "vectors" or not isinstance(values, xr.DataArray)  # a DataArray may have one weight per unit
    if 0 in values.shape or (is_array and values.ndim <= len(dims)):
        hint = " A matrix (row, unit) goes to fedstat.fa." if form == "weights" and values.ndim == 2 else ""
        hint = " Pass biases as one weight per unit: w[..., None]." if form == "replicates" else hint
        got = dict(values.sizes) if isinstance(values, xr.DataArray) else f"shape {tuple(values.shape)}"
        rest = "..." if form == "vectors" else "weight..."
        raise ValueError(f"{name} must be ({', '.join(dims)}, {rest}) with at least one of each, but got {got}.{hint}")
    layer = Layer(values, {dim: labels(values, dim, axis) for axis, dim in enumerate(dims)})
    if form == "replicates" or baseline is None or (form == "vectors" and isinstance(baseline, str)):
        return replace(layer, baseline=baseline)
    is_given = form != "vectors" and not getattr(baseline, "attrs", {}).get(KNOWN)
    return replace(layer, baseline=baseline_of(baseline, layer), is_given=is_given)


def _is_weights(z: Any) -> bool:
    if isinstance(z, xr.DataArray):
        return z.ndim > 2 and {"client", "unit"} <= {*z.dims}
    return np.ndim(z) > 2


def _read_rows(z: Any, baseline: Any, *, is_correlation: bool) -> Layer:
    """Check a matrix (row, unit); a Dask array stays lazy, unless it is a correlation matrix."""
    z = check.numbers("z", z)
    if isinstance(z, xr.DataArray):
        need_dims(z, "unit")
    units = labels(z, "unit", -1)
    if isinstance(z, xr.DataArray):
        z = (_rows_as_columns(z) if is_correlation else z).transpose(..., "unit")
        z = z if not is_correlation and z.chunks is not None and z.size else z.to_numpy()
    if z.ndim != 2:
        raise ValueError(
            f"z must have two dims (row, unit), but got shape {tuple(z.shape)}. "
            "Use fedstat.layer_matrix(weights), or select one round or layer first."
        )
    return Layer(z, {"unit": units}, baseline)


def _rows_as_columns(r: xr.DataArray) -> xr.DataArray:
    """Put the rows of a correlation matrix in the order of its columns, if both have labels."""
    rows = next((d for d in r.dims if d != "unit" and d in r.coords), None)
    row_labels = [] if rows is None else r[rows].to_numpy().tolist()
    if "unit" not in r.coords or row_labels == [*range(len(row_labels))]:
        return r
    units = r["unit"].to_numpy().tolist()
    return r.isel({rows: _labels.order("each row of the correlation matrix", "unit", row_labels, units)})


def _dense(weights: Any) -> Any:
    """Return nested lists as an array; raise ValueError that names a client whose replicates have another shape."""
    if not isinstance(weights, list | tuple):
        return weights
    check.refuse_sources("weights", weights)
    check.unmasked("weights", weights)
    shapes = [[np.shape(w) for w in client] for client in weights]
    for c, client_shapes in enumerate(shapes):
        for r, shape in enumerate(client_shapes):
            if shape != shapes[0][0] or len(client_shapes) != len(shapes[0]):
                raise ValueError(
                    f"clients must have equally many replicates, all of one shape: client 0 has {len(shapes[0])} of "
                    f"shape {shapes[0][0]}, but client {c} has {len(client_shapes)}, and replicate {r} has {shape}"
                )
    return np.array([[np.asarray(w) for w in client] for client in weights])


def _as_double(values: Any) -> Any:
    return values.double() if is_torch_array(values) else values.astype(float, copy=False)


def load_small(weights: Any) -> Any:
    """Load a lazy array that :meth:`Layer.blocks` reads in one block, so that it is read once; return others as is."""
    is_lazy = isinstance(weights, xr.DataArray) and not weights.variable._in_memory
    return weights.compute() if is_lazy and weights.nbytes <= _BLOCK else weights


def row_slices(data: xr.DataArray, dim: str) -> Iterator[slice]:
    """Yield slices of a dim of lazy data to read: complete chunks of up to 64 MB, or one larger chunk."""
    start, row_bytes = 0, max(1, data.nbytes // data.sizes[dim])
    for end, following in pairwise([*_chunk_ends(data, dim, max(1, _ROW // row_bytes)), math.inf]):
        if following - start > _BLOCK // row_bytes:
            yield slice(start, int(end))
            start = int(end)


def _chunk_ends(data: xr.DataArray, dim: str, most: int) -> list[int]:
    """Return the ends of chunks of the store or of Dask; if other dims are chunked, cut after ``most`` rows, too."""
    n = data.sizes[dim]
    if data.chunks is None:
        stored = int(data.encoding.get("preferred_chunks", {}).get(dim, 1))
        return [*range(stored, n, stored), n]
    borders = pairwise(accumulate(data.chunksizes[dim], initial=0))
    if all(len(sizes) == 1 for other, sizes in data.chunksizes.items() if other != dim):
        return [end for _, end in borders]
    return [cut for start, end in borders for cut in (*range(start + most, end, most), end)]


def labels(values: Any, dim: str, axis: int) -> NDArray[Any]:
    """Return the labels of a dim of an array, tensor or DataArray: its coordinate, else positions."""
    if isinstance(values, xr.DataArray) and dim in values.coords:
        return _labels.require_known(dim, _labels.complete(f"the coordinate {dim} of weights", values[dim], dim))
    n = values.sizes.get(dim, 0) if isinstance(values, xr.DataArray) else values.shape[axis] if values.ndim else 0
    return np.arange(n)


def need_dims(values: xr.DataArray, *dims: str) -> None:
    """Raise ValueError if a dim is missing."""
    if missing := [d for d in dims if d not in values.dims]:
        matrix = "client" in missing and "row" in values.dims
        hint = "Pass the weights themselves, or this matrix to fedstat.fa" if matrix else "Rename with .rename(...)"
        raise ValueError(f"the DataArray must have dim(s) {missing}, but got {values.dims}. {hint}.")


def refuse_replicates(weights: Any) -> None:
    """Raise ValueError if there are several models per client."""
    if isinstance(weights, xr.DataArray) and "replicate" in weights.dims:
        raise ValueError(
            "there must be one model per client, but the weights have a dim replicate. To separate client differences "
            "from training noise, use fedstat.variance_components(weights); to split by this, use "
            "fedstat.split(weights, method='icc', tau='test'). Otherwise select one replicate, or average over them."
        )


def _require_replicates(weights: xr.DataArray) -> None:
    if "replicate" not in weights.dims:
        raise ValueError(
            "weights must have a dim replicate, of several models of every client, but got the dims "
            f"{', '.join(map(str, weights.dims))}. Train every client twice, on halves of its data, and join the "
            "weights by xarray.concat([a, b], 'replicate')."
        )


def precision(values: Any) -> float:
    """Return the machine epsilon of an array or tensor; for integers, of float64."""
    if is_torch_array(values):
        return float(torch.finfo(values.dtype if values.is_floating_point() else torch.float64).eps)
    return float(np.finfo(values.dtype if values.dtype.kind == "f" else float).eps)


def less_mean(x: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Subtract the mean over clients; a client at the mean up to rounding is set to exactly 0.

    Parameters
    ----------
    x : array (client, ...)
        Values of the clients.
    eps : float
        Relative rounding error of ``x``.

    Examples
    --------
    >>> less_mean(np.array([[0.1], [0.1], [0.1]]), 2e-16).ravel()
    array([0., 0., 0.])
    """
    deviation = x - x.mean(0)
    with np.errstate(over="ignore"):  # clients whose square overflows are compared number by number below
        square, total = (np.square(np.linalg.norm(a.reshape(len(x), -1), axis=1)) for a in (deviation, x))
        small = np.flatnonzero(square <= 4 * eps**2 * total.sum())
    if small.size:
        noise = (np.abs(deviation[small]) <= 2 * eps * np.abs(x).max(0)).reshape(len(small), -1).all(1)
        deviation[small[noise]] = 0
    return np.asarray(deviation)


_N_COMPARED = 8  # clients whose mean is compared with the baseline
_RELATED = 3.0  # standard errors of a correlation above 0


def baseline_of(baseline: Any, layer: Layer) -> Any:
    """Return a baseline as an array (unit, weight) or (client, unit, weight) in the library of the weights.

    A baseline of vectors has no dim unit. The layer's own baseline, which is checked, is returned as it is.

    Raises
    ------
    ValueError
        If the baseline has another shape, is not finite, or is not correlated with the weights.
    """
    if baseline is layer.baseline:
        return baseline
    dims, clients, of_units = [*layer.labels], layer.data, "unit" in layer.labels
    if isinstance(baseline, xr.DataArray) and baseline.attrs.get(KNOWN):
        order = [dim for dim in dict.fromkeys([*dims, *clients.dims]) if dim in baseline.dims]
        values = baseline.transpose(*order).to_numpy()
        return values.reshape(*values.shape[: len({*order} & {*dims})], -1)
    baseline = check.numbers("baseline", baseline)
    baseline = baseline.detach() if is_torch_array(baseline) else baseline
    if isinstance(clients, xr.DataArray):
        clients = clients.isel(client=slice(_N_COMPARED)).transpose(*dims, ...)
        if isinstance(baseline, xr.DataArray):
            baseline = align(baseline, clients.isel(client=0, drop=True))
        clients = clients.to_numpy()
    if isinstance(baseline, xr.DataArray) and of_units:
        need_dims(baseline, "unit")
        baseline = baseline.transpose("unit", ...)
    baseline, shape = baseline if is_torch_array(baseline) else numpy_of(baseline), tuple(clients.shape[1:])
    if tuple(baseline.shape) != shape:
        raise ValueError(
            f"baseline must have the shape of one client's weights, {shape}, but got {tuple(baseline.shape)}. "
            "Pass parameters common to all clients; subtract client-specific baselines from the weights."
        )
    baseline = baseline.reshape(*shape[: len(dims) - 1], -1)
    if is_torch_array(clients):
        baseline = array_namespace(clients).asarray(baseline, device=device_of(clients))
    else:
        baseline = numpy_of(baseline)
    if not (finite := np.isfinite(numpy_of(baseline))).all():
        units = f", first in unit(s) {few(layer.units[~finite.all(axis=1)])}" if of_units else ""
        raise ValueError(f"baseline holds NaN or infinite values{units}")
    if of_units:
        require_related(baseline, clients[:_N_COMPARED].reshape(-1, *baseline.shape))
    return baseline


def require_related(baseline: Any, w: Any) -> None:
    """Raise ValueError if the baseline is not correlated with the weights: subtracting it would create agreement.

    A baseline of n independent entries, drawn independently of the weights, has a correlation with them of variance
    1/n, even if neighboring weights are similar. A baseline without variance is not tested.

    Parameters
    ----------
    baseline : array (unit, weight)
        Baseline of a layer.
    w : array (client, unit, weight)
        Weights of some clients; the mean of up to eight is used.

    Raises
    ------
    ValueError
        If the correlation with this mean is not three standard errors above 0.
    """
    values = numpy_of(baseline).astype(float).ravel()
    mean = numpy_of(w[:_N_COMPARED]).astype(float).mean(axis=0).ravel()
    if np.ptp(values) == 0 or not np.isfinite(mean).all() or np.ptp(mean) == 0:
        return
    r = float(np.corrcoef(values / np.abs(values).max(), mean / np.abs(mean).max())[0, 1])
    if r * math.sqrt(len(mean)) < _RELATED:
        raise ValueError(
            f"baseline must correlate with the weights, but r = {r:.2f}; it would create agreement. Pass this run's "
            "initial parameters."
        )


def align(baseline: xr.DataArray, client_weights: xr.DataArray) -> xr.DataArray:
    """Put the baseline's dims and labels in the order of one client's weights."""
    if set(baseline.dims) != set(client_weights.dims):
        raise ValueError(
            f"baseline must have the dims of one client's weights, {client_weights.dims}, but got {baseline.dims}. "
            "It is common to all clients and rounds: select one checkpoint first."
        )
    labels_by_dim = {
        d: [x[d].to_numpy().tolist() for x in (baseline, client_weights)]  # without a coordinate, positions
        for d in map(str, client_weights.dims)
        if d in baseline.coords
    }
    positions = {d: _labels.order("baseline", d, *values) for d, values in labels_by_dim.items()}
    return baseline.isel(positions).transpose(*client_weights.dims)
