"""Leading eigenpairs of symmetric matrices, with a warm start if it is cheaper, and effective rank.

NumPy arrays or torch tensors in and out, in float64; :func:`full` and :func:`with_diagonal` retain the dtype.
"""

from __future__ import annotations

import math
from typing import Any

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat._utils.streams import generator

Array = Any

# Below this size, or above this proportion of the eigenvectors, a full decomposition is faster (bench_factor.py).
_SMALLEST = 100
_LARGEST_SHARE = 0.2
_GUARD, _LARGEST_DEGREE, _CYCLES = 6, 12, 6


def full(xp: Any, a: Array) -> tuple[Array, Array]:
    """Return all eigenpairs of a symmetric matrix (..., unit, unit), in descending order."""
    values, vectors = xp.linalg.eigh(a)
    return xp.flip(values, axis=-1), xp.flip(vectors, axis=-1)


def pays(d: int, g: int) -> bool:
    """Return True if :func:`leading` is faster than :func:`full` for the g leading of d eigenpairs."""
    return d >= _SMALLEST and g <= _LARGEST_SHARE * d


def leading(xp: Any, a: Array, g: int, *, guess: Array | None = None, accuracy: float = 1e-12) -> tuple[Array, Array]:
    """Compute at least the g leading eigenpairs by Chebyshev-filtered subspace iteration with Rayleigh-Ritz.

    Zhou, Saad, Tiago, Chelikowsky (2006), Self-consistent-field calculations using Chebyshev-filtered subspace
    iteration, algorithm 4.3. All eigenpairs are computed if the residuals do not vanish in a few cycles.

    Parameters
    ----------
    a : array (..., unit, unit)
        A correlation matrix minus a diagonal, so that no eigenvalue lies below min_j a_jj − 1.
    g : int
        Number of eigenpairs.
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
        # Any fixed block of full rank suffices; a stream of fixed seed makes repeated calls identical.
        block = generator(0, "eigen").standard_normal((a.shape[-1], k))
        guess = a @ (a @ xp.asarray(block, device=device_of(a)))
    values, vectors, error = _ritz(xp, a, guess[..., :k])
    floor = xp.min(xp.linalg.diagonal(a), axis=-1) - 1
    for _ in range(_CYCLES):
        excess = xp.max(error[..., :g], axis=-1) / (accuracy * values[..., 0])
        if bool(xp.all(excess <= 1)):
            return values, vectors
        half, center = (values[..., -1] - floor) / 2, (values[..., -1] + floor) / 2
        growth = xp.acosh(xp.clip((values[..., g - 1] - center) / half, min=1 + 1e-6))
        degree = int(xp.max(xp.ceil(xp.log(xp.clip(excess, min=1.0)) / growth)))
        vectors = _filter(a, vectors, half, center, values[..., 0], min(max(degree, 1), _LARGEST_DEGREE))
        values, vectors, error = _ritz(xp, a, vectors)
    return full(xp, a)


def _ritz(xp: Any, a: Array, block: Array) -> tuple[Array, Array, Array]:
    """Return the Ritz pairs in the span of a block, in descending order, and the norms of their residuals."""
    q, _ = xp.linalg.qr(block)
    aq = a @ q
    t = xp.matrix_transpose(q) @ aq
    values, s = full(xp, (t + xp.matrix_transpose(t)) / 2)
    vectors = q @ s
    return values, vectors, xp.sqrt(xp.sum((aq @ s - vectors * values[..., None, :]) ** 2, axis=-2))


def _filter(a: Array, block: Array, half: Array, center: Array, top: Array, degree: int) -> Array:
    """Apply a Chebyshev polynomial of ``a``, at most 1 on center ± half, scaled so that ``top`` stays of order 1."""
    half, center, top = half[..., None, None], center[..., None, None], top[..., None, None]
    sigma = first = half / (top - center)
    old, new = block, (a @ block - center * block) * (first / half)
    for _ in range(1, degree):
        step = 1 / (2 / first - sigma)
        old, new = new, (a @ new - center * new) * (2 * step / half) - (sigma * step) * old
        sigma = step
    return new


def with_diagonal(xp: Any, a: Array, diagonal: Array) -> Array:
    """Replace the diagonal of (..., unit, unit) by (..., unit)."""
    eye = xp.eye(a.shape[-1], dtype=xp.bool, device=device_of(a))
    return xp.where(eye, diagonal[..., None, :], a)


def effective_rank(x: Array) -> Array:
    """Compute the effective rank of matrices: exp of the entropy of their singular values, scaled to sum 1 [1]_.

    Parameters
    ----------
    x : array (..., row, column)

    Returns
    -------
    array (...,)
        Between 1 (rank one) and min(row, column) (equal singular values), and at most the rank. Scaling and rotations
        do not change it. NaN for a matrix of zeros.

    Raises
    ------
    ValueError
        If ``x`` has fewer than two dims, or holds NaN or infinite values; the message names the first such matrix.

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
        raise ValueError(f"x must hold matrices (..., row, column), but got shape {tuple(x.shape)}")
    x = xp.astype(x, xp.float64)
    not_finite = xp.any(~xp.isfinite(xp.reshape(x, (*x.shape[:-2], -1))), axis=-1)
    if bool(xp.any(not_finite)):
        position = f" at {[int(i[0]) for i in xp.nonzero(not_finite)]}" if not_finite.ndim else ""
        raise ValueError(f"x must be finite, but the matrix{position} holds NaN or infinite values. Leave it out.")
    s = xp.linalg.svdvals(_scaled(xp, x))
    total = xp.sum(s, axis=-1)
    zero = total == 0
    p = s / xp.where(zero, xp.ones_like(total), total)[..., None]
    terms = xp.where(p > 0, p * xp.log(xp.where(p > 0, p, xp.ones_like(p))), xp.zeros_like(p))
    return xp.where(zero, xp.full_like(total, math.nan), xp.exp(-xp.sum(terms, axis=-1)))


def _scaled(xp: Any, x: Array) -> Array:
    """Divide matrices by their largest entry, so that the sum of the singular values neither overflows nor vanishes."""
    top = xp.max(xp.abs(x), axis=(-2, -1), keepdims=True)
    return x / xp.where(top > 0, top, xp.ones_like(top))
