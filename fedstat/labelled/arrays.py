"""From what users hold (arrays, tensors, DataArrays) to what the statistics take, with labels in every error."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from itertools import accumulate, pairwise
from operator import add
from typing import Any, NamedTuple, cast

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.check import numpy_of as numpy_of
from fedstat._utils.lazy import torch, xr
from fedstat.stats import icc as _icc
from fedstat.stats.moments import Moments, broken_units, power, require_memory, rescaled, safe_blas, scaled_moments

_BLOCK = 2**26  # bytes read at once
_ROW = 2**30  # bytes of chunks side by side from which they are read several times, for some clients at a time

Weights = Any
"""(client, unit, weight...): NumPy array, torch tensor, or DataArray with dims ``client`` and ``unit``."""


def layer_matrix(weights: Weights) -> Any:
    """Input of the factor analysis of one layer: the clients' weights with one column a unit (FedFac §4.1).

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...)
        A layer's weights, units second, as torch stores them: (client, out, in) for a dense layer, (client, out, in,
        height, width) for a convolution. Transposed convolutions and embeddings have their units third in torch: move
        the axis, or let :func:`fedstat.read_weights` do it, which also puts the gates of a unit together. In a
        DataArray every dim besides ``client`` and ``unit`` is a weight dim, in any order.

    Returns
    -------
    array, tensor or DataArray (row, unit)
        Rows are (client, weight) pairs, client by client; the kind is that of ``weights``.

    Examples
    --------
    >>> import numpy as np
    >>> layer_matrix(np.zeros((10, 8, 3, 5, 5))).shape
    (750, 8)
    """
    weights = _labels.labelled(weights)
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        refuse_replicates(weights)
        check.numbers("weights", weights)
        others = [d for d in weights.dims if d not in ("client", "unit")]
        return weights.stack(row=["client", *others]).transpose("row", "unit")
    flat = _flat(weights)
    swapped = flat.transpose(1, 2) if is_torch_array(flat) else flat.swapaxes(1, 2)
    return swapped.reshape(-1, flat.shape[1])


class LayerSums(NamedTuple):
    """What clients' weights add up to.

    Attributes
    ----------
    moments : Moments
        Over all clients, or of each, stacked along a first dim client.
    exponent : array (unit,)
        Of the powers of two that the units were divided by, see :func:`fedstat.stats.moments.scaled_moments`.
    units : array (unit,)
        Labels.
    n_clients : int
    agreement : array (unit,)
        ICC2; NaN where there is one client or one weight a unit.
    """

    moments: Moments
    exponent: Any
    units: NDArray[Any]
    n_clients: int
    agreement: NDArray[np.float64]

    @property
    def total(self) -> Moments:
        """Moments over all clients."""
        if self.moments.n.ndim == 0:
            return self.moments
        return reduce(add, (Moments(*one) for one in zip(*self.moments, strict=True)))


def standard(m: Moments, exponent: Any) -> dict[str, Any]:
    """Mean and standard deviation (unit,) of the rows behind moments, by the names that a FactorResult has for them."""
    by, n = numpy_of(power(exponent)), float(m.n)
    deviation = np.sqrt(np.diagonal(numpy_of(m.cross)) / n)
    return {"center": numpy_of(m.mean) * by, "scale": deviation * by}


def sums(weights: Weights) -> LayerSums:
    """Sums over clients; a block of clients is in memory at a time."""
    units, total, alike, n = labels(weights, "unit", 1), None, None, 0
    for names, block in group_blocks(weights):
        for name, one in zip(names, block, strict=True):
            found = _client_moments(one, units, name)
            total = found if total is None else _joined(total, found)
        alike, n = _with(alike, block), n + len(names)
    return LayerSums(*cast(_Scaled, total), units, n, _agreement(alike))


def row_sums(z: Any, units: NDArray[Any]) -> _Scaled:
    """Moments of a matrix (row, unit); of one that Dask holds, chunk by chunk."""
    if not isinstance(z, xr.DataArray):
        found, exponent = scaled_moments(z)
        return name_bad(found, units), exponent
    total: _Scaled | None = None
    for part in _stretches(z, str(z.dims[0])):
        found, exponent = scaled_moments(z[part].to_numpy())
        one = name_bad(found, units), exponent
        total = one if total is None else _joined(total, one)
    return cast(_Scaled, total)


def client_sums(weights: Weights) -> LayerSums:
    """Sums of each client, stacked along a first dim client."""
    units, alike = labels(weights, "unit", 1), None
    require_memory(len(units), all_pairs=False, clients=len(labels(weights, "client", 0)))
    each: list[_Scaled] = []
    for names, block in group_blocks(weights):
        each += [_client_moments(one, units, name) for name, one in zip(names, block, strict=True)]
        alike = _with(alike, block)
    xp = array_namespace(each[0][1])
    top = reduce(xp.maximum, (e for _, e in each))
    aligned = [rescaled(m, e - top) for m, e in each]
    stacked = Moments(*(xp.stack(field) for field in zip(*aligned, strict=True)))
    return LayerSums(stacked, top, units, len(each), _agreement(alike))


_Scaled = tuple[Moments, Any]
"""Moments, and the exponents (unit,) of the powers of two that the units were divided by."""


def _client_moments(w: Any, units: NDArray[Any], client: Any) -> _Scaled:
    """Moments of one client's weights (unit, weight)."""
    found, exponent = scaled_moments(w.T)
    return name_bad(found, units, client), exponent


