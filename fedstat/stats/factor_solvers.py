"""Solvers of the factor model: MINRES with communalities in [0, 1], and warm-started principal-axis steps.

With h the communalities and λ the eigenvalues of R with h on its diagonal, in descending order, the objective is

    f(h) = ½ (Σ_m λ_m² − Σ_{m≤G} max(λ_m, 0)²),    ∇f(h) = h − F(h),

with F a principal-axis step. Principal axis is gradient descent with step 1 on f, so that both have equal fixed points
(Harman and Jones 1966, Psychometrika 31, 351-368; Jöreskog 2003, Factor analysis by MINRES).

The diagonal of R − Σ_ε changes little from step to step. In the eigenvectors of an earlier step, the reference, the
change is a small matrix E. Eigenvectors near the cut mix most, since their eigenvalues are near each other: they are
decomposed together. Then fixed-point iterations of a Riccati equation yield the leading subspace of the new matrix
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
_LARGEST_CHANGE, _LARGEST_ROTATION = 0.03, 0.2
_NEAREST = 48  # eigenvectors on either side of the cut that are decomposed together first
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
        self._h, self._values, self._g = h, values, g
        self._vectors, self._single = vectors, vectors.astype(np.float32, order="C")
        self._near = slice(max(g - _NEAREST, 0), min(g + _NEAREST, d))

    def communalities(self, h: Floats) -> Floats | None:
        """Return the communalities after a step from ``h``, to about 1e-8; None if ``h`` is far from the reference.

        With Y = V + U X, which spans the subspace, and (R − Σ_ε) Y = Y (Λ + T), they are the diagonal of
        Y (Λ + T)(I + XᵀX)⁻¹ Yᵀ. V and U are the eigenvectors on the two sides of the cut, with those near the cut
        turned to be eigenvectors in the space that they span. V is the smaller side, which suffices, because the
        communalities of both sides sum to h.
        """
        g, change = self._g, h - self._h
        shift = change.mean()  # shifts all eigenvalues and changes no eigenvector
        e = change - shift
        largest = np.abs(e).max()
        if largest > _LARGEST_CHANGE or self._values[g - 1] + shift <= largest:  # negative values would not count
            return None
        is_leading = g <= len(h) - g
        v_side, u_side = (slice(g), slice(g, None)) if is_leading else (slice(g, None), slice(g))
        e_matrix = _in_basis(self._single, e)
        values, turn = self._turn_near(e_matrix, e)
        x = _subspace(e_matrix, values, v_side, u_side)
        if x is None:
            return None
        t, xx = e_matrix[v_side, v_side] + e_matrix[v_side, u_side] @ x, x.T @ x
        v_values = (values[v_side] + shift).astype(np.float32)
        rotated = _solve(xx, xx @ (np.diag(v_values) + t.T))
        if rotated is None:
            return None
        t -= rotated.T
        vectors, single, near = self._vectors.copy(), self._single.copy(), self._near
        vectors[:, near] = single[:, near] = vectors[:, near] @ turn
        v, z = single[:, v_side], single[:, u_side] @ x
        communality = vectors[:, v_side] ** 2 @ (values[v_side] + shift)
        communality += ((2 * v + z) * z) @ v_values + (((v + z) @ t) * (v + z)).sum(1)
        return communality if is_leading else h - communality

    def _turn_near(self, e_matrix: Single, e: Floats) -> tuple[Floats, Floats]:
        """Decompose the matrix in the space of the vectors near the cut; express ``e_matrix`` in the turned basis.

        This space needs double precision: small gaps of eigenvalues enlarge errors.

        Returns
        -------
        values : array (unit,)
            Diagonal of the matrix in the turned basis; the diagonal of ``e_matrix`` becomes 0.
        turn : array (near, near)
            Coordinates of the turned vectors.
        """
        near = self._near
        vectors = self._vectors[:, near]
        block = np.diag(self._values[near]) + vectors.T @ (e[:, None] * vectors)
        near_values, turn = (part[..., ::-1] for part in np.linalg.eigh(block))
        single = turn.astype(np.float32)
        e_matrix[near] = single.T @ e_matrix[near]
        e_matrix[:, near] = e_matrix[:, near] @ single
        e_matrix[near, near] = 0
        values = self._values + e_matrix.diagonal()
        values[near] = near_values
        np.fill_diagonal(e_matrix, 0)
        return values, turn


def _in_basis(vectors: Single, e: Floats) -> Single:
    """Return Vᵀ diag(e) V. Two symmetric products, of rows with e > 0 and e < 0, take half the time of one product."""
    roots = np.sqrt(np.abs(e)).astype(np.float32)[:, None]
    above, below = (roots[rows] * vectors[rows] for rows in (e > 0, e < 0))
    result: Single = above.T @ above
    result -= below.T @ below
    return result


def _subspace(e_matrix: Single, values: Floats, v_side: slice, u_side: slice) -> Single | None:
    """Return X of the invariant subspace V + U X of diag(values) + [[a, bᵀ], [b, c]].

    It solves X (v_values − u_values) = b + c X − X (a + bᵀ X). None if the iteration does not converge soon.
    """
    a, b, c = e_matrix[v_side, v_side], e_matrix[u_side, v_side], e_matrix[u_side, u_side]
    gap = values[v_side] - values[u_side, None]
    if gap.min() <= 0 <= gap.max():
        return None
    inverse: Single = (1 / gap).astype(np.float32)
    x: Single = b * inverse
    if np.abs(x).max() > _LARGEST_ROTATION:
        return None
    previous: tuple[Single, Single] | None = None
    last_size = size_before = np.inf
    for _ in range(_CYCLES):
        new = (b + c @ x - x @ (a + b.T @ x)) * inverse
        error = new - x
        size = float(np.linalg.norm(error)) / len(error)
        if size < _EXACT:
            return new
        if size > _SLOW * size_before:
            return None
        x = new
        if previous is not None:  # Anderson's acceleration by one step
            curvature = error - previous[1]
            share = (np.vdot(error, curvature) / np.vdot(curvature, curvature)).astype(np.float32)
            x = new - share * (new - previous[0])
        previous, size_before, last_size = (new, error), last_size, size
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
