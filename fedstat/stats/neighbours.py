"""Distances to nearest neighbours, on a line by sorting and in space by a tree, and the map that whitens points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy
from array_api_compat import device as device_of

from fedstat.stats import scale

Array = Any

# Numbers in one block of temporaries: on the CPU little enough for its cache and for reuse of freed memory, on other
# devices little enough to fit beside the data.
_CACHED, _BLOCK = 1 << 15, 1 << 24
_SINGULAR = 1e-12
"""Eigenvalue of a correlation matrix up to which a coordinate is a linear function of others."""


def whiten(xp: Any, points: Array) -> tuple[Array, Array]:
    """Map points linearly to uncorrelated coordinates of variance 1.

    Parameters
    ----------
    xp : module
        Namespace of the array API.
    points : array (series, sample) or (series, sample, feature)
        The former are returned as they are.

    Returns
    -------
    white : array, of the shape of points
    log_det : array (series,)
        Log-determinant of the map back, in nats.

    Raises
    ------
    ValueError
        If a coordinate of a series is a linear function of the others.
    """
    log_det = xp.zeros(points.shape[0], dtype=xp.float64, device=device_of(points))
    if points.ndim == 2:
        return points, log_det
    n, d = points.shape[1:]
    x = points - points[:, :1, :]
    varies = xp.any(xp.any(x != 0, axis=2), axis=1)  # a series of equal points is one atom
    sizes = xp.max(xp.abs(x), axis=1, keepdims=True)
    x = x / xp.where(sizes > 0, sizes, 1.0)
    x = x - xp.mean(x, axis=1, keepdims=True)
    sd = xp.sqrt(xp.mean(x**2, axis=1, keepdims=True))
    x = x / xp.where(sd > 0, sd, 1.0)
    values, vectors = xp.linalg.eigh(xp.matrix_transpose(x) @ x / n)
    if series := [int(i) for i in xp.nonzero(varies & (values[:, 0] <= _SINGULAR))[0]]:
        raise ValueError(_singular_message(series, points.shape))
    root = xp.sqrt(xp.where(values > _SINGULAR, values, 1.0))
    vectors = vectors / root[:, None, :]
    white = sum(x[:, :, j, None] * vectors[:, None, j, :] for j in range(d))  # matmul would round equal points apart
    logs = xp.log(root) + xp.log(xp.where(sizes > 0, sizes, 1.0) * xp.where(sd > 0, sd, 1.0))[:, 0, :]
    return white, xp.sum(logs, axis=1)


def _singular_message(series: list[int], shape: tuple[int, ...]) -> str:
    where = f" in {len(series)} of {shape[0]} series, first in series {series[0]}" if shape[0] > 1 else ""
    return (
        f"a coordinate of x is a linear function of the others{where}, so the entropy is -inf (x has {shape[1]} "
        f"samples of {shape[2]} coordinates). Leave such coordinates out, or pass more samples than coordinates."
    )


def distances_and_copies(xp: Any, points: Array, k: int) -> tuple[Array, Array]:
    """Distance of every point to its k-th nearest neighbour, and how many points have an exact copy.

    Parameters
    ----------
    xp : module
        Namespace of the array API.
    points : array (series, sample), sorted, or (series, sample, feature)
    k : int >= 1

    Returns
    -------
    distance : array (series, sample)
        In the unit of the points.
    copied : int array (series,)
    """
    if points.ndim > 2:
        nearest, distance = distances(xp, points, (1, k))
        return distance, xp.sum(xp.astype(nearest == 0, xp.int64), axis=1)
    distance, any_equal = _distances_on_line(xp, points, k)
    copied = xp.zeros(points.shape[0], dtype=xp.int64, device=device_of(points))
    if any_equal:
        equal = points[:, 1:] == points[:, :-1]
        joined = xp.concat([equal[:, :1], equal[:, 1:] | equal[:, :-1], equal[:, -1:]], axis=1)
        copied = xp.sum(xp.astype(joined, xp.int64), axis=1)
    return distance, copied


def distances(xp: Any, points: Array, ks: tuple[int, ...]) -> list[Array]:
    """Distances of every point to its k-th nearest neighbour, an array (series, sample) for each k.

    Parameters are those of :func:`distances_and_copies`.
    """
    if points.ndim == 2:
        return [_distances_on_line(xp, points, k)[0] for k in ks]
    e = scale.exponent(scale.largest(points, (1, 2)))
    if bool(xp.any(e != 0)):  # squares of coordinates would overflow or vanish
        found = _distances_in_space(xp, points * scale.power(-e)[:, None, None], ks)
        return [distance * scale.power(e)[:, None] for distance in found]
    return _distances_in_space(xp, points, ks)


def _distances_in_space(xp: Any, points: Array, ks: tuple[int, ...]) -> list[Array]:
    if _on_cpu(points):
        host, ranks = np.asarray(points), [k + 1 for k in ks]
        found = np.array([scipy.spatial.cKDTree(p).query(p, k=ranks)[0] for p in host])
        found = found.reshape(*points.shape[:2], len(ks))
        return [xp.asarray(np.ascontiguousarray(found[:, :, i])) for i in range(len(ks))]
    tables = [_distances_by_table(xp, p, ks) for p in points]
    return [xp.stack([table[:, i] for table in tables]) for i in range(len(ks))]


def _distances_on_line(xp: Any, s: Array, k: int) -> tuple[Array, bool]:
    """Distances for sorted s (series, sample), in blocks whose temporaries stay in the CPU's cache.

    Also whether any samples are equal.
    """
    series, n = s.shape
    block = _CACHED if _on_cpu(s) else _BLOCK
    out, any_equal = xp.empty_like(s), False
    rows = max(1, block // n)
    for row in range(0, series, rows):
        for start in range(0, n, block):
            stop = min(start + block, n)
            low, high = max(0, start - k), min(n, stop + k)
            near, equal = _windows(xp, s[row : row + rows, low:high], k)
            out[row : row + rows, start:stop] = near[:, start - low : stop - low]
            any_equal = any_equal or equal
    return out, any_equal


def _windows(xp: Any, s: Array, k: int) -> tuple[Array, bool]:
    """The k nearest of sorted s (series, sample) lie in one of k + 1 windows of neighbours in rank.

    Also whether any samples are equal.
    """
    inner = s.shape[1] - k
    gap = [s[:, m:] - s[:, :-m] for m in range(1, k + 1)]  # gap[m - 1][:, i]: from sample i to sample i + m
    best = xp.empty_like(s)
    best[:, :inner], best[:, inner:] = gap[-1], math.inf
    for left in range(1, k):
        window = slice(left, left + inner)
        reach = xp.maximum(gap[left - 1][:, :inner], gap[k - left - 1][:, window])
        best[:, window] = xp.minimum(best[:, window], reach)
    best[:, k:] = xp.minimum(best[:, k:], gap[-1])
    return best, bool(xp.min(gap[0]) == 0)


def _on_cpu(x: Array) -> bool:
    return str(device_of(x)) == "cpu"


def _distances_by_table(xp: Any, p: Array, ks: tuple[int, ...]) -> Array:
    """From all distances of p (sample, feature), a block of rows at a time: (sample, k)."""
    step = max(1, _BLOCK // (p.shape[0] * p.shape[1]))
    rows = []
    for start in range(0, p.shape[0], step):
        square = xp.sum((p[start : start + step, None, :] - p[None, :, :]) ** 2, axis=-1)
        ordered = xp.sort(square, axis=-1, stable=False)
        rows.append(xp.sqrt(xp.stack([ordered[:, k] for k in ks], axis=-1)))
    return xp.concat(rows)
