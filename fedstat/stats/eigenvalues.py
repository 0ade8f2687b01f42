"""Eigenvalues of symmetric matrices: leading pairs, effective rank, and extremes with bounds on their errors.

Leading pairs start from a guess if that is cheaper.

NumPy arrays or torch tensors in and out, in float64; :func:`full` and :func:`with_diagonal` retain the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_numpy_namespace
from array_api_compat import device as device_of

from fedstat._utils import check
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


_EPS = float(np.finfo(np.float64).eps)
_CHECK_EVERY = 5
# If the lower end of the spectrum is dense, a closer shift saves more time than more steps.
_STEPS_PER_SHIFT, _SHIFTS = 40, 6


class Extremes(NamedTuple):
    """Extreme eigenvalues and bounds on their errors.

    Attributes
    ----------
    minimum, maximum : array (...,)
        Ritz values. Apart from rounding, ``minimum`` is never below the smallest eigenvalue and ``maximum`` is never
        above the largest.
    error_minimum, error_maximum : array (...,)
        Bound on the distance from the Ritz value to an eigenvalue: ‖Hv − θv‖, v the unit Ritz vector, plus
        ``resolution``.
    resolution : array (...,)
        Smallest difference that float64 resolves in a matrix of this size: n · 2⁻⁵² · max(|minimum|, |maximum|).
    """

    minimum: Array
    maximum: Array
    error_minimum: Array
    error_maximum: Array
    resolution: Array


def extreme_eigenvalues(h: Array, *, direct_below: int = 512, tol: float = 1e-4, certify: bool = False) -> Extremes:
    """Compute the smallest and largest eigenvalues with bounds on their errors.

    Parameters
    ----------
    h : array (..., sample, sample)
        Symmetric matrices. Small ones (see ``direct_below``) are solved in one batch.
    direct_below : int
        Up to this size all eigenvalues are computed. For larger matrices, Lanczos with full reorthogonalization finds
        the largest eigenvalue. Lanczos on (H − σI)⁻¹, σ just below the smallest Ritz value so far, finds the smallest.
        H − σI has a Cholesky factor, which proves that no eigenvalue is below σ.
    tol : float
        Residual at which Lanczos stops, relative to the eigenvalue. The eigenvalue is more accurate: its error is of
        the order of the squared residual divided by the gap to the next eigenvalue.
    certify : bool
        Prove that no eigenvalue lies outside, by Cholesky factorizations of H − (θ − error)I and of (θ + error)I − H.
        If the proof fails, all eigenvalues are computed. Without the proof, Lanczos may miss an extreme eigenvalue,
        but its random initial vector makes that improbable, as in ARPACK.

    Returns
    -------
    Extremes

    Raises
    ------
    ValueError
        If ``h`` is not square, is not symmetric up to rounding, is empty, or has entries that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> e = extreme_eigenvalues(np.diag([3.0, 1.0, 2.0]))
    >>> float(e.minimum), float(e.maximum)
    (1.0, 3.0)
    """
    check.integer("direct_below", direct_below)
    check.real("tol", tol, low=0, open_low=True)
    xp = array_namespace(h)
    if h.ndim < 2 or h.shape[-1] != h.shape[-2] or h.shape[-1] == 0:
        raise ValueError(f"h must be square and not empty, (..., sample, sample), but got shape {tuple(h.shape)}")
    rounding = max(1e-8, 8 * float(xp.finfo(h.dtype).eps)) if xp.isdtype(h.dtype, "real floating") else 0.0
    h = xp.astype(h, xp.float64, copy=False)
    if not all(bool(xp.all(xp.isfinite(row))) for row in (h if h.ndim > 2 else [h])):
        raise ValueError("h must be finite, but got NaN or infinite entries. Check the samples for such values.")
    for matrix in h if h.ndim > 2 else [h]:
        _require_symmetric(xp, matrix, rounding)
    if h.shape[-1] <= direct_below:
        return _solve_directly(xp, h)
    if h.ndim > 2:
        by_block = [extreme_eigenvalues(b, direct_below=direct_below, tol=tol, certify=certify) for b in h]
        return Extremes(*(xp.stack(column) for column in zip(*by_block, strict=True)))
    estimate = _solve_by_lanczos(xp, h, tol)
    if estimate is None or (certify and not _is_certain(h, estimate)):
        return _solve_directly(xp, h)
    return estimate


def _require_symmetric(xp: Any, h: Array, rounding: float) -> None:
    """Raise ValueError if a matrix is not symmetric up to rounding; H and Hᵀ are compared if their sums differ."""
    weight = xp.asarray(generator(0, "symmetry").uniform(1, 2, size=h.shape[0]), device=device_of(h))
    of_rows, of_columns = h @ weight, weight @ h
    if float(xp.max(xp.abs(of_rows - of_columns))) <= 0.01 * rounding * float(xp.max(xp.abs(of_rows))):
        return
    asymmetry = float(xp.max(xp.abs(h - xp.matrix_transpose(h))))
    if asymmetry > rounding * float(xp.max(xp.abs(h))):
        raise ValueError(
            f"h must be symmetric, but got |H - H'| up to {asymmetry:.3g}. Pass a kernel, or (H + H') / 2."
        )


def _solve_directly(xp: Any, h: Array) -> Extremes:
    values, vectors = xp.linalg.eigh(h)
    errors = [
        xp.linalg.vector_norm((h @ vectors[..., k, None])[..., 0] - values[..., k, None] * vectors[..., k], axis=-1)
        for k in (0, -1)
    ]
    return _add_resolution(xp, values[..., 0], values[..., -1], *errors, n=h.shape[-1])


def _add_resolution(xp: Any, low: Array, high: Array, error_low: Array, error_high: Array, *, n: int) -> Extremes:
    resolution = n * _EPS * xp.maximum(xp.abs(low), xp.abs(high))
    return Extremes(low, high, error_low + resolution, error_high + resolution, resolution)


def _solve_by_lanczos(xp: Any, h: Array, tol: float) -> Extremes | None:
    """Find the largest eigenvalue by Lanczos, the smallest by shift-inverted Lanczos; None without convergence."""
    n = h.shape[-1]
    start = xp.asarray(generator(0, "lanczos").normal(size=n), device=device_of(h))

    def has_converged(values: Array, residuals: Array) -> bool:
        return bool(residuals[-1] <= 0.1 * tol * abs(values[-1]))

    top = _Lanczos(lambda q: h @ q, start)
    if not top.run(has_converged, limit=min(n, 300)):
        return None
    high, v = top.ritz(-1)
    error_high = float(xp.linalg.vector_norm(h @ v - high * v))
    low, v = top.ritz(0)
    error = float(top.residuals[0])
    floor = 10 * n * _EPS * max(abs(low), abs(high))
    del top
    for _ in range(_SHIFTS):
        lowest = _find_lowest(h, low, v + 0.1 * start / xp.linalg.vector_norm(start), error, tol, floor)
        if lowest is None:
            return None
        low, v, error = lowest
        if error <= max(tol * abs(low), floor):
            ends = (
                xp.asarray(value, dtype=xp.float64, device=device_of(h)) for value in (low, high, error, error_high)
            )
            return _add_resolution(xp, *ends, n=n)
    return None


def _find_lowest(
    h: Array, low: float, start: Array, error: float, tol: float, floor: float
) -> tuple[float, Array, float] | None:
    """Return the lowest Ritz value, its vector and its residual, from one shift; None if no shift can be factored.

    ``start`` should include a random part, because a Ritz vector may lie in a smaller invariant space.
    """
    xp = array_namespace(h)
    solve = None
    for shift in (low - error, low - 4 * error, -floor):
        solve = solve or (_make_cholesky_solver(h, shift) if shift < low else None)
    if solve is None:
        return None
    bottom = _Lanczos(solve, start)
    for limit in range(_CHECK_EVERY, min(h.shape[-1], _STEPS_PER_SHIFT) + 1, _CHECK_EVERY):
        exhausted = bottom.run(lambda _values, _residuals: False, limit=limit)
        _, v = bottom.ritz(-1)
        hv = h @ v
        low = float(v @ hv)
        error = float(xp.linalg.vector_norm(hv - low * v))
        if exhausted or error <= max(tol * abs(low), floor):
            break
    return low, v, error


class _Lanczos:
    """Lanczos iteration on a symmetric operator, with full reorthogonalization."""

    def __init__(self, operator: Callable[[Array], Array], start: Array):
        xp = array_namespace(start)
        self._xp, self._operator = xp, operator
        self._basis = xp.zeros((64, start.shape[0]), dtype=xp.float64, device=device_of(start))
        self._basis[0] = start / xp.linalg.vector_norm(start)
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self.residuals = np.zeros(0)

    def run(self, has_converged: Callable[[Array, Array], bool], *, limit: int) -> bool:
        """Step until ``has_converged(Ritz values, residuals)``, called every few steps; return False at the limit."""
        while len(self._alpha) < limit:
            exhausted = self._step()
            if exhausted or len(self._alpha) % _CHECK_EVERY == 0 or len(self._alpha) == limit:
                self._values, self._vectors = scipy.linalg.eigh_tridiagonal(self._alpha, self._beta[:-1])
                self.residuals = np.abs(self._beta[-1] * self._vectors[-1])
                if exhausted or has_converged(self._values, self.residuals):
                    return True
        return False

    def _step(self) -> bool:
        xp, k = self._xp, len(self._alpha)
        if k + 2 > self._basis.shape[0]:
            self._basis = xp.concat([self._basis, xp.zeros_like(self._basis)])
        q, basis = self._basis[k], self._basis[: k + 1]
        w = self._operator(q)
        self._alpha.append(float(q @ w))
        for _ in range(2):
            w = w - (basis @ w) @ basis
        self._beta.append(float(xp.linalg.vector_norm(w)))
        exhausted = self._beta[-1] <= _EPS * max(map(abs, self._alpha))
        if not exhausted:
            self._basis[k + 1] = w / self._beta[-1]
        return exhausted

    def ritz(self, index: int) -> tuple[float, Array]:
        """Return the Ritz value of this index and its unit vector."""
        xp = self._xp
        weights = xp.asarray(self._vectors[:, index].copy(), device=device_of(self._basis))
        v = weights @ self._basis[: len(self._alpha)]
        return float(self._values[index]), v / xp.linalg.vector_norm(v)


def _make_cholesky_solver(h: Array, shift: float) -> Callable[[Array], Array] | None:
    """Return a function that solves (H − shift·I)x = b, or None if the matrix has no Cholesky factor."""
    factor = _factorize(h, shift, 1.0)
    if factor is None:
        return None
    if is_numpy_namespace(array_namespace(h)):
        trsv = scipy.linalg.blas.dtrsv
        return lambda b: trsv(factor, trsv(factor, b, lower=1), lower=1, trans=1)
    import torch

    return lambda b: torch.cholesky_solve(b[:, None], factor)[:, 0]


def _factorize(h: Array, shift: float, sign: float) -> Array | None:
    """Return the lower Cholesky factor of sign·(H − shift·I), or None if there is none."""
    xp = array_namespace(h)
    diagonal = xp.arange(h.shape[-1], device=device_of(h))
    a = xp.astype(h, xp.float64, copy=True) if sign > 0 else -h
    a[diagonal, diagonal] -= sign * shift
    if is_numpy_namespace(xp):
        factor, info = scipy.linalg.lapack.dpotrf(a.T, lower=1, clean=0, overwrite_a=1)
        return factor if info == 0 else None
    import torch

    factor, info = torch.linalg.cholesky_ex(a)
    return factor if int(info) == 0 else None


def _is_certain(h: Array, estimate: Extremes) -> bool:
    """Return True if Cholesky factorizations prove that no eigenvalue lies outside the bounds."""
    low, high = estimate.minimum - estimate.error_minimum, estimate.maximum + estimate.error_maximum
    return _factorize(h, float(low), 1.0) is not None and _factorize(h, float(high), -1.0) is not None