def _with(total: _icc.Sums | None, block: Any) -> _icc.Sums:
    found = _icc.sums(block.detach() if is_torch_array(block) else block)
    return found if total is None else total + found


def _agreement(total: _icc.Sums | None) -> NDArray[np.float64]:
    t = cast(_icc.Sums, total).units
    few = int(t.n) < 2 or t.profile.shape[-1] < 2
    return np.full(len(t.profile), np.nan) if few else _icc.agreement(cast(_icc.Sums, total))


def _joined(a: _Scaled, b: _Scaled) -> _Scaled:
    top = array_namespace(a[1]).maximum(a[1], b[1])
    return rescaled(a[0], a[1] - top) + rescaled(b[0], b[1] - top), top


def group_blocks(weights: Weights, *, whole: bool = False) -> Iterator[tuple[NDArray[Any], Any]]:
    """Yield (labels, (client, unit, weight)) for groups of clients; for all at once if in memory, or if ``whole``."""
    names = labels(weights, "client", 0)
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        refuse_replicates(weights)
        check.numbers("weights", weights)
        if 0 in weights.shape:
            raise ValueError(f"weights must hold at least one client, unit and weight, but got {dict(weights.sizes)}")
        for part in [slice(None)] if whole else _stretches(weights, "client"):
            block = weights.isel(client=part).load().transpose("client", "unit", ...).values
            yield names[part], block.reshape(*block.shape[:2], -1)
    else:
        yield names, _flat(weights)


