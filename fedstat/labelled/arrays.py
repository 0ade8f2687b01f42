"""Users' arrays, tensors and DataArrays as arrays for statistics, minus a baseline; errors name clients and units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.check import numpy_of as numpy_of
from fedstat._utils.lazy import torch, xr
from fedstat.stats import icc as _icc
from fedstat.stats.moments import Moments, broken_units, power, require_memory, rescaled, safe_blas, scaled_moments

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
        for clients in _row_slices(self.data, "client") if self.is_lazy else [slice(None)]:
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


def layer_matrix(weights: Weights) -> Any:
    """Stack clients' weights into the matrix that factor analysis takes, one column per unit (FedFac §4.1).

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...)
        A layer's weights with units on the second axis, as torch stores them: (client, out, in) for a dense layer,
        (client, out, in, height, width) for a convolution. In a DataArray every dim besides ``client`` and ``unit`` is
        a weight dim, in any order. Transposed convolutions and embeddings have their units on the third axis in torch:
        move this axis, or use :func:`fedstat.read_weights`, which moves it and also joins the gates of a unit.

    Returns
    -------
    array, tensor or DataArray (row, unit)
        One row per pair of client and weight, client by client; the same type of object as ``weights``.

    Raises
    ------
    ValueError
        If ``weights`` are not (client, unit, weight...), a dim is missing, or there are several models per client.

    Examples
    --------
    >>> import numpy as np
    >>> layer_matrix(np.zeros((10, 8, 3, 5, 5))).shape
    (750, 8)
    """
    weights = weights["w"] if isinstance(weights, xr.Dataset) and "w" in weights else _labels.labelled(weights)
    layer = read_layer(weights)
    if isinstance(layer.data, xr.DataArray):
        weight_dims = [d for d in layer.data.dims if d not in ("client", "unit")]
        return layer.data.stack(row=["client", *weight_dims]).transpose("row", "unit")
    w = layer.weights
    swapped = w.transpose(1, 2) if is_torch_array(w) else w.swapaxes(1, 2)
    return swapped.reshape(-1, w.shape[1])


class LayerSums(NamedTuple):
    """Sums over clients from which a layer's factor analysis and agreement follow.

    Attributes
    ----------
    moments : Moments
        Moments over all clients, or of each client, stacked along a first dim client.
    exponent : array (unit,)
        Exponents of the powers of two that divide the units, see :func:`fedstat.stats.moments.scaled_moments`.
    units : array (unit,)
        Labels of the units.
    n_clients : int
        Number of clients.
    agreement : array (unit,) or None
        ICC2; NaN with a single client or a single weight per unit. None if units are not to be compared.
    """

    moments: Moments
    exponent: Any
    units: NDArray[Any]
    n_clients: int
    agreement: NDArray[np.float64] | None

    @property
    def total(self) -> Moments:
        """Moments over all clients."""
        if self.moments.n.ndim == 0:
            return self.moments
        return reduce(add, (Moments(*fields) for fields in zip(*self.moments, strict=True)))


def standard(m: Moments, exponent: Any) -> dict[str, Any]:
    """Return mean and standard deviation (unit,) of the rows behind moments, as fields of FactorResult."""
    factor, n = numpy_of(power(exponent)), float(m.n)
    deviation = np.sqrt(np.diagonal(numpy_of(m.cross)) / n)
    return {"center": numpy_of(m.mean) * factor, "scale": deviation * factor}


def sums(layer: Layer) -> LayerSums:
    """Sum a layer's weights minus the baseline over clients, with one block of clients in memory at a time."""
    total, icc_total = None, None
    for clients, block in layer.blocks():
        for name, client_weights in zip(layer.clients[clients], block, strict=True):
            moments = _client_moments(client_weights, layer.units, name)
            total = moments if total is None else _add(total, moments)
        icc_total = _add_icc_sums(icc_total, block)
    return LayerSums(*cast(_Scaled, total), layer.units, len(layer.clients), _agreement(icc_total))


