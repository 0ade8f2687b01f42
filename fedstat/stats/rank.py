"""Effective rank: how many directions a matrix really uses. NumPy or torch in, the same kind out, in float64."""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace

Array = Any


def effective_rank(x: Array) -> Array:
    """Effective rank of matrices: exp of the entropy of their singular values, normalised to sum 1 [1]_.

    Parameters
    ----------
    x : array (..., row, column)

    Returns
    -------
    array (...,)
        Between 1 (rank one) and min(row, column) (equal singular values); it depends neither on scale nor on
        rotations, and is at most the rank. NaN for a matrix of zeros, which has none.

    Raises
    ------
    ValueError
        If ``x`` has fewer than two dims, or holds NaN or infinite values; the first matrix that does is named.

    References
    ----------
    .. [1] Roy, Vetterli (2007). The effective rank: a measure of effective dimensionality. EUSIPCO, 606-610.

    Examples
    --------
    >>> import numpy as np
    >>> effective_rank(np.stack([np.eye(3), np.ones((3, 3)), np.diag([1.0, 1.0, 0.0])])).round(12)
    array([3., 1., 2.])
    """
    xp = array_namespace(x)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"effective rank is of matrices (..., row, column), but got shape {tuple(x.shape)}")
    x = xp.astype(x, xp.float64)
    bad = xp.any(~xp.isfinite(xp.reshape(x, (*x.shape[:-2], -1))), axis=-1)
    if bool(xp.any(bad)):
        at = f" at {[int(i[0]) for i in xp.nonzero(bad)]}" if bad.ndim else ""
        raise ValueError(f"matrices must be finite, but the one{at} holds NaN or infinite values. Leave it out.")
    s = xp.linalg.svdvals(_scaled(xp, x))
    total = xp.sum(s, axis=-1)
    zero = total == 0
    share = s / xp.where(zero, xp.ones_like(total), total)[..., None]
    terms = xp.where(share > 0, share * xp.log(xp.where(share > 0, share, xp.ones_like(share))), xp.zeros_like(share))
    return xp.where(zero, xp.full_like(total, math.nan), xp.exp(-xp.sum(terms, axis=-1)))


def _scaled(xp: Any, x: Array) -> Array:
    """Matrices divided by their largest entry: the sum of the singular values neither overflows nor vanishes."""
    top = xp.max(xp.abs(x), axis=(-2, -1), keepdims=True)
    return x / xp.where(top > 0, top, xp.ones_like(top))
