"""MINRES: communalities in [0, 1] that minimise the squared off-diagonal residuals of a correlation matrix.

With h the communalities and λ the eigenvalues of R with h on its diagonal, in descending order, the objective is

    f(h) = ½ (Σ_m λ_m² − Σ_{m≤G} max(λ_m, 0)²),    ∇f(h) = h − F(h),

F being one principal-axis step. Principal axis is gradient descent with step 1 on f, and the two have the same fixed
points (Harman and Jones 1966, Psychometrika 31, 351-368; Jöreskog 2003, Factor analysis by MINRES).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat.stats import eigen

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
    values, vectors = eigen.full(xp, eigen.with_diagonal(xp, r, h))
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
