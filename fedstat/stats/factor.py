"""Factor analysis of a layer's hidden units (FedFac §4.1): correlations, number of factors, communalities.

Variables are the hidden units of one layer; observations are the pairs (client, incoming weight).
Every function takes NumPy arrays or torch tensors (CPU or CUDA), with any leading batch dimensions,
computes in float64 and returns the kind of array it was given.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat import _check

Array = Any
Method = Literal["pa", "pc", "leverage"]
METHODS: tuple[Method, ...] = ("pa", "pc", "leverage")

# A unit whose variance is below this share of its mean square is constant as far as float32 input can tell.
_DEAD = 1e-14


class Moments(NamedTuple):
    """Sums that determine the correlation matrix; they add over clients, chunks of clients and hosts.

    Attributes
    ----------
    n : array (...,)
        Number of rows summed.
    total : array (..., unit)
        Column sums.
    cross : array (..., unit, unit)
        Cross products ZᵀZ.
    """

    n: Array
    total: Array
    cross: Array

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        return Moments(self.n + other.n, self.total + other.total, self.cross + other.cross)


class Fit(NamedTuple):
    """Communalities of one factor analysis and how the iteration ended.

    Attributes
    ----------
    communality : array (..., unit)
        ν of FedFac §4.1: the share of a unit's variance that the factors explain. NaN for a dead unit.
    loadings : array (..., unit, unit)
        Column m holds the loadings on factor m, by falling eigenvalue; columns past ``n_factors`` are 0.
    eigenvalues : array (..., unit)
        Eigenvalues of R, falling.
    n_factors, n_iter : int array (...,)
        Number of factors G; number of eigendecompositions, counted as R's psych does.
    converged : bool array (...,)
        Whether the largest change of a communality fell to ``tol``.
    heywood : bool array (..., unit)
        Communality above 1: an improper solution, in which the unit's specific variance is negative.
    """

    communality: Array
    loadings: Array
    eigenvalues: Array
    n_factors: Array
    n_iter: Array
    converged: Array
    heywood: Array


def moments(z: Array) -> Moments:
    """Sums of one block of rows.

    Parameters
    ----------
    z : array (..., row, unit)
        Rows are (client, weight) pairs, in any order and any partition.

    Examples
    --------
    >>> import numpy as np
    >>> z = np.random.default_rng(0).normal(size=(40, 3))
    >>> both, whole = moments(z[:10]) + moments(z[10:]), moments(z)
    >>> np.allclose(correlation(both), correlation(whole))
    True
    """
    xp = array_namespace(z)
    z = xp.astype(z, xp.float64)
    n = xp.full(z.shape[:-2], float(z.shape[-2]), dtype=xp.float64, device=device_of(z))
    return Moments(n, xp.sum(z, axis=-2), xp.matrix_transpose(z) @ z)


def broken_units(m: Moments) -> list[int]:
    """Units (positions) whose sums are NaN or infinite in any batch element, in rising order."""
    xp = array_namespace(m.cross)
    bad = ~xp.isfinite(xp.linalg.diagonal(m.cross))
    return sorted({int(i) for i in xp.nonzero(bad)[-1]})


def correlation(m: Moments) -> Array:
    """Correlation matrix of the units (FedFac §4.1, R = ZᵀZ of the standardised Z).

    Parameters
    ----------
    m : Moments
        Sums over all rows.

    Returns
    -------
    array (..., unit, unit)
        Unit diagonal. Rows and columns of a unit with zero variance (a dead unit) are NaN.

    Raises
    ------
    ValueError
        If fewer than two rows were summed, or a sum is not finite.
    """
    xp = array_namespace(m.cross)
    if bool(xp.any(m.n < 2)):
        raise ValueError(
            f"a correlation needs at least 2 rows (client, weight), but got {int(xp.min(m.n))}. "
            "Use more clients or a layer with more incoming weights."
        )
    n = m.n[..., None]
    square = xp.linalg.diagonal(m.cross)
    if bad := broken_units(m):
        raise ValueError(
            f"the weights hold NaN or infinite values, first in unit(s) {bad[:3]}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
    mean = m.total / n
    dead = square / n - mean**2 <= _DEAD * square / n
    cov = m.cross - m.total[..., :, None] * mean[..., None, :]
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(cov))
    one = xp.asarray(1.0, dtype=xp.float64, device=device_of(cov))
    scale = 1 / xp.sqrt(xp.where(dead, nan, xp.linalg.diagonal(cov)))
    r = cov * scale[..., :, None] * scale[..., None, :]
    return _with_diagonal(xp, (r + xp.matrix_transpose(r)) / 2, xp.where(dead, nan, one))


def count_factors(eigenvalues: Array, *, kappa: float) -> Array:
    """Smallest number of leading eigenvalues that hold a share κ of the total (FedFac §4.1).

    G = min{m : Σ_{j≤m} γ_j / Σ_j γ_j ≥ κ}. A tie counts as reached, up to rounding (1e-12).

    Parameters
    ----------
    eigenvalues : array (..., unit)
        Eigenvalues of R, falling. Negative ones (rounding) count as 0.
    kappa : float
        0 < kappa <= 1.

    Examples
    --------
    >>> import numpy as np
    >>> [int(count_factors(np.array([2.0, 1.0, 1.0]), kappa=k)) for k in (0.4, 0.5, 0.75, 1.0)]
    [1, 1, 2, 3]
    """
    kappa = _check.real("kappa", kappa, low=0, open_low=True, high=1)
    xp = array_namespace(eigenvalues)
    gamma = xp.clip(eigenvalues, min=0)
    share = xp.cumulative_sum(gamma, axis=-1) / xp.sum(gamma, axis=-1, keepdims=True)
    return 1 + xp.sum(xp.astype(share < kappa - 1e-12, xp.int64), axis=-1)


def fit(
    r: Array,
    *,
    kappa: float = 0.85,
    n_factors: int | None = None,
    method: Method = "pa",
    max_iter: int = 50,
    tol: float = 1e-3,
    initial: Array | None = None,
) -> Fit:
    """Communalities of a correlation matrix.

    Parameters
    ----------
    r : array (..., unit, unit)
        Correlations; NaN rows and columns mark dead units, which take no part and get communality NaN.
    kappa : float
        Share of the eigenvalues' sum that decides the number of factors; unused if ``n_factors`` is given.
    n_factors : int, optional
        1 <= n_factors <= number of live units.
    method : {"pa", "pc", "leverage"}
        ``"pa"`` is iterated principal axis from the principal-component loadings, the paper's text:
        Σ_ε ← diag(R − ÂÂᵀ), Â from the top G positive eigenpairs of R − Σ_ε. ``"pc"`` is its start,
        Σ_{m≤G} γ_m u_jm². ``"leverage"`` is the rule of the authors' published code, Σ_{m≤G−1} u_jm².
    max_iter : int
        Largest number of eigendecompositions for ``"pa"``.
    tol : float
        ``"pa"`` stops when no communality changes by more than this.
    initial : array (..., unit), optional
        Communalities from which ``"pa"`` iterates, in place of the principal-component start; for a matrix close to
        one analysed before this saves most of the steps, and where the iteration has one fixed point it is the same.

    Returns
    -------
    Fit
        Non-convergence is reported in ``converged``, never repaired. With κ >= 0.85 the plain iteration is often
        still moving after thousands of steps (communalities run to 1 and past it): ask
        :func:`fedstat.stats.split.iteration_stability` whether the split moves too.

    Raises
    ------
    ValueError
        If an argument is out of range or every unit is dead.
    """
    xp = array_namespace(r)
    _check.choice("method", method, METHODS)
    _check.integer("max_iter", max_iter)
    _check.real("tol", tol, low=0)
    r = xp.astype(r, xp.float64)
    dead = xp.isnan(xp.linalg.diagonal(r))
    live = xp.sum(xp.astype(~dead, xp.int64), axis=-1)
    if bool(xp.any(live == 0)):
        raise ValueError("every unit has zero variance: there is nothing to analyse. Were the clients trained at all?")
    # A dead unit becomes a zero row and column: its eigenvalue 0 and coordinate eigenvector touch no other unit.
    r = xp.where(dead[..., :, None] | dead[..., None, :], xp.zeros_like(r), r)
    ones = xp.astype(~dead, xp.float64)
    warm = method == "pa" and initial is not None
    if warm:
        values, vectors = xp.flip(xp.linalg.eigvalsh(_with_diagonal(xp, r, ones)), axis=-1), None
    else:
        values, vectors = _eigh(xp, _with_diagonal(xp, r, ones))
    g = count_factors(values, kappa=kappa) if n_factors is None else _given(xp, n_factors, live)

    n_iter, converged = xp.ones_like(live), xp.ones_like(live, dtype=xp.bool)
    if method == "leverage":
        loadings = vectors * _leading(xp, values, g - 1)
    elif warm:
        ones = xp.where(dead, xp.zeros_like(ones), xp.astype(initial, xp.float64))
        loadings = _loadings(xp, *_eigh(xp, _with_diagonal(xp, r, ones)), g)
        n_iter = n_iter + 1
    else:
        loadings = _loadings(xp, values, vectors, g)
    h = xp.sum(loadings**2, axis=-1)
    if method == "pa":
        loadings, h, n_iter, converged = _iterate(xp, r, ones, loadings, h, g, n_iter, max_iter, tol)
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(h))
    return Fit(
        communality=xp.where(dead, nan, h),
        loadings=loadings,
        eigenvalues=values,
        n_factors=g,
        n_iter=n_iter,
        converged=converged,
        heywood=h > 1 + 1e-12,
    )


def _iterate(
    xp: Any, r: Array, start: Array, loadings: Array, h: Array, g: Array, n_iter: Array, max_iter: int, tol: float
) -> tuple[Array, Array, Array, Array]:
    """Plain principal-axis iteration of every matrix until each one's own communalities stand still."""
    moving = xp.max(xp.abs(h - start), axis=-1) > tol
    for _ in range(int(xp.max(n_iter)), max_iter):
        if not bool(xp.any(moving)):
            break
        new_loadings = _loadings(xp, *_eigh(xp, _with_diagonal(xp, r, h)), g)
        new = xp.sum(new_loadings**2, axis=-1)
        change = xp.max(xp.abs(new - h), axis=-1)
        loadings = xp.where(moving[..., None, None], new_loadings, loadings)
        h = xp.where(moving[..., None], new, h)
        n_iter = n_iter + xp.astype(moving, xp.int64)
        moving = moving & (change > tol)
    return loadings, h, n_iter, ~moving


def _eigh(xp: Any, a: Array) -> tuple[Array, Array]:
    """Eigenpairs of a symmetric matrix, largest eigenvalue first."""
    values, vectors = xp.linalg.eigh(a)
    return xp.flip(values, axis=-1), xp.flip(vectors, axis=-1)


def _leading(xp: Any, values: Array, g: Array) -> Array:
    """Return 1 for the first g columns and 0 for the others, shaped to multiply (..., unit, factor)."""
    position = xp.arange(values.shape[-1], device=device_of(values))
    return xp.astype(position < g[..., None], xp.float64)[..., None, :]


def _loadings(xp: Any, values: Array, vectors: Array, g: Array) -> Array:
    return vectors * xp.sqrt(xp.clip(values, min=0))[..., None, :] * _leading(xp, values, g)


def _with_diagonal(xp: Any, a: Array, diagonal: Array) -> Array:
    eye = xp.eye(a.shape[-1], dtype=xp.bool, device=device_of(a))
    return xp.where(eye, diagonal[..., None, :], a)


def _given(xp: Any, n_factors: int, live: Array) -> Array:
    n = _check.integer("n_factors", n_factors, high=int(xp.min(live)))
    return n + xp.zeros_like(live)
