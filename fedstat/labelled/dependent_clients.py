"""Clients that equal other clients, a weighted mean of them or the baseline, or form groups, in weights of any form."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat.labelled.arrays import KNOWN, baseline_of, labels, numpy_of
from fedstat.results.icc import describe_groups
from fedstat.stats.clustering import cosine
from fedstat.stats.dependence import dependence, is_varying

_BASE, _FOR_GROUPS = 512, 4096
"""Values of each client that are compared, beside one for each client; for groups, whose differences are smaller."""


def describe_dependence(
    weights: Any, baseline: Any = None, *, is_matrix: bool, replicates: bool, groups: bool = False
) -> list[str]:
    """Return a sentence for each kind of clients that are not independent; [] for weights without clients.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, ...)
        Arrays that are not in memory are not examined.
    baseline : array (unit, weight...), str or None
        Only a baseline that a user passed is compared with clients.
    is_matrix : bool
        True if a matrix has the dims (client, value), not (row, unit).
    replicates : bool
        True if the second axis of an array holds replicates, whose means are compared.
    groups : bool
        True to look for groups of clients, too.
    """
    if isinstance(weights, list | tuple):
        weights = _stacked(weights)
    x = _client_rows(weights, is_matrix=is_matrix, replicates=replicates)
    if x is None or len(x) < 2 or 0 in x.shape:
        return []
    part = _part(x, slice(None))
    if not np.isfinite(part).all():
        return []
    copies, means = dependence(part)
    if x.shape[1] > part.shape[1] and (copies or means or is_varying(part).sum() < len(x)):
        varying = np.flatnonzero(is_varying(numpy_of(x)))
        copies, means = dependence(_part(x, varying)) if len(varying) else ([], [])
    names, why = labels(weights, "client", 0), "but CIs and tests assume independent clients"
    texts = []
    if copies:
        a, b = names[list(copies[0])]
        pairs = f"{len(copies)} pairs of clients ({a} and {b}, ...)"
        texts.append(f"{f'clients {a} and {b}' if len(copies) == 1 else pairs} have equal weights, {why}")
    if means:
        clients, end = _named(names[means]), "leave it out" if len(means) == 1 else "leave them out"
        mean = "is a weighted mean" if len(means) == 1 else "are weighted means"
        texts.append(f"{clients} {mean} of other clients, as a server's model is, {why}; {end}")
    if (equal := _at_baseline(x, weights, baseline)).any():
        start = "has" if equal.sum() == 1 else "have"
        texts.append(f"{_named(names[equal])} {start} the values of the baseline, as initial parameters have, {why}")
    if groups and not texts and (text := _describe_groups(x, weights, baseline, names)):
        texts.append(text)
    return texts


def _stacked(weights: Any) -> Any:
    """Return arrays of clients, or lists of their replicates, as one array; the verb has checked them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the verb has warned of labels in another order
        labeled = _labels.labelled(weights, stack=("client", "replicate"))
    if isinstance(labeled, xr.DataArray):
        return labeled
    return np.stack([numpy_of(w) if hasattr(w, "shape") else np.stack([*map(numpy_of, w)]) for w in weights])


def _named(names: NDArray[Any]) -> str:
    return f"client{'s' * (len(names) > 1)} {few(names)}"


def _client_rows(weights: Any, *, is_matrix: bool, replicates: bool) -> Any:
    """Return an array or tensor (client, value), a view if possible; None without clients or out of memory."""
    if isinstance(weights, xr.DataArray):
        if "client" not in weights.dims or not weights.variable._in_memory:
            return None
        weights = weights.mean("replicate") if "replicate" in weights.dims else weights
        w = weights.transpose("client", ...).values
    else:
        weights = check.numbers("weights", weights)
        if weights.ndim < (2 if is_matrix else 3):
            return None
        w = weights.mean(1) if replicates else weights
    return w.reshape(len(w), -1)


def _describe_groups(x: Any, weights: Any, baseline: Any, names: NDArray[Any]) -> str:
    """Return a sentence on groups of clients by their differences from the baseline; "" if there are none."""
    part = _part(x, slice(None), _FOR_GROUPS)
    if not (baseline is None or isinstance(baseline, str)):
        start = baseline_of(baseline, weights)
        start = start.reshape(len(start) if start.ndim == 3 else 1, -1)
        part = part - _part(start, slice(None), _FOR_GROUPS + len(x) - len(start))
    return describe_groups(cosine(part), names) if np.isfinite(part).all() and part.any(axis=1).all() else ""


def _part(x: Any, columns: Any, n_values: int = _BASE) -> NDArray[np.float64]:
    """Return up to a constant number of values, and one for each client, evenly spaced."""
    n = x.shape[1] if isinstance(columns, slice) else len(columns)
    step = max(1, -(-n // (n_values + len(x))))
    part = x[:, ::step] if isinstance(columns, slice) else x[:, columns[::step]]
    return np.asarray(numpy_of(part), dtype=float)


def _at_baseline(x: Any, weights: Any, baseline: Any) -> NDArray[np.bool_]:
    """Return True for clients with the values of a user's baseline."""
    nowhere = np.zeros(len(x), dtype=bool)
    if baseline is None or isinstance(baseline, str) or getattr(baseline, "attrs", {}).get(KNOWN):
        return nowhere
    if getattr(weights, "ndim", 0) < 3:
        return nowhere
    start = numpy_of(baseline_of(baseline, weights)).reshape(-1)
    return np.array([bool((numpy_of(row) == start).all()) for row in x])