def sum_groups(layer: Layer, codes: NDArray[Any] | None, tick: Callable[[int], object]) -> list[_icc.Sums]:
    """Return the sums of agreement over the clients of each group, or of all clients, minus the baseline."""
    totals: dict[int, _icc.Sums] = {}
    for clients, block in layer.blocks(subtract_common=False):
        block_codes = np.zeros(1, int) if codes is None else codes[clients]
        for code in np.unique(block_codes).tolist():
            group_sums = _icc.sums(block if codes is None else block[block_codes == code], layer.common_baseline)
            if not group_sums.units.is_finite:
                for name, client_weights in zip(layer.clients[clients], block, strict=True):
                    if (broken := ~np.isfinite(numpy_of(client_weights)).all(axis=1)).any():
                        raise bad_weights(layer.units[broken], name)
                raise bad_weights(layer.units[~np.isfinite(numpy_of(group_sums.units.residual))])
            totals[code] = totals[code] + group_sums if code in totals else group_sums
        tick(len(block))
    return [totals[code] for code in sorted(totals)]


def row_sums(z: Any, units: NDArray[Any]) -> _Scaled:
    """Compute the moments of a matrix (row, unit); of a Dask array, chunk by chunk."""
    if not isinstance(z, xr.DataArray):
        moments, exponent = scaled_moments(z)
        return require_finite(moments, units), exponent
    total: _Scaled | None = None
    for rows in _row_slices(z, str(z.dims[0])):
        moments, exponent = scaled_moments(z[rows].to_numpy())
        scaled = require_finite(moments, units), exponent
        total = scaled if total is None else _add(total, scaled)
    return cast(_Scaled, total)


def client_sums(layer: Layer) -> LayerSums:
    """Sum a layer's weights minus the baseline within each client; the moments are stacked along a first dim client."""
    units, n_clients, icc_total = layer.units, len(layer.clients), None
    require_memory(len(units), all_pairs=False, clients=n_clients)
    stacked: Moments | None = None
    exponents: list[Any] = []
    for clients, block in layer.blocks():
        for name, client_weights in zip(layer.clients[clients], block, strict=True):
            moments, exponent = _client_moments(client_weights, units, name)
            if stacked is None:  # filled in place: a list that is stacked later takes the memory twice
                xp, device = array_namespace(exponent), device_of(exponent)
                shapes = ((n_clients, *field.shape) for field in moments)
                stacked = Moments(*(xp.empty(shape, dtype=xp.float64, device=device) for shape in shapes))
            _assign(stacked, len(exponents), moments)
            exponents.append(exponent)
        icc_total = _add_icc_sums(icc_total, block)
    stacked, top = cast(Moments, stacked), reduce(array_namespace(exponents[0]).maximum, exponents)
    for i, exponent in enumerate(exponents):
        if bool((exponent != top).any()):
            _assign(stacked, i, rescaled(Moments(*(field[i] for field in stacked)), exponent - top))
    return LayerSums(stacked, top, units, n_clients, _agreement(icc_total))


def _assign(stacked: Moments, index: int, moments: Moments) -> None:
    for field, values in zip(stacked, moments, strict=True):
        field[index] = values


_Scaled = tuple[Moments, Any]
"""Moments, and the exponents (unit,) of the powers of two that divide the units."""


def _client_moments(w: Any, units: NDArray[Any], client: Any) -> _Scaled:
    """Compute the moments of one client's weights (unit, weight)."""
    moments, exponent = scaled_moments(w.T)
    return require_finite(moments, units, client), exponent


def _add_icc_sums(total: _icc.Sums | None, block: Any) -> _icc.Sums:
    block_sums = _icc.sums(block)
    return block_sums if total is None else total + block_sums


def _agreement(total: _icc.Sums | None) -> NDArray[np.float64]:
    t = cast(_icc.Sums, total).units
    too_few = int(t.n) < 2 or t.profile.shape[-1] < 2
    return np.full(len(t.profile), np.nan) if too_few else _icc.agreement(cast(_icc.Sums, total))


