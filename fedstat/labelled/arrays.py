"""Users' arrays, tensors and DataArrays as arrays for statistics, minus a baseline; errors name clients and units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple, cast

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

Weights = Any
"""(client, unit, weight...): NumPy array, torch tensor, or DataArray with dims ``client`` and ``unit``."""


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
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        refuse_replicates(weights)
        check.numbers("weights", weights)
        weight_dims = [d for d in weights.dims if d not in ("client", "unit")]
        return weights.stack(row=["client", *weight_dims]).transpose("row", "unit")
    flat = _flat(weights)
    swapped = flat.transpose(1, 2) if is_torch_array(flat) else flat.swapaxes(1, 2)
    return swapped.reshape(-1, flat.shape[1])


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


def sums(weights: Weights, baseline: Any = None) -> LayerSums:
    """Sum a layer's weights minus a baseline over clients, with one block of clients in memory at a time."""
    units, total, icc_total, n = labels(weights, "unit", 1), None, None, 0
    for names, block in group_blocks(weights, baseline_of(baseline, weights)):
        for name, client_weights in zip(names, block, strict=True):
            moments = _client_moments(client_weights, units, name)
            total = moments if total is None else _add(total, moments)
        icc_total, n = _add_icc_sums(icc_total, block), n + len(names)
    return LayerSums(*cast(_Scaled, total), units, n, _agreement(icc_total))


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


def client_sums(weights: Weights, baseline: Any = None) -> LayerSums:
    """Sum a layer's weights minus a baseline within each client; the moments are stacked along a first dim client."""
    units, n_clients, icc_total = labels(weights, "unit", 1), len(labels(weights, "client", 0)), None
    require_memory(len(units), all_pairs=False, clients=n_clients)
    stacked: Moments | None = None
    exponents: list[Any] = []
    for names, block in group_blocks(weights, baseline_of(baseline, weights)):
        for name, client_weights in zip(names, block, strict=True):
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
    block_sums = _icc.sums(block.detach() if is_torch_array(block) else block)
    return block_sums if total is None else total + block_sums


def _agreement(total: _icc.Sums | None) -> NDArray[np.float64]:
    t = cast(_icc.Sums, total).units
    too_few = int(t.n) < 2 or t.profile.shape[-1] < 2
    return np.full(len(t.profile), np.nan) if too_few else _icc.agreement(cast(_icc.Sums, total))


def _add(a: _Scaled, b: _Scaled) -> _Scaled:
    top = array_namespace(a[1]).maximum(a[1], b[1])
    return rescaled(a[0], a[1] - top) + rescaled(b[0], b[1] - top), top


def load_small(weights: Any) -> Any:
    """Load a lazy array that :func:`group_blocks` reads in one block, so that it is read once; return others as is."""
    is_lazy = isinstance(weights, xr.DataArray) and not weights.variable._in_memory
    return weights.compute() if is_lazy and weights.nbytes <= _BLOCK else weights


def group_blocks(
    weights: Weights, baseline: Any = None, *, at_once: bool = False
) -> Iterator[tuple[NDArray[Any], Any]]:
    """Yield (labels, (client, unit, weight)) per block of clients; one block if in memory, or if ``at_once``.

    ``baseline`` (unit, weight) or (client, unit, weight), from :func:`baseline_of`, is subtracted.
    """
    start = 0
    for names, block in _blocks(weights, at_once=at_once):
        of_block = baseline if baseline is None or baseline.ndim == 2 else baseline[start : start + len(names)]
        yield names, block if of_block is None else _as_double(block) - _as_double(of_block)
        start += len(names)


def _as_double(values: Any) -> Any:
    return values.double() if is_torch_array(values) else values.astype(float, copy=False)


def _blocks(weights: Weights, *, at_once: bool) -> Iterator[tuple[NDArray[Any], Any]]:
    names = labels(weights, "client", 0)
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        refuse_replicates(weights)
        check.numbers("weights", weights)
        if 0 in weights.shape:
            raise ValueError(f"weights must hold at least one client, unit and weight, but got {dict(weights.sizes)}")
        for clients in [slice(None)] if at_once else _row_slices(weights, "client"):
            block = weights.isel(client=clients).load().transpose("client", "unit", ...).values
            yield names[clients], block.reshape(*block.shape[:2], -1)
    else:
        yield names, _flat(weights)


