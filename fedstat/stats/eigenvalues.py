"""Leading eigenpairs of symmetric matrices, warm-started where that is cheaper, and effective rank.

NumPy or torch, the same out; in float64, except for :func:`full` and :func:`with_diagonal`, which keep the dtype.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat._utils.streams import generator

Array = Any

# Below this size, or above this share of the eigenvectors, a full decomposition is faster (bench_factor.py).
_SMALLEST = 100
_LARGEST_SHARE = 0.2
_GUARD, _LARGEST_DEGREE, _CYCLES = 6, 12, 6


def full(xp: Any, a: Array) -> tuple[Array, Array]:
    """All eigenpairs of a symmetric matrix (..., unit, unit), largest eigenvalue first."""
    values, vectors = xp.linalg.eigh(a)
    return xp.flip(values, axis=-1), xp.flip(vectors, axis=-1)


def pays(d: int, g: int) -> bool:
    """Whether :func:`leading` beats :func:`full` for the g leading of d eigenpairs."""
    return d >= _SMALLEST and g <= _LARGEST_SHARE * d


def leading(xp: Any, a: Array, g: int, *, guess: Array | None = None, accuracy: float = 1e-12) -> tuple[Array, Array]:
    """The g leading eigenpairs, and a few more, by Chebyshev-filtered subspace iteration with Rayleigh-Ritz.

    Zhou, Saad, Tiago, Chelikowsky (2006), Self-consistent-field calculations using Chebyshev-filtered subspace
    iteration, algorithm 4.3. Falls back to all eigenpairs where the residuals do not vanish in a few cycles.

    Parameters
    ----------
    a : array (..., unit, unit)
        A correlation matrix less a diagonal, so that no eigenvalue lies below min_j a_jj − 1.
    g : int
        Number of eigenpairs wanted.
    guess : array (..., unit, column), optional
        Approximate leading eigenvectors, from the previous step of an iteration.
    accuracy : float
        Residual of each of the g pairs, relative to the largest eigenvalue.

    Returns
    -------
    values : array (..., k), vectors : array (..., unit, k)
        k >= g pairs, in descending order; only the first g are exact.
    """
    a = xp.astype(a, xp.float64, copy=False)
    k = min(g + _GUARD, a.shape[-1])
    if guess is None or guess.shape[-1] < k:
        # Any fixed block of full rank will do; a private stream keeps repeated calls identical.
        block = generator(0, "eigen").standard_normal((a.shape[-1], k))
        guess = a @ (a @ xp.asarray(block, device=device_of(a)))
    values, vectors, error = _ritz(xp, a, guess[..., :k])
    floor = xp.min(xp.linalg.diagonal(a), axis=-1) - 1
    for _ in range(_CYCLES):
        left = xp.max(error[..., :g], axis=-1) / (accuracy * values[..., 0])
        if bool(xp.all(left <= 1)):
            return values, vectors
        half, centre = (values[..., -1] - floor) / 2, (values[..., -1] + floor) / 2
        growth = xp.acosh(xp.clip((values[..., g - 1] - centre) / half, min=1 + 1e-6))
        degree = int(xp.max(xp.ceil(xp.log(xp.clip(left, min=1.0)) / growth)))
        vectors = _filter(a, vectors, half, centre, values[..., 0], min(max(degree, 1), _LARGEST_DEGREE))
        values, vectors, error = _ritz(xp, a, vectors)
    return full(xp, a)


def _ritz(xp: Any, a: Array, block: Array) -> tuple[Array, Array, Array]:
    """Best eigenpairs in the span of a block, in descending order, and the norms of their residuals."""
    q, _ = xp.linalg.qr(block)
    aq = a @ q
    t = xp.matrix_transpose(q) @ aq
    values, s = full(xp, (t + xp.matrix_transpose(t)) / 2)
    vectors = q @ s
    return values, vectors, xp.sqrt(xp.sum((aq @ s - vectors * values[..., None, :]) ** 2, axis=-2))


def _filter(a: Array, block: Array, half: Array, centre: Array, top: Array, degree: int) -> Array:
    """Chebyshev polynomial of ``a``, at most 1 on centre ± half, scaled so that ``top`` stays of order 1."""
    half, centre, top = half[..., None, None], centre[..., None, None], top[..., None, None]
    sigma = first = half / (top - centre)
    old, new = block, (a @ block - centre * block) * (first / half)
    for _ in range(1, degree):
        step = 1 / (2 / first - sigma)
        old, new = new, (a @ new - centre * new) * (2 * step / half) - (sigma * step) * old
        sigma = step
    return new


def with_diagonal(xp: Any, a: Array, diagonal: Array) -> Array:
    """Replace the diagonal of (..., unit, unit) by (..., unit)."""
    eye = xp.eye(a.shape[-1], dtype=xp.bool, device=device_of(a))
    return xp.where(eye, diagonal[..., None, :], a)


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
