"""Smallest and largest eigenvalue of a symmetric matrix, each with a bound on its error."""

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
# Where the lower end of the spectrum is dense, a closer shift pays more than further steps.
_STEPS_PER_SHIFT, _SHIFTS = 40, 6


class Extremes(NamedTuple):
    """Extreme eigenvalues and how far each may be off.

    Attributes
    ----------
    minimum, maximum : array (...,)
        Ritz values; ``minimum`` is never below the smallest eigenvalue, ``maximum`` never above the largest,
        rounding apart.
    error_minimum, error_maximum : array (...,)
        An eigenvalue lies within this of the Ritz value: ‖Hv − θv‖ of the unit Ritz vector plus ``resolution``.
    resolution : array (...,)
        n · 2⁻⁵² · max(|minimum|, |maximum|): what float64 can tell apart in a matrix of this size.
    """

    minimum: Array
    maximum: Array
    error_minimum: Array
    error_maximum: Array
    resolution: Array


def extreme_eigenvalues(h: Array, *, direct_below: int = 512, tol: float = 1e-4, certify: bool = False) -> Extremes:
    """Smallest and largest eigenvalue with the residuals of their Ritz pairs.

    Parameters
    ----------
    h : array (..., sample, sample)
        Symmetric; only its symmetry is assumed. A batch (the clients' blocks of H^p∞) is solved together when direct.
    direct_below : int
        Up to this size all eigenvalues are computed; above it Lanczos with full reorthogonalisation finds the largest,
        and Lanczos on (H − σI)⁻¹, σ just below the smallest Ritz value so far, the smallest. That H − σI has a
        Cholesky factor proves that no eigenvalue is below σ.
    tol : float
        Residual at which Lanczos stops, relative to the eigenvalue. The value itself is far closer: its error is of
        the order of the residual squared over the gap to the next eigenvalue.
    certify : bool
        Prove by one more Cholesky factorisation per end, of H − (θ − error)I and of (θ + error)I − H, that no
        eigenvalue lies outside; where the proof fails, all eigenvalues are computed. Without it, that no eigenvalue
        was missed rests on the random start of Lanczos, as in ARPACK.

    Returns
    -------
    Extremes

    Raises
    ------
    ValueError
        If ``h`` is not square, is empty, or holds values that are not finite.

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
        raise ValueError("h must be finite, but got NaN or infinite entries. Does x hold them?")
    if h.shape[-1] <= direct_below:
        return _direct(xp, h)
    if h.ndim > 2:
        each = [extreme_eigenvalues(b, direct_below=direct_below, tol=tol, certify=certify) for b in h]
        return Extremes(*(xp.stack(column) for column in zip(*each, strict=True)))
    found = _iterative(xp, h, tol)
    if found is None or (certify and not _proved(h, found)):
        return _direct(xp, h)
    return found


def _direct(xp: Any, h: Array) -> Extremes:
    values, vectors = xp.linalg.eigh(h)
    errors = [
        xp.linalg.vector_norm((h @ vectors[..., k, None])[..., 0] - values[..., k, None] * vectors[..., k], axis=-1)
        for k in (0, -1)
    ]
    return _extremes(xp, values[..., 0], values[..., -1], *errors, n=h.shape[-1])


def _extremes(xp: Any, low: Array, high: Array, error_low: Array, error_high: Array, *, n: int) -> Extremes:
    resolution = n * _EPS * xp.maximum(xp.abs(low), xp.abs(high))
    return Extremes(low, high, error_low + resolution, error_high + resolution, resolution)


def _iterative(xp: Any, h: Array, tol: float) -> Extremes | None:
    """Lanczos for the top, shift-inverted Lanczos for the bottom; None if either does not converge."""
    n = h.shape[-1]
    start = xp.asarray(generator(0, "lanczos").normal(size=n), device=device_of(h))

    def top_settled(values: Array, residuals: Array) -> bool:
        return bool(residuals[-1] <= 0.1 * tol * abs(values[-1]))

    top = _Lanczos(lambda q: h @ q, start)
    if not top.run(top_settled, limit=min(n, 300)):
        return None
    high, v = top.ritz(-1)
    error_high = float(xp.linalg.vector_norm(h @ v - high * v))
    low, v = top.ritz(0)
    error = float(top.residuals[0])
    floor = 10 * n * _EPS * max(abs(low), abs(high))
    del top
    for _ in range(_SHIFTS):
        found = _lowest(h, low, v + 0.1 * start / xp.linalg.vector_norm(start), error, tol, floor)
        if found is None:
            return None
        low, v, error = found
        if error <= max(tol * abs(low), floor):
            ends = (
                xp.asarray(value, dtype=xp.float64, device=device_of(h)) for value in (low, high, error, error_high)
            )
            return _extremes(xp, *ends, n=n)
    return None


def _lowest(
    h: Array, low: float, start: Array, error: float, tol: float, floor: float
) -> tuple[float, Array, float] | None:
    """Ritz value, vector and residual at the bottom after some steps with one shift; None if no shift can be factored.

    The start keeps part of a random vector: a Ritz vector alone might lie in a smaller invariant space.
    """
    xp = array_namespace(h)
    solve = None
    for shift in (low - error, low - 4 * error, -floor):
        solve = solve or (_cholesky_solver(h, shift) if shift < low else None)
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
    """Lanczos on a symmetric operator, every vector orthogonalised against all before it."""

    def __init__(self, operator: Callable[[Array], Array], start: Array):
        xp = array_namespace(start)
        self._xp, self._operator = xp, operator
        self._basis = xp.zeros((64, start.shape[0]), dtype=xp.float64, device=device_of(start))
        self._basis[0] = start / xp.linalg.vector_norm(start)
        self._alpha: list[float] = []
        self._beta: list[float] = []
        self.residuals = np.zeros(0)

    def run(self, settled: Callable[[Array, Array], bool], *, limit: int) -> bool:
        """Step until ``settled(Ritz values, their residuals)``, asked every few steps; False at the limit."""
        while len(self._alpha) < limit:
            done = self._step()
            if done or len(self._alpha) % _CHECK_EVERY == 0 or len(self._alpha) == limit:
                self._values, self._vectors = scipy.linalg.eigh_tridiagonal(self._alpha, self._beta[:-1])
                self.residuals = np.abs(self._beta[-1] * self._vectors[-1])
                if done or settled(self._values, self.residuals):
                    return True
        return False

    def _step(self) -> bool:
        xp, k = self._xp, len(self._alpha)
        if k + 2 > self._basis.shape[0]:
            self._basis = xp.concat([self._basis, xp.zeros_like(self._basis)])
        q, past = self._basis[k], self._basis[: k + 1]
        w = self._operator(q)
        self._alpha.append(float(q @ w))
        for _ in range(2):
            w = w - (past @ w) @ past
        self._beta.append(float(xp.linalg.vector_norm(w)))
        exhausted = self._beta[-1] <= _EPS * max(map(abs, self._alpha))
        if not exhausted:
            self._basis[k + 1] = w / self._beta[-1]
        return exhausted

    def ritz(self, which: int) -> tuple[float, Array]:
        xp = self._xp
        weights = xp.asarray(self._vectors[:, which].copy(), device=device_of(self._basis))
        v = weights @ self._basis[: len(self._alpha)]
        return float(self._values[which]), v / xp.linalg.vector_norm(v)


def _cholesky_solver(h: Array, shift: float) -> Callable[[Array], Array] | None:
    """Solver of (H − shift·I)x = b, or None where that matrix has no Cholesky factor."""
    factor = _factor(h, shift, 1.0)
    if factor is None:
        return None
    if is_numpy_namespace(array_namespace(h)):
        trsv = scipy.linalg.blas.dtrsv
        return lambda b: trsv(factor, trsv(factor, b, lower=1), lower=1, trans=1)
    import torch

    return lambda b: torch.cholesky_solve(b[:, None], factor)[:, 0]


def _factor(h: Array, shift: float, sign: float) -> Array | None:
    """Lower Cholesky factor of sign·(H − shift·I), or None."""
    xp = array_namespace(h)
    own = xp.arange(h.shape[-1], device=device_of(h))
    a = xp.astype(h, xp.float64, copy=True) if sign > 0 else -h
    a[own, own] -= sign * shift
    if is_numpy_namespace(xp):
        factor, info = scipy.linalg.lapack.dpotrf(a.T, lower=1, clean=0, overwrite_a=1)
        return factor if info == 0 else None
    import torch

    factor, info = torch.linalg.cholesky_ex(a)
    return factor if int(info) == 0 else None


def _proved(h: Array, found: Extremes) -> bool:
    """Whether Cholesky factors exist just outside both ends, so that no eigenvalue lies there."""
    low, high = found.minimum - found.error_minimum, found.maximum + found.error_maximum
    return _factor(h, float(low), 1.0) is not None and _factor(h, float(high), -1.0) is not None
