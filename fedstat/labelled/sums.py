"""Matrix of a layer, sums over clients or rows, and correlation matrix, from which statistics are computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat._utils import labels as _labels
from fedstat._utils.check import few, numpy_of
from fedstat._utils.lazy import xr
from fedstat.labelled.layer import Layer, Weights, precision, read_layer, row_slices
from fedstat.stats import icc as _icc
from fedstat.stats.moments import Moments, broken_units, power, require_memory, rescaled, safe_blas, scaled_moments

_Scaled = tuple[Moments, Any]
"""Moments, and the exponents (unit,) of the powers of two that divide the units."""


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
    for rows in row_slices(z, str(z.dims[0])):
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