def _add(a: _Scaled, b: _Scaled) -> _Scaled:
    top = array_namespace(a[1]).maximum(a[1], b[1])
    return rescaled(a[0], a[1] - top) + rescaled(b[0], b[1] - top), top


def load_small(weights: Any) -> Any:
    """Load a lazy array that :meth:`Layer.blocks` reads in one block, so that it is read once; return others as is."""
    is_lazy = isinstance(weights, xr.DataArray) and not weights.variable._in_memory
    return weights.compute() if is_lazy and weights.nbytes <= _BLOCK else weights


def _row_slices(data: xr.DataArray, dim: str) -> Iterator[slice]:
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


def require_finite(m: Moments, units: NDArray[Any], client: Any = None) -> Moments:
    """Return the moments; raise ValueError that names client and units if some are not finite."""
    if bad := broken_units(m):
        raise bad_weights(units[bad], client)
    return m


def bad_weights(units: NDArray[Any], client: Any = None) -> ValueError:
    """Return the error for weights of these units that are NaN or infinite."""
    owner = "the weights" if client is None else f"the weights of client {client!s}"
    return ValueError(
        f"{owner} hold NaN or infinite values, first in unit(s) {few(units)}. "
        "The usual cause is a diverged client: leave it out, or lower its learning rate."
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


def correlation_matrix(r: Any, units: NDArray[Any]) -> Any:
    """Check a correlation matrix and make it exactly symmetric; NaN rows mark constant units."""
    values = numpy_of(r)
    a, tol = values.astype(float), max(1e-8, 8 * precision(values))
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"a correlation matrix must be square, but got shape {a.shape}. Pass corr=False for raw rows.")
    live = ~np.isnan(np.diagonal(a))
    core = a[np.ix_(live, live)]
    if not (finite := np.isfinite(core)).all():
        alone = finite.sum(axis=0) <= 1  # a unit with missing values has a correlation with itself only, in R
        bad = alone if alone.any() else ~finite.all(axis=0)
        raise ValueError(
            f"a correlation matrix must be finite except for constant units, but got NaN or infinity in unit(s) "
            f"{few(units[live][bad])}. The usual cause is a missing value: compute R from complete rows, or leave out "
            "these units. Constant units have NaN on the diagonal, too."
        )
    if (worst := float(np.abs(core - core.T).max(initial=0))) > tol:
        raise ValueError(f"a correlation matrix must be symmetric, but got |R - R'| up to {worst:.3g}")
    if (worst := float(np.abs(np.diagonal(core) - 1).max(initial=0))) > tol:
        i = int(np.flatnonzero(live)[np.abs(np.diagonal(core) - 1).argmax()])
        raise ValueError(
            f"a correlation matrix must have a diagonal of 1, but got {a[i, i]:g} for unit {units[i]}. "
            "Pass raw rows with corr=False to standardize them; mark constant units by NaN rows."
        )
    slack = tol * max(1, len(core))
    if (smallest := _smallest(core, slack)) < -slack:
        raise ValueError(
            f"a correlation matrix must be positive semi-definite, but its smallest eigenvalue is {smallest:.3g}. "
            "The usual cause is pairwise deletion of missing values: compute R from complete rows."
        )
    r = r if is_torch_array(r) else np.asarray(r, dtype=float)
    return r if np.array_equal(core, core.T) else (r + r.T) / 2


def _smallest(r: NDArray[np.float64], slack: float) -> float:
    """Return the smallest eigenvalue, or -slack if a Cholesky factor exists.

    The factor shows that no eigenvalue is below -slack, in an eighth of the time.
    """
    try:
        with safe_blas(len(r)):
            np.linalg.cholesky(r + slack * np.eye(len(r)))
    except np.linalg.LinAlgError:
        return float(np.linalg.eigvalsh(r)[0])
    return -slack


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