def _stretches(data: xr.DataArray, dim: str) -> Iterator[slice]:
    """What to read at a time: all if in memory, else whole chunks, of 64 MB together, or one where it is larger."""
    start, n = 0, data.sizes[dim]
    each = max(1, data.nbytes // n)
    ends = [n] if data.variable._in_memory else _chunk_ends(data, dim, max(1, _ROW // each))
    for end, following in pairwise([*ends, math.inf]):
        if following - start > _BLOCK // each:
            yield slice(start, int(end))
            start = int(end)


def _chunk_ends(data: xr.DataArray, dim: str, few: int) -> list[int]:
    """Where chunks end: those of the store, or those of Dask, after every ``few`` too if others stand beside them."""
    n = data.sizes[dim]
    if data.chunks is None:
        stored = int(data.encoding.get("preferred_chunks", {}).get(dim, 1))
        return [*range(stored, n, stored), n]
    borders = pairwise(accumulate(data.chunksizes[dim], initial=0))
    if all(len(sizes) == 1 for other, sizes in data.chunksizes.items() if other != dim):
        return [end for _, end in borders]
    return [cut for start, end in borders for cut in (*range(start + few, end, few), end)]


def _flat(weights: Any) -> Any:
    weights = check.numbers("weights", weights)
    if weights.ndim < 3 or 0 in weights.shape:
        raise ValueError(
            f"weights must be (client, unit, weight...) with at least one of each, but got shape {tuple(weights.shape)}"
            + (". A matrix (row, unit) goes to fedstat.fa." if weights.ndim == 2 else "")
        )
    return weights.reshape(weights.shape[0], weights.shape[1], -1)


def values_of(z: Any, *, last: str, lazy: bool = False) -> Any:
    """Array or tensor behind ``z``, its dim ``last`` in the last place; what Dask holds as it is, if ``lazy``."""
    z = check.numbers("z", z)
    if isinstance(z, xr.DataArray):
        need_dims(z, last)
        z = z.transpose(..., last)
        return z if lazy and z.chunks is not None and z.size else z.to_numpy()
    return z


def labels(values: Any, dim: str, axis: int) -> NDArray[Any]:
    """Labels of a dim: its coordinate, else positions."""
    check.one_array("weights", values)
    if isinstance(values, xr.DataArray) and dim in values.coords:
        return _labels.complete(f"the coordinate {dim} of weights", values[dim], dim)
    if isinstance(values, xr.DataArray):
        return np.arange(values.sizes.get(dim, 0))
    shape = np.shape(values)
    return np.arange(shape[axis] if len(shape) > abs(axis) - (axis < 0) else 0)


def need_dims(values: xr.DataArray, *dims: str) -> None:
    """Raise ValueError if a dim is missing."""
    if missing := [d for d in dims if d not in values.dims]:
        matrix = "client" in missing and "row" in values.dims
        way_out = "Pass the weights themselves, or this matrix to fedstat.fa" if matrix else "Rename with .rename(...)"
        raise ValueError(f"the DataArray must have dim(s) {missing}, but got {values.dims}. {way_out}.")


def refuse_replicates(weights: Any) -> None:
    """Raise ValueError if there are several models per client."""
    if isinstance(weights, xr.DataArray) and "replicate" in weights.dims:
        raise ValueError(
            "there must be one model per client, but the weights have a dim replicate. To see how much clients differ "
            "beyond the noise between replicates, use fedstat.variance_components(weights), and to split by that, "
            "fedstat.split(weights, method='icc', tau='test'); otherwise select one replicate, or average."
        )


def name_bad(m: Moments, units: NDArray[Any], client: Any = None) -> Moments:
    """Return the moments, or raise ValueError naming the client and units that are not finite."""
    if bad := broken_units(m):
        raise bad_weights(units[bad], client)
    return m


def bad_weights(units: NDArray[Any], client: Any = None) -> ValueError:
    """Error for weights of these units that are NaN or infinite."""
    whose = "the weights" if client is None else f"the weights of client {client!s}"
    return ValueError(
        f"{whose} hold NaN or infinite values, first in unit(s) {few(units)}. "
        "A diverged client is the usual cause: leave it out or lower its learning rate."
    )


def precision(values: Any) -> float:
    """Distance of 1 to the next number that an array or tensor can hold; that of float64 for whole numbers."""
    if is_torch_array(values):
        return float(torch.finfo(values.dtype if values.is_floating_point() else torch.float64).eps)
    return float(np.finfo(values.dtype if values.dtype.kind == "f" else float).eps)


def less_mean(x: NDArray[np.float64], eps: float) -> NDArray[np.float64]:
    """Values (client, ...) less their mean over clients; exactly 0 for a client that is at the mean up to rounding.

    Parameters
    ----------
    x : array (client, ...)
    eps : float
        Relative rounding error of ``x``.

    Examples
    --------
    >>> less_mean(np.array([[0.1], [0.1], [0.1]]), 2e-16).ravel()
    array([0., 0., 0.])
    """
    found = x - x.mean(0)
    with np.errstate(over="ignore"):  # what is infinite then is looked at number by number, too
        square, whole = (np.square(np.linalg.norm(a.reshape(len(x), -1), axis=1)) for a in (found, x))
        small = np.flatnonzero(square <= 4 * eps**2 * whole.sum())
    if small.size:
        noise = (np.abs(found[small]) <= 2 * eps * np.abs(x).max(0)).reshape(len(small), -1).all(1)
        found[small[noise]] = 0
    return np.asarray(found)


def correlation_matrix(r: Any) -> Any:
    """Check a given correlation matrix; NaN rows mark dead units. It is made symmetric to the last digit."""
    given = numpy_of(r)
    a, tol = given.astype(float), max(1e-8, 8 * precision(given))
    if a.shape[0] != a.shape[1]:
        raise ValueError(f"a correlation matrix must be square, but got shape {a.shape}. Pass corr=False for raw rows.")
    live = ~np.isnan(np.diagonal(a))
    core = a[np.ix_(live, live)]
    if not np.isfinite(core).all():
        raise ValueError("a correlation matrix must be finite between live units, but got NaN or infinite values")
    if (worst := float(np.abs(core - core.T).max(initial=0))) > tol:
        raise ValueError(f"a correlation matrix must be symmetric, but got |R - R'| up to {worst:.3g}")
    if (worst := float(np.abs(np.diagonal(core) - 1).max(initial=0))) > tol:
        where = int(np.flatnonzero(live)[np.abs(np.diagonal(core) - 1).argmax()])
        raise ValueError(
            f"a correlation matrix must have a unit diagonal, but got R[{where}, {where}] = {a[where, where]:g}. "
            "Pass raw rows with corr=False to have them standardised; mark dead units by NaN rows."
        )
    slack = tol * max(1, len(core))
    if (smallest := _smallest(core, slack)) < -slack:
        raise ValueError(
            f"a correlation matrix must be positive semi-definite, but got smallest eigenvalue {smallest:.3g}. "
            "Pairwise deletion of missing values is the usual cause: compute R from complete rows."
        )
    r = r if is_torch_array(r) else np.asarray(r, dtype=float)
    return r if np.array_equal(core, core.T) else (r + r.T) / 2


def _smallest(r: NDArray[np.float64], slack: float) -> float:
    """Smallest eigenvalue, or -slack if a Cholesky factor shows in an eighth of the time that it is no smaller."""
    try:
        with safe_blas(len(r)):
            np.linalg.cholesky(r + slack * np.eye(len(r)))
    except np.linalg.LinAlgError:
        return float(np.linalg.eigvalsh(r)[0])
    return -slack
