"""What messages hold: shared entries without the others, masks, and additive sums of moments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from fedstat.fl.algorithm import Mask
from fedstat.fl.nets import Params
from fedstat.stats.moments import Moments

Arrays = dict[str, np.ndarray]
PARTS = ("n", "total", "square")
"""Parts of a layer's moments: rows, their sum, and the upper triangle of their products."""


def record(arrays: Mapping[str, Any]) -> ArrayRecord:
    """Arrays or tensors as Flower sends them."""
    return ArrayRecord({name: Array(np.asarray(a)) for name, a in arrays.items()})


def arrays_in(content: RecordDict, name: str) -> Arrays:
    """Arrays of one record of a message, in their order."""
    return {key: array.numpy() for key, array in content.array_records[name].items()}


def tensors_in(content: RecordDict, name: str) -> Params:
    """The same as tensors of their own."""
    return {key: torch.from_numpy(array.copy()) for key, array in arrays_in(content, name).items()}


def packed(params: Mapping[str, Tensor], mask: Mask) -> Params:
    """Entries that a mask picks, as one vector a parameter; parameters without any are left out."""
    return {name: p[mask[name].expand(p.shape)] for name, p in params.items() if bool(mask[name].any())}


def unpacked(vectors: Mapping[str, Tensor], mask: Mask, like: Mapping[str, Tensor]) -> Params:
    """Parameters that have the vectors' entries where the mask picks them, and zeros elsewhere."""
    found = {}
    for name, vector in vectors.items():
        found[name] = torch.zeros_like(like[name])
        found[name][mask[name].expand(found[name].shape)] = vector.to(found[name].dtype)
    return found


def raw_sums(moments: Mapping[str, Moments]) -> Arrays:
    """Sums that add up over clients, without means: float64 arrays "layer/n", "layer/total" and "layer/square".

    The products of units i <= j are a vector, row by row, so that a layer takes (units² + 3 units)/2 + 1 numbers.

    Examples
    --------
    >>> from fedstat.stats.moments import moments
    >>> z = np.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]])
    >>> a, b = (raw_sums({"fc1": moments(part)}) for part in (z[:1], z[1:]))
    >>> {name: (a[name] + b[name]).tolist() for name in a}
    {'fc1/n': [3.0], 'fc1/total': [8.0, 11.0], 'fc1/square': [26.0, 33.0, 45.0]}
    >>> whole = moments_of({name: a[name] + b[name] for name in a})["fc1"]
    >>> np.allclose(whole.cross, moments(z).cross)
    True
    """
    found: Arrays = {}
    for layer, m in moments.items():
        n, mean, cross = (np.asarray(torch.as_tensor(part).cpu(), np.float64) for part in m)
        square = cross + n * np.outer(mean, mean)
        found |= {f"{layer}/n": n.reshape(1), f"{layer}/total": n * mean}
        found[f"{layer}/square"] = square[np.triu_indices(len(mean))]
    return found


def moments_of(sums: Mapping[str, np.ndarray]) -> dict[str, Moments]:
    """Moments of every layer, from sums over clients (:func:`raw_sums`); n is a whole number of rows."""
    found = {}
    for layer in dict.fromkeys(name.rpartition("/")[0] for name in sums):
        n, total, upper = (sums[f"{layer}/{part}"] for part in PARTS)
        rows, mean = np.rint(n[0]), total / np.rint(n[0])
        square = np.zeros((len(mean), len(mean)))
        square[np.triu_indices(len(mean))] = upper
        square += np.triu(square, 1).T
        found[layer] = Moments(np.asarray(rows), mean, square - rows * np.outer(mean, mean))
    return found
