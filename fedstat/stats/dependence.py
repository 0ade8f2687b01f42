"""Clients that depend linearly on others: copies, and weighted means such as a server's model. NumPy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_RESIDUAL = 1e-3  # largest distance from a weighted mean, relative to the median deviation of an object
_ROUNDING = 8 * 2**-23  # of values that were computed in float32
_MOST = 4  # one mean in so many clients is possible; more are a space of few dimensions


class Dependence(NamedTuple):
    """Objects that depend on others.

    Attributes
    ----------
    copies : list of (int, int)
        Pairs of equal objects, the second equal to an earlier one; empty if all objects are equal.
    means : list of int
        Objects that equal a weighted mean of others, with weights from 0 on.
    """

    copies: list[tuple[int, int]]
    means: list[int]


def dependence(x: Floats) -> Dependence:
    """Find rows that are copies or weighted means of other rows, up to the rounding of float32.

    A row is a mean if it lies within the convex hull of the others, though the other rows have no linear relation
    among their differences. Rows of at most as many numbers as there are rows always have such relations: then no row
    is a mean.

    Parameters
    ----------
    x : array (object, value)
        Finite values. With thousands of values, a part of them is sufficient.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(5, 40))
    >>> dependence(np.concatenate([x, x[:1], [0.2 * x[0] + 0.8 * x[3]]]))
    Dependence(copies=[(0, 5)], means=[6])
    """
    n, largest = len(x), float(np.abs(x).max(initial=0))
    if n < 2 or not largest:
        return Dependence([], [])
    x = x / largest
    deviation = x - x.mean(axis=0)
    gram = deviation @ deviation.T
    square = np.diagonal(gram)
    rounding = _ROUNDING**2 * float(np.square(x).sum()) / n
    tolerance = max(_RESIDUAL**2 * float(np.median(square)), rounding)
    if _is_regular(gram, tolerance):
        return Dependence([], [])
    i, j = np.triu_indices(n, 1)
    equal = square[i] + square[j] - 2 * gram[i, j] <= rounding
    if equal.all():
        return Dependence([], [])
    copies = list(zip(i[equal].tolist(), j[equal].tolist(), strict=True))
    distinct = np.setdiff1d(np.arange(n), j[equal])
    if len(distinct) < 3 or is_varying(x).sum() < len(distinct):
        return Dependence(copies, [])
    return Dependence(copies, distinct[_means(x[distinct], tolerance)].tolist())


def is_varying(x: NDArray[Any]) -> NDArray[np.bool_]:
    """Return True for columns that vary over objects by more than the rounding of float32."""
    with np.errstate(over="ignore"):
        return np.asarray(np.ptp(x, axis=0) > _ROUNDING * np.abs(x).max(axis=0))


def _is_regular(gram: Floats, tolerance: float) -> bool:
    """Return True if no combination of centered objects with weights of norm 1 is 0, but for their sum."""
    n = len(gram)
    try:
        np.linalg.cholesky(gram + np.trace(gram) / n**2 + np.diag(np.full(n, -tolerance)))
    except np.linalg.LinAlgError:
        return False
    return True


def _means(x: Floats, tolerance: float) -> list[int]:
    """Return the rows within the convex hull of the others, if there are not more of them than linear relations."""
    n = len(x)
    deviation = x - x.mean(axis=0)
    values, vectors = np.linalg.eigh(deviation @ deviation.T)
    n_relations = int((values < tolerance).sum()) - 1  # the sum of all deviations is 0
    if not 1 <= n_relations <= max(1, n // _MOST):
        return []
    points = vectors * np.sqrt(np.maximum(values, 0))
    scale = float(np.sqrt(values[-1]))
    points = np.concatenate([points, np.full((n, 1), scale)], axis=1)  # weights sum to 1
    rows = np.arange(n)
    residuals = [scipy.optimize.nnls(points[rows != row].T, points[row])[1] for row in rows]
    means = np.flatnonzero(np.square(residuals) <= 4 * tolerance).tolist()
    return means if len(means) <= n_relations else []
