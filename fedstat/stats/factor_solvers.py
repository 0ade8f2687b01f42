"""Solvers of the factor model: MINRES with communalities in [0, 1], and warm-started principal-axis steps.

With h the communalities and λ the eigenvalues of R with h on its diagonal, in descending order, the objective is

    f(h) = ½ (Σ_m λ_m² − Σ_{m≤G} max(λ_m, 0)²),    ∇f(h) = h − F(h),

F being one principal-axis step. Principal axis is gradient descent with step 1 on f, and the two have the same fixed
points (Harman and Jones 1966, Psychometrika 31, 351-368; Jöreskog 2003, Factor analysis by MINRES).

The diagonal of R − Σ_ε changes little from step to step. The eigenvectors of an earlier step, the reference, turn the
change into a small matrix E, and the leading subspace of the new matrix is found from them by fixed-point iterations of
a Riccati equation (Stewart 1973, Error and perturbation bounds for subspaces associated with certain eigenvalue
problems, SIAM Review 15, 727-764): three products of matrices each, in single precision, as E and all that follows from
it are small against the reference, which stays in double precision. NumPy arrays.
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


def minimise(r: Array, ones: Array, g: Array, start: Array, *, max_iter: int, tol: float) -> tuple[Array, Array, Array]:
    """Local minimum of f near ``start``, matrix by matrix, by bounded L-BFGS (Byrd, Lu, Nocedal, Zhu 1995).

    Parameters
    ----------
    r : array (..., unit, unit)
        Correlations; zero rows for dead units.
    ones : array (..., unit)
        1 for live units, 0 for dead ones.
    g : int array (...,)
        Number of factors.
    start : array (..., unit)
        Communalities to start from.
    max_iter : int
        Cap on the eigendecompositions.
    tol : float
        Largest entry of the projected gradient at which to stop.

    Returns
    -------
    communality : array (..., unit)
    n_iter : int array (...,)
        Eigendecompositions used.
    residual : array (...,)
        Largest |clip(h − ∇f, 0, 1) − h|: 0 exactly where the Karush-Kuhn-Tucker conditions hold.
    """
    xp = array_namespace(r)
    d, batch = r.shape[-1], tuple(g.shape)
    done = [
        _one(xp, *problem, max_iter=max_iter, tol=tol)
        for problem in zip(
            xp.reshape(r, (-1, d, d)), xp.reshape(ones, (-1, d)), xp.reshape(g, (-1,)), xp.reshape(start, (-1, d)),
            strict=True,
        )
    ]  # fmt: skip
    h = xp.asarray(np.stack([one[0] for one in done]), device=device_of(r))
    n_iter = xp.asarray(np.array([one[1] for one in done]), device=device_of(r))
    residual = xp.asarray(np.array([one[2] for one in done]), device=device_of(r))
    return xp.reshape(h, (*batch, d)), xp.reshape(n_iter, batch), xp.reshape(residual, batch)


def objective(xp: Any, r: Array, h: Array, g: int) -> tuple[float, Array]:
    """Value of f and one principal-axis step F(h), from one eigendecomposition of one matrix.

    The discarded eigenvalues are summed, not subtracted, so that the value keeps its digits near the minimum.
    """
    values, vectors = eigenvalues.full(xp, eigenvalues.with_diagonal(xp, r, h))
    kept = xp.clip(values[:g], min=0)
    lost = xp.sum(values[g:] ** 2) + xp.sum((values[:g] - kept) ** 2)
    return float(lost) / 2, xp.sum(vectors[:, :g] ** 2 * kept, axis=-1)


class _CappedError(Exception):
    """The cap on the eigendecompositions is reached."""


def _one(
    xp: Any, r: Array, ones: Array, g: Array, start: Array, *, max_iter: int, tol: float
) -> tuple[Floats, int, float]:
    top = np.asarray(ones.tolist())
    h = np.clip(np.asarray(start.tolist()), 0, top)
    steps, best, before = 0, (np.inf, h, h), np.inf

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
            # less a convex function, one principal-axis step would lower it by tol²/2 or more: less is a stall.
            found = scipy.optimize.minimize(
                value_and_gradient, h, jac=True, method="L-BFGS-B", bounds=np.stack([np.zeros_like(top), top], axis=1),
                options={"gtol": tol, "ftol": tol**2 / 2, "maxcor": 20, "maxfun": max_iter, "maxiter": max_iter},
            )  # fmt: skip
            left = residual(found.x, found.jac)
            if left <= tol or found.fun >= before:
                return found.x, steps, left
            h, before = found.x, found.fun
    except _CappedError:
        return best[1], steps, residual(*best[1:])


Single = NDArray[np.float32]

_SMALLEST = 150  # below this number of units a decomposition is as fast (bench_factor.py)
# Beyond these, rounding to single precision would show in the ninth digit of a communality, or the iteration be slow.
_LARGEST_CHANGE, _LARGEST_TURN = 0.02, 0.1
_NEAREST = 48  # eigenvectors on either side of the border that are turned among themselves first
_CYCLES, _EXACT, _SLOW = 10, 1e-9, 0.9
_LEAST_TOL = 1e-4


def pays(d: int, g: int, tol: float) -> bool:
    """Whether steps with g factors of d units are faster followed than decomposed, wholly or by leading eigenpairs.

    They are not followed to a ``tol`` that asks for more digits than single precision gives their differences.
    """
    return d >= _SMALLEST and g < d and tol >= _LEAST_TOL and not eigenvalues.pays(d, g)


class Reference:
    """An eigendecomposition of R − Σ_ε, whose diagonal is ``h``, from which later steps are followed.

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
        leading, others = np.arange(g)[::-1], np.arange(g, d)  # those next to the border first
        # The smaller side is followed; both determine the communalities, for they sum to h.
        own, other = (leading, others) if self._leading else (others, leading)
        self._own, self._other = values[own], values[other]
        v = vectors[:, own]
        self._squares, self._sum = (v**2).sum(1), v**2 @ self._own
        self._v, self._u = (part.astype(np.float32, order="C") for part in (v, vectors[:, other]))

    def communalities(self, h: Floats) -> Floats | None:
        """Communalities of the step from ``h``, exact to about 1e-8; None if ``h`` is too far from the reference.

        With Y = V + U X, which spans the subspace, and (R − Σ_ε) Y = Y (Λ + T), they are the diagonal of
        Y (Λ + T)(I + XᵀX)⁻¹ Yᵀ.
        """
        change = h - self._h
        shift = change.mean()  # moves all eigenvalues and turns no eigenvector
        e = (change - shift).astype(np.float32)[:, None]
        largest = np.abs(e).max()
        if largest > _LARGEST_CHANGE or self._least + shift <= largest:  # negative eigenvalues would not count
            return None
        v, u = self._v, self._u
        a, b, c = v.T @ (e * v), u.T @ (e * v), u.T @ (e * u)
        x = _subspace(a, b, c, self._own, self._other)
        if x is None:
            return None
        values = (self._own + shift).astype(np.float32)
        t, xx = a + b.T @ x, x.T @ x
        turned = _solved(xx, xx @ (np.diag(values) + t.T))
        if turned is None:
            return None
        t -= turned.T
        z = u @ x
        found = self._sum + shift * self._squares + ((2 * v + z) * z) @ values + (((v + z) @ t) * (v + z)).sum(1)
        return found if self._leading else h - found


