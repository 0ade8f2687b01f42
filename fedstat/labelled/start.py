"""Weights that all clients started from, and what training changed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from fedstat import _check, _labels
from fedstat._check import few
from fedstat._later import xr
from fedstat.labelled.coerce import Weights, labels, need_dims, numpy_of

_FEW = 8  # clients whose mean is compared with the start
_APART = 3.0  # standard errors


def change(weights: Weights, start: Any) -> Weights:
    """Weights less those that all clients started from; as they are without a start."""
    if start is None:
        return weights
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        one = weights.isel(client=0, drop=True).transpose("unit", ...)
        origin = start_of(start, weights, np.empty(0)).reshape(one.shape)
        require_related(origin, weights.isel(client=slice(_FEW)).transpose("client", *one.dims).to_numpy())
        return weights.astype(float) - xr.DataArray(origin, dims=one.dims)
    weights = _check.numbers("weights", weights)
    origin = start_of(start, weights, weights).reshape(weights.shape[1:])
    require_related(origin, weights)
    return weights.double() - origin.double() if is_torch_array(weights) else weights.astype(float) - origin


def start_of(start: Any, weights: Weights, w: Any) -> Any:
    """The start as an array (unit, weight) of the kind of ``w``."""
    start = _check.numbers("start", start)
    start = start.detach() if is_torch_array(start) else start
    shape = tuple(np.shape(weights))[1:]
    if isinstance(weights, xr.DataArray):
        one = weights.isel(client=0, drop=True).transpose("unit", ...)
        shape = one.shape
        if isinstance(start, xr.DataArray):
            start = _aligned(start, one)
    if isinstance(start, xr.DataArray):
        need_dims(start, "unit")
        start = start.transpose("unit", ...).to_numpy()
    if tuple(start.shape) != tuple(shape):
        raise ValueError(
            f"the start must have the shape of one client's weights, {tuple(shape)}, but got {tuple(start.shape)}. "
            "It is common to all clients; subtract client-specific starts from the weights."
        )
    start = start.reshape(shape[0], -1)
    if is_torch_array(w):
        start = array_namespace(w).asarray(start, device=device_of(w))
    else:
        start = numpy_of(start)
    if not (finite := np.isfinite(numpy_of(start)).all(axis=1)).all():
        raise ValueError(
            f"the start holds NaN or infinite values, first in unit(s) {few(labels(weights, 'unit', 1)[~finite])}"
        )
    return start


def require_related(start: Any, w: Any) -> None:
    """Refuse a start that has nothing to do with the weights: what is subtracted from all clients, all agree on.

    With weights that it was drawn without, a start of independent entries has a correlation of variance 1 over their
    number, however alike neighbouring weights are. Of a start without variance nothing is asked.

    Parameters
    ----------
    start : array (unit, weight)
    w : array (client, unit, weight)
        Of some clients; the mean of up to eight is looked at.

    Raises
    ------
    ValueError
        If the correlation with this mean is not three standard errors above 0.
    """
    origin, mean = numpy_of(start).astype(float).ravel(), numpy_of(w[:_FEW]).astype(float).mean(axis=0).ravel()
    if np.ptp(origin) == 0 or not np.isfinite(mean).all() or np.ptp(mean) == 0:
        return
    r = float(np.corrcoef(origin / np.abs(origin).max(), mean / np.abs(mean).max())[0, 1])
    if r * math.sqrt(len(mean)) < _APART:
        raise ValueError(
            f"the start has a correlation of {r:.2f} with the weights: clients did not start there, or have left it. "
            "Subtracting it would make them agree. Use the weights that training started from, or leave the start out."
        )


def _aligned(start: xr.DataArray, one: xr.DataArray) -> xr.DataArray:
    """The start with the dims and labels of one client's weights, in their order."""
    if set(start.dims) != set(one.dims):
        raise ValueError(
            f"the start must have the dims of one client's weights, {one.dims}, but got {start.dims}. "
            "Select one checkpoint first; the start is common to all clients."
        )
    own = [d for d in map(str, one.dims) if d in start.coords]  # the labels of what has none are positions
    at = {d: _labels.order("the start", d, *(x[d].to_numpy().tolist() for x in (start, one))) for d in own}
    return start.isel(at).transpose(*one.dims)