def _row_slices(data: xr.DataArray, dim: str) -> Iterator[slice]:
    """Yield slices of a dim to read: all if in memory, else complete chunks of up to 64 MB, or one larger chunk."""
    start, n = 0, data.sizes[dim]
    row_bytes = max(1, data.nbytes // n)
    ends = [n] if data.variable._in_memory else _chunk_ends(data, dim, max(1, _ROW // row_bytes))
    for end, following in pairwise([*ends, math.inf]):
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


def _flat(weights: Any) -> Any:
    weights = check.numbers("weights", weights)
    if weights.ndim < 3 or 0 in weights.shape:
        raise ValueError(
            f"weights must be (client, unit, weight...) with at least one of each, but got shape {tuple(weights.shape)}"
            + (". A matrix (row, unit) goes to fedstat.fa." if weights.ndim == 2 else "")
        )
    return weights.reshape(weights.shape[0], weights.shape[1], -1)


def values_of(z: Any, *, last: str, lazy: bool = False) -> Any:
    """Return the array or tensor behind ``z`` with the dim ``last`` last; if ``lazy``, a Dask array stays lazy."""
    z = check.numbers("z", z)
    if isinstance(z, xr.DataArray):
        need_dims(z, last)
        z = z.transpose(..., last)
        return z if lazy and z.chunks is not None and z.size else z.to_numpy()
    return z


def labels(values: Any, dim: str, axis: int) -> NDArray[Any]:
    """Return the labels of a dim: its coordinate, else positions."""
    check.one_array("weights", values)
    if isinstance(values, xr.DataArray) and dim in values.coords:
        return _labels.require_known(dim, _labels.complete(f"the coordinate {dim} of weights", values[dim], dim))
    if isinstance(values, xr.DataArray):
        return np.arange(values.sizes.get(dim, 0))
    shape = values.shape if hasattr(values, "shape") else check.array("weights", values).shape
    return np.arange(shape[axis] if len(shape) > abs(axis) - (axis < 0) else 0)


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


KNOWN, UNLIKE = "known", "unlike_rounds"
"""Attribute of a baseline that a run holds, with the dims and clients of the weights; and of weights, True if shared
and personal units changed over unlike numbers of rounds."""


def baseline_of(baseline: Any, weights: Weights) -> Any:
    """Return the baseline as an array (unit, weight) or (client, unit, weight) in the library of the weights, or None.

    Raises
    ------
    ValueError
        If the baseline has another shape, is not finite, or is not correlated with the weights.
    """
    if baseline is None:
        return None
    if isinstance(baseline, xr.DataArray) and baseline.attrs.get(KNOWN):
        lead = [dim for dim in ("client", "unit") if dim in baseline.dims]
        values = baseline.transpose(*lead, ...).to_numpy()
        return values.reshape(*values.shape[: len(lead)], -1)
    baseline = check.numbers("baseline", baseline)
    baseline = baseline.detach() if is_torch_array(baseline) else baseline
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        first = weights.isel(client=slice(_N_COMPARED)).transpose("client", "unit", ...)
        if isinstance(baseline, xr.DataArray):
            baseline = align(baseline, first.isel(client=0, drop=True))
        clients = first.to_numpy()
    else:
        clients = check.numbers("weights", weights)
    if isinstance(baseline, xr.DataArray):
        need_dims(baseline, "unit")
        baseline = baseline.transpose("unit", ...).to_numpy()
    shape = tuple(clients.shape[1:])
    if tuple(baseline.shape) != shape:
        raise ValueError(
            f"baseline must have the shape of one client's weights, {shape}, but got {tuple(baseline.shape)}. "
            "Pass parameters common to all clients; subtract client-specific baselines from the weights."
        )
    baseline, clients = baseline.reshape(shape[0], -1), clients.reshape(*clients.shape[:2], -1)
    if is_torch_array(clients):
        baseline = array_namespace(clients).asarray(baseline, device=device_of(clients))
    else:
        baseline = numpy_of(baseline)
    if not (finite := np.isfinite(numpy_of(baseline)).all(axis=1)).all():
        raise ValueError(
            f"baseline holds NaN or infinite values, first in unit(s) {few(labels(weights, 'unit', 1)[~finite])}"
        )
    require_related(baseline, clients)
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