def _subspace(a: Single, b: Single, c: Single, own: Floats, other: Floats) -> Single | None:
    """X of the invariant subspace V + U X of diag(own, other) + [[a, bᵀ], [b, c]]; None if it is not found soon.

    X (own − other) = b + c X − X (a + bᵀ X), with the diagonals of a and c among the eigenvalues.
    """
    w = min(_NEAREST, *b.shape)
    near, turn = _decomposed(np.diag(own[:w]) + a[:w, :w])
    near_other, turn_other = _decomposed(np.diag(other[:w]) + c[:w, :w])
    a, b, c = _turned(a, turn, turn), _turned(b, turn_other, turn), _turned(c, turn_other, turn_other)
    own, other = own + a.diagonal(), other + c.diagonal()
    own[:w], other[:w] = near, near_other
    for block in (a, c):
        block[:w, :w] = 0
        np.fill_diagonal(block, 0)
    gap = own - other[:, None]
    if gap.min() <= 0 <= gap.max():
        return None
    inverse: Single = (1 / gap).astype(np.float32)
    x: Single = b * inverse
    if np.abs(x).max() > _LARGEST_TURN:
        return None
    before: tuple[Single, Single] | None = None
    last = np.inf
    for _ in range(_CYCLES):
        new = (b + c @ x - x @ (a + b.T @ x)) * inverse
        error = new - x
        size = float(np.linalg.norm(error)) / len(error)
        if size < _EXACT:
            return _turned(new, turn_other.T, turn.T)
        if size > _SLOW * last:
            return None
        x = new
        if before is not None:  # Anderson's acceleration by one step
            bend = error - before[1]
            share = (np.vdot(error, bend) / np.vdot(bend, bend)).astype(np.float32)
            x = new - share * (new - before[0])
        before, last = (new, error), size
    return None


def _solved(xx: Single, s: Single) -> Single | None:
    """(I + xx)⁻¹ s by its series, as xx is small; None if that is long.

    Not by a factor of SciPy: its BLAS and NumPy's have threads of their own, which wait for work at the same time.
    """
    found = s
    for _ in range(_CYCLES):
        new: Single = s - xx @ found
        if float(np.linalg.norm(new - found)) / len(s) < _EXACT:
            return new
        found = new
    return None


def _decomposed(block: Floats) -> tuple[Floats, Single]:
    values, vectors = np.linalg.eigh(block)
    return values, vectors.astype(np.float32)


def _turned(block: Single, left: Single, right: Single) -> Single:
    """The block with its first rows and columns in another basis."""
    found = block.copy()
    found[: len(left)] = left.T @ block[: len(left)]
    found[:, : len(right)] = found[:, : len(right)] @ right
    return found
