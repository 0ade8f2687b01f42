"""Initial parameters that are subtracted from the weights of a layer, put in the order of the weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import Weights, labels, need_dims, numpy_of

_N_COMPARED = 8  # clients whose mean is compared with the baseline
_RELATED = 3.0  # standard errors of a correlation above 0


def subtract_baseline(weights: Weights, baseline: Any) -> Weights:
    """Subtract the baseline, if there is one."""
    if baseline is None:
        return weights
    if isinstance(weights, xr.DataArray):
        need_dims(weights, "client", "unit")
        client_weights = weights.isel(client=0, drop=True).transpose("unit", ...)
        dims = client_weights.dims
        values = baseline_of(baseline, weights, np.empty(0)).reshape(client_weights.shape)
        require_related(values, weights.isel(client=slice(_N_COMPARED)).transpose("client", *dims).to_numpy())
        return weights.astype(float) - xr.DataArray(values, dims=dims)
    weights = check.numbers("weights", weights)
    values = baseline_of(baseline, weights, weights).reshape(weights.shape[1:])
    require_related(values, weights)
    return weights.double() - values.double() if is_torch_array(weights) else weights.astype(float) - values


def baseline_of(baseline: Any, weights: Weights, w: Any) -> Any:
    """Return the baseline as an array (unit, weight) in the library of ``w``."""
    baseline = check.numbers("baseline", baseline)
    baseline = baseline.detach() if is_torch_array(baseline) else baseline
    shape = tuple(np.shape(weights))[1:]
    if isinstance(weights, xr.DataArray):
        client_weights = weights.isel(client=0, drop=True).transpose("unit", ...)
        shape = client_weights.shape
        if isinstance(baseline, xr.DataArray):
            baseline = _align(baseline, client_weights)
    if isinstance(baseline, xr.DataArray):
        need_dims(baseline, "unit")
        baseline = baseline.transpose("unit", ...).to_numpy()
    if tuple(baseline.shape) != tuple(shape):
        raise ValueError(
            f"baseline must have the shape of one client's weights, {tuple(shape)}, but got {tuple(baseline.shape)}. "
            "Pass parameters common to all clients; subtract client-specific baselines from the weights."
        )
    baseline = baseline.reshape(shape[0], -1)
    if is_torch_array(w):
        baseline = array_namespace(w).asarray(baseline, device=device_of(w))
    else:
        baseline = numpy_of(baseline)
    if not (finite := np.isfinite(numpy_of(baseline)).all(axis=1)).all():
        raise ValueError(
            f"baseline holds NaN or infinite values, first in unit(s) {few(labels(weights, 'unit', 1)[~finite])}"
        )
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


def _align(baseline: xr.DataArray, client_weights: xr.DataArray) -> xr.DataArray:
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
