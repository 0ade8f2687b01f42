"""Solvers of the factor model: MINRES with communalities in [0, 1], and warm-started principal-axis steps.

With h the communalities and λ the eigenvalues of R with h on its diagonal, in descending order, the objective is

    f(h) = ½ (Σ_m λ_m² − Σ_{m≤G} max(λ_m, 0)²),    ∇f(h) = h − F(h),

with F a principal-axis step. Principal axis is gradient descent with step 1 on f, so that both have equal fixed points
(Harman and Jones 1966, Psychometrika 31, 351-368; Jöreskog 2003, Factor analysis by MINRES).

The diagonal of R − Σ_ε changes little from step to step. In the eigenvectors of an earlier step, the reference, the
change is a small matrix E. Fixed-point iterations of a Riccati equation yield the leading subspace of the new matrix
(Stewart 1973, Error and perturbation bounds for subspaces associated with certain eigenvalue problems, SIAM Review 15,
727-764). An iteration takes three matrix products in single precision, because E is small compared with the reference,
which remains in double precision. Reference takes NumPy arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat.stats import eigenvalues

Array = Any
Floats = NDArray[np.float64]


def minimise(r: Array, ones: Array, g: Array, init: Array, *, max_iter: int, tol: float) -> tuple[Array, Array, Array]:
    """Find a local minimum of f near ``init`` for each matrix by bounded L-BFGS (Byrd, Lu, Nocedal, Zhu 1995).

    Parameters
    ----------
    r : array (..., unit, unit)
        Correlations; zero rows for constant units.
    ones : array (..., unit)
        0 for constant units, 1 for the others.
    g : int array (...,)
        Number of factors.
    init : array (..., unit)
        Initial communalities.
    max_iter : int
        Largest number of eigendecompositions.
    tol : float
        Largest entry of the projected gradient that stops the iteration.

    Returns
    -------
    communality : array (..., unit)
    n_iter : int array (...,)
        Number of eigendecompositions.
    residual : array (...,)
        Largest |clip(h − ∇f, 0, 1) − h|: exactly 0 if the Karush-Kuhn-Tucker conditions hold.
    """
    xp = array_namespace(r)
    d, batch = r.shape[-1], tuple(g.shape)
    results = [
        _minimize_matrix(xp, *problem, max_iter=max_iter, tol=tol)
        for problem in zip(
            xp.reshape(r, (-1, d, d)), xp.reshape(ones, (-1, d)), xp.reshape(g, (-1,)), xp.reshape(init, (-1, d)),
            strict=True,
        )
    ]  # fmt: skip
    h = xp.asarray(np.stack([result[0] for result in results]), device=device_of(r))
    n_iter = xp.asarray(np.array([result[1] for result in results]), device=device_of(r))
    residual = xp.asarray(np.array([result[2] for result in results]), device=device_of(r))
    return xp.reshape(h, (*batch, d)), xp.reshape(n_iter, batch), xp.reshape(residual, batch)


def objective(xp: Any, r: Array, h: Array, g: int) -> tuple[float, Array]:
    """Return f and a principal-axis step F(h) from one eigendecomposition of a matrix.

    The discarded eigenvalues are summed, not subtracted, so that the value loses no digits near the minimum.
    """
    values, vectors = eigenvalues.full(xp, eigenvalues.with_diagonal(xp, r, h))
    retained = xp.clip(values[:g], min=0)
    discarded = xp.sum(values[g:] ** 2) + xp.sum((values[:g] - retained) ** 2)
    return float(discarded) / 2, xp.sum(vectors[:, :g] ** 2 * retained, axis=-1)


class _CappedError(Exception):
    """Error that ends the search after ``max_iter`` eigendecompositions."""


def _minimize_matrix(
    xp: Any, r: Array, ones: Array, g: Array, init: Array, *, max_iter: int, tol: float
) -> tuple[Floats, int, float]:
    top = np.asarray(ones.tolist())
    h = np.clip(np.asarray(init.tolist()), 0, top)
    steps, best, previous = 0, (np.inf, h, h), np.inf

    def value_and_gradient(h: Floats) -> tuple[float, Floats]:
        nonlocal steps, best
        if steps == max_iter:
            raise _CappedError
        steps += 1
        f, step = objective(xp, r, xp.asarray(h, device=device_of(r)), int(g))
        gradient = h - np.asarray(step.tolist())
        if f < best[0]:
            best = f, h.copy(), gradient
        return f, gradient

    def residual(h: Floats, gradient: Floats) -> float:
        return float(np.abs(np.clip(h - gradient, 0, top) - h).max())

    try:
        while True:
            # L-BFGS-B can aim at a corner of the box, hardly downhill, and stop far from any minimum. As f is |h|²/2
            # minus a convex function, a principal-axis step would lower it by at least tol²/2: less is a stall.
            result = scipy.optimize.minimize(
                value_and_gradient, h, jac=True, method="L-BFGS-B", bounds=np.stack([np.zeros_like(top), top], axis=1),
                options={"gtol": tol, "ftol": tol**2 / 2, "maxcor": 20, "maxfun": max_iter, "maxiter": max_iter},
            )  # fmt: skip
            error = residual(result.x, result.jac)
            if error <= tol or result.fun >= previous:
                return result.x, steps, error
            h, previous = result.x, result.fun
    except _CappedError:
        return best[1], steps, residual(*best[1:])


Single = NDArray[np.float32]

_SMALLEST = 150  # below this number of units a decomposition is at least as fast (bench_factor.py)
# Above these bounds, rounding to float32 would change the ninth digit of a communality, or the iteration be slow.
_LARGEST_CHANGE, _LARGEST_ROTATION = 0.02, 0.1
_NEAREST = 48  # eigenvectors on either side of the cut that are rotated among themselves first
_CYCLES, _EXACT, _SLOW = 10, 1e-9, 0.9
_LEAST_TOL = 1e-4


def pays(d: int, g: int, tol: float) -> bool:
    """Return True if following a reference is faster than full or partial decompositions (g factors, d units).

    It is False for a ``tol`` below the accuracy of differences in single precision.
    """
    return d >= _SMALLEST and g < d and tol >= _LEAST_TOL and not eigenvalues.pays(d, g)


class Reference:
    """Eigendecomposition of R − Σ_ε, whose diagonal is ``h``, that approximates later steps.

    Parameters
    ----------
    h : array (unit,)
    values : array (unit,)
        Eigenvalues, descending.
    vectors : array (unit, unit)
    g : int
        Number of factors, below the number of units.
    """

    def __init__(self, h: Floats, values: Floats, vectors: Floats, g: int) -> None:
        d = len(h)
        self._h, self._least, self._leading = h, values[g - 1], g <= d - g
        leading, rest = np.arange(g)[::-1], np.arange(g, d)  # eigenvalues next to the cut first
        # The smaller side suffices, because the communalities of both sides sum to h.
        followed, complement = (leading, rest) if self._leading else (rest, leading)
        self._values, self._other_values = values[followed], values[complement]
        v = vectors[:, followed]
        self._squares, self._sum = (v**2).sum(1), v**2 @ self._values
        self._v, self._u = (part.astype(np.float32, order="C") for part in (v, vectors[:, complement]))

    def communalities(self, h: Floats) -> Floats | None:
        """Return the communalities after a step from ``h``, to about 1e-8; None if ``h`` is far from the reference.

        With Y = V + U X, which spans the subspace, and (R − Σ_ε) Y = Y (Λ + T), they are the diagonal of
        Y (Λ + T)(I + XᵀX)⁻¹ Yᵀ.
        """
        change = h - self._h
        shift = change.mean()  # shifts all eigenvalues and changes no eigenvector
        e = (change - shift).astype(np.float32)[:, None]
        largest = np.abs(e).max()
        if largest > _LARGEST_CHANGE or self._least + shift <= largest:  # negative eigenvalues would not count
            return None
        v, u = self._v, self._u
        a, b, c = v.T @ (e * v), u.T @ (e * v), u.T @ (e * u)
        x = _subspace(a, b, c, self._values, self._other_values)
        if x is None:
            return None
        values = (self._values + shift).astype(np.float32)
        t, xx = a + b.T @ x, x.T @ x
        rotated = _solve(xx, xx @ (np.diag(values) + t.T))
        if rotated is None:
            return None
        t -= rotated.T
        z = u @ x
        communality = self._sum + shift * self._squares + ((2 * v + z) * z) @ values + (((v + z) @ t) * (v + z)).sum(1)
        return communality if self._leading else h - communality


def _subspace(a: Single, b: Single, c: Single, values: Floats, other_values: Floats) -> Single | None:
    """Return X of the invariant subspace V + U X of diag(values, other_values) + [[a, bᵀ], [b, c]].

    It solves X (values − other_values) = b + c X − X (a + bᵀ X), with the diagonals of a and c among the eigenvalues.
    None if the iteration does not converge soon.
    """
    w = min(_NEAREST, *b.shape)
    near, turn = _decompose(np.diag(values[:w]) + a[:w, :w])
    near_other, turn_other = _decompose(np.diag(other_values[:w]) + c[:w, :w])
    a, b, c = _rotate(a, turn, turn), _rotate(b, turn_other, turn), _rotate(c, turn_other, turn_other)
    values, other_values = values + a.diagonal(), other_values + c.diagonal()
    values[:w], other_values[:w] = near, near_other
    for block in (a, c):
        block[:w, :w] = 0
        np.fill_diagonal(block, 0)
    gap = values - other_values[:, None]
    if gap.min() <= 0 <= gap.max():
        return None
    inverse: Single = (1 / gap).astype(np.float32)
    x: Single = b * inverse
    if np.abs(x).max() > _LARGEST_ROTATION:
        return None
    previous: tuple[Single, Single] | None = None
    last_size = np.inf
    for _ in range(_CYCLES):
        new = (b + c @ x - x @ (a + b.T @ x)) * inverse
        error = new - x
        size = float(np.linalg.norm(error)) / len(error)
        if size < _EXACT:
            return _rotate(new, turn_other.T, turn.T)
        if size > _SLOW * last_size:
            return None
        x = new
        if previous is not None:  # Anderson's acceleration by one step
            curvature = error - previous[1]
            share = (np.vdot(error, curvature) / np.vdot(curvature, curvature)).astype(np.float32)
            x = new - share * (new - previous[0])
        previous, last_size = (new, error), size
    return None


def _solve(xx: Single, s: Single) -> Single | None:
    """Return (I + xx)⁻¹ s by its series, as xx is small; None if the series converges slowly.

    A factorization by SciPy would be slow: the BLAS of SciPy and NumPy have separate threads, which wait for work at
    one time.
    """
    solution = s
    for _ in range(_CYCLES):
        new: Single = s - xx @ solution
        if float(np.linalg.norm(new - solution)) / len(s) < _EXACT:
            return new
        solution = new
    return None


def _decompose(block: Floats) -> tuple[Floats, Single]:
    values, vectors = np.linalg.eigh(block)
    return values, vectors.astype(np.float32)


def _rotate(block: Single, rows: Single, columns: Single) -> Single:
    """Return the block with its first rows and columns in another basis."""
    result = block.copy()
    result[: len(rows)] = rows.T @ block[: len(rows)]
    result[:, : len(columns)] = result[:, : len(columns)] @ columns
    return result
