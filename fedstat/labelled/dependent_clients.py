"""Clients that equal other clients, a weighted mean of them or the baseline, or form groups, in weights of any form."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils.check import few, numpy_of
from fedstat.labelled.layer import Layer, baseline_of
from fedstat.results.icc import describe_groups
from fedstat.stats.clustering import cosine
from fedstat.stats.dependence import dependence, is_varying

_BASE, _FOR_GROUPS = 512, 4096
"""Values of each client that are compared, beside one for each client; for groups, whose differences are smaller."""


def describe_dependence(layer: Layer, *, groups: bool = False) -> list[str]:
    """Return a sentence for each kind of clients that are not independent; [] without clients, or out of memory.

    With ``groups``, look for groups of clients, too.
    """
    if "client" not in layer.labels or layer.is_lazy:
        return []
    w = layer.weights.mean(1) if "replicate" in layer.labels else layer.weights
    x = w.reshape(len(w), -1)
    if len(x) < 2:
        return []
    part = _part(x, slice(None))
    if not np.isfinite(part).all():
        return []
    copies, means = dependence(part)
    if x.shape[1] > part.shape[1] and (copies or means or is_varying(part).sum() < len(x)):
        varying = np.flatnonzero(is_varying(numpy_of(x)))
        copies, means = dependence(_part(x, varying)) if len(varying) else ([], [])
    names, why = layer.clients, "but CIs and tests assume independent clients"
    texts = []
    if copies:
        a, b = names[list(copies[0])]
        pairs = f"{len(copies)} pairs of clients ({a} and {b}, ...)"
        texts.append(f"{f'clients {a} and {b}' if len(copies) == 1 else pairs} have equal weights, {why}")
    if means:
        clients, end = _named(names[means]), "leave it out" if len(means) == 1 else "leave them out"
        mean = "is a weighted mean" if len(means) == 1 else "are weighted means"
        texts.append(f"{clients} {mean} of other clients, as a server's model is, {why}; {end}")
    if (equal := _at_baseline(x, layer)).any():
        start = "has" if equal.sum() == 1 else "have"
        texts.append(f"{_named(names[equal])} {start} the values of the baseline, as initial parameters have, {why}")
    if groups and not texts and (text := _describe_groups(x, layer, layer.baseline, names)):
        texts.append(text)
    return texts


def _named(names: NDArray[Any]) -> str:
    return f"client{'s' * (len(names) > 1)} {few(names)}"


def _describe_groups(x: Any, layer: Layer, baseline: Any, names: NDArray[Any]) -> str:
    """Return a sentence on groups of clients by their differences from the baseline; "" if there are none."""
    part = _part(x, slice(None), _FOR_GROUPS)
    if not (baseline is None or isinstance(baseline, str)):
        start = baseline_of(baseline, layer)
        start = start.reshape(len(start) if start.ndim == 3 else 1, -1)
        part = part - _part(start, slice(None), _FOR_GROUPS + len(x) - len(start))
    return describe_groups(cosine(part), names) if np.isfinite(part).all() and part.any(axis=1).all() else ""


def _part(x: Any, columns: Any, n_values: int = _BASE) -> NDArray[np.float64]:
    """Return up to a constant number of values, and one for each client, evenly spaced."""
    n = x.shape[1] if isinstance(columns, slice) else len(columns)
    step = max(1, -(-n // (n_values + len(x))))
    part = x[:, ::step] if isinstance(columns, slice) else x[:, columns[::step]]
    return np.asarray(numpy_of(part), dtype=float)


def _at_baseline(x: Any, layer: Layer) -> NDArray[np.bool_]:
    """Return True for clients with the values of a user's baseline."""
    if not layer.is_given:
        return np.zeros(len(x), dtype=bool)
    start = numpy_of(layer.baseline).reshape(-1)
    return np.array([bool((numpy_of(row) == start).all()) for row in x])
