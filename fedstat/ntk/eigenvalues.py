"""Smallest and largest eigenvalues of symmetric matrices, with bounds on their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_numpy_namespace
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat._utils.streams import generator

Array = Any
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
        If ``h`` is not square, is empty, or has entries that are not finite.

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
    h = xp.astype(h, xp.float64, copy=False)
    if not all(bool(xp.all(xp.isfinite(row))) for row in (h if h.ndim > 2 else [h])):
        raise ValueError("h must be finite, but got NaN or infinite entries. Check the samples for such values.")
    if h.shape[-1] <= direct_below:
        return _solve_directly(xp, h)
    if h.ndim > 2:
        by_block = [extreme_eigenvalues(b, direct_below=direct_below, tol=tol, certify=certify) for b in h]
        return Extremes(*(xp.stack(column) for column in zip(*by_block, strict=True)))
    estimate = _solve_by_lanczos(xp, h, tol)
    if estimate is None or (certify and not _is_certain(h, estimate)):
        return _solve_directly(xp, h)
    return estimate


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
