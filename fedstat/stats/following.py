"""Principal-axis steps near an earlier one, without a new eigendecomposition.

The diagonal of R − Σ_ε changes little from step to step. The eigenvectors of an earlier step, the reference, turn the
change into a small matrix E, and the leading subspace of the new matrix is found from them by fixed-point iterations of
a Riccati equation (Stewart 1973, Error and perturbation bounds for subspaces associated with certain eigenvalue
problems, SIAM Review 15, 727-764): three products of matrices each, in single precision, as E and all that follows from
it are small against the reference, which stays in double precision. NumPy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedstat.stats import eigen

Array = NDArray[np.float64]
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
    return d >= _SMALLEST and g < d and tol >= _LEAST_TOL and not eigen.pays(d, g)


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

    def __init__(self, h: Array, values: Array, vectors: Array, g: int) -> None:
        d = len(h)
        self._h, self._least, self._leading = h, values[g - 1], g <= d - g
        leading, others = np.arange(g)[::-1], np.arange(g, d)  # those next to the border first
        # The smaller side is followed; both determine the communalities, for they sum to h.
        own, other = (leading, others) if self._leading else (others, leading)
        self._own, self._other = values[own], values[other]
        v = vectors[:, own]
        self._squares, self._sum = (v**2).sum(1), v**2 @ self._own
        self._v, self._u = (part.astype(np.float32, order="C") for part in (v, vectors[:, other]))

    def communalities(self, h: Array) -> Array | None:
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


def _subspace(a: Single, b: Single, c: Single, own: Array, other: Array) -> Single | None:
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


def _decomposed(block: Array) -> tuple[Array, Single]:
    values, vectors = np.linalg.eigh(block)
    return values, vectors.astype(np.float32)


def _turned(block: Single, left: Single, right: Single) -> Single:
    """The block with its first rows and columns in another basis."""
    found = block.copy()
    found[: len(left)] = left.T @ block[: len(left)]
    found[:, : len(right)] = found[:, : len(right)] @ right
    return found
