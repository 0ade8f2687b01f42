"""Factor analysis of a layer's hidden units (FedFac §4.1): number of factors, loadings, communalities.

Variables are the hidden units of one layer; observations are the pairs (client, incoming weight).
All functions take NumPy arrays or torch tensors (CPU or CUDA) with any leading batch dims. They compute in float64 and
return arrays of the type of their input.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from array_api_compat import array_namespace, is_numpy_array
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats import factor_solvers
from fedstat.stats.eigenvalues import full, leading, pays, with_diagonal
from fedstat.stats.factor_solvers import minimise, objective

Array = Any
Init = Literal["pc", "smc"] | Array
Method = Literal["pa", "minres", "pc", "leverage"]
METHODS: tuple[Method, ...] = ("pa", "minres", "pc", "leverage")
ITERATE: tuple[Method, ...] = ("pa", "minres")

# A communality is improper if it exceeds 1 by more than rounding.
_IMPROPER = 1e-12


class Fit(NamedTuple):
    """Communalities of a factor analysis and the state of its iteration.

    Attributes
    ----------
    communality : array (..., unit)
        ν of FedFac §4.1: the proportion of a unit's variance that the factors explain. NaN for a constant unit.
    loadings : array (..., unit, factor)
        Column m holds the loadings on factor m, in descending order of eigenvalue; columns past ``n_factors`` are 0.
        Squared loadings of a row sum to ν, unless the bound limits ν to 1.
    eigenvalues : array (..., unit)
        Eigenvalues of R, descending; NaN where they were not computed (fixed ``n_factors`` on a large layer).
    n_factors, n_iter : int array (...,)
        Number of factors G; number of eigendecompositions, counted as in R's psych.
    converged : bool array (...,)
        True if the largest change of a communality is at most ``tol``.
    heywood : bool array (..., unit)
        True for a communality above 1, an improper solution with a negative specific variance, and for a communality
        that the bound limits to 1.
    residual : array (...,)
        Largest change of a communality in the last step. For ``"minres"`` and ``heywood="bound"`` this is the
        projected gradient of the MINRES objective, exactly 0 if the Karush-Kuhn-Tucker conditions hold.
    """

    communality: Array
    loadings: Array
    eigenvalues: Array
    n_factors: Array
    n_iter: Array
    converged: Array
    heywood: Array
    residual: Array


def count_factors(eigenvalues: Array, *, kappa: float) -> Array:
    """Count the leading eigenvalues that reach a proportion κ of the eigenvalue sum (FedFac §4.1).

    G = min{m : Σ_{j≤m} γ_j / Σ_j γ_j ≥ κ}, with equality up to rounding (1e-12).

    Parameters
    ----------
    eigenvalues : array (..., unit)
        Eigenvalues of R, descending. Negative ones (rounding) count as 0.
    kappa : float
        0 < kappa <= 1.

    Examples
    --------
    >>> import numpy as np
    >>> [int(count_factors(np.array([2.0, 1.0, 1.0]), kappa=k)) for k in (0.4, 0.5, 0.75, 1.0)]
    [1, 1, 2, 3]
    """
    kappa = check.real("kappa", kappa, low=0, open_low=True, high=1)
    xp = array_namespace(eigenvalues)
    gamma = xp.clip(eigenvalues, min=0)
    share = xp.cumulative_sum(gamma, axis=-1) / xp.sum(gamma, axis=-1, keepdims=True)
    return 1 + xp.sum(xp.astype(share < kappa - 1e-12, xp.int64), axis=-1)


def gap(eigenvalues: Array, n_factors: Array) -> Array:
    """Return the eigenvalue of the last factor minus the next eigenvalue: a small gap means unidentified factors.

    Parameters
    ----------
    eigenvalues : array (..., unit)
        Descending; NaN where unknown.
    n_factors : int array (...,)

    Returns
    -------
    array (...,)
        NaN if an eigenvalue is unknown, or if there are as many factors as units.

    Examples
    --------
    >>> import numpy as np
    >>> gap(np.array([[2.5, 1.5, 0.5, 0.5]] * 2), np.array([1, 2]))
    array([1., 1.])
    """
    xp = array_namespace(eigenvalues)
    positions = xp.arange(eigenvalues.shape[-1], device=device_of(eigenvalues))
    zeros = xp.zeros_like(eigenvalues)
    last, first_cut = (
        xp.sum(xp.where(positions == i[..., None], eigenvalues, zeros), axis=-1) for i in (n_factors - 1, n_factors)
    )
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(eigenvalues))
    return xp.where(n_factors < eigenvalues.shape[-1], last - first_cut, nan)


def fit(
    r: Array,
    *,
    kappa: float = 0.85,
    n_factors: int | None = None,
    method: Method = "pa",
    init: Init = "pc",
    heywood: Literal["allow", "bound"] = "allow",
    max_iter: int | None = None,
    tol: float | None = None,
    loadings: bool = True,
) -> Fit:
    """Fit a factor model to a correlation matrix.

    Parameters
    ----------
    r : array (..., unit, unit)
        Correlations; NaN rows and columns mark constant units, which are excluded and have communality NaN.
    kappa : float
        Proportion of the eigenvalue sum that the factors must reach; not used with ``n_factors``.
    n_factors : int, optional
        1 <= n_factors <= number of units that are not constant.
    method : {"pa", "minres", "pc", "leverage"}
        - ``"pa"``: iterated principal axis (text of FedFac), Σ_ε ← diag(R − ÂÂᵀ), Â from the top G positive eigenpairs
          of R − Σ_ε.
        - ``"minres"``: minimizes the squared off-diagonal residuals over 0 <= ν <= 1. It has the fixed points of
          ``"pa"`` if none of them is improper, and is well posed where ``"pa"`` exceeds 1.
        - ``"pc"``: the initial values of ``"pa"``, Σ_{m≤G} γ_m u_jm².
        - ``"leverage"``: the rule of the published code of FedFac, Σ_{m≤G−1} u_jm².
    init : {"pc", "smc"} or array (..., unit)
        Initial communalities of ``"pa"`` and ``"minres"``: principal components (all 1, as in FedFac), squared multiple
        correlations, or an array, such as the communalities of the previous round.
    heywood : {"allow", "bound"}
        ``"allow"`` lets communalities of ``"pa"`` exceed 1, ``"bound"`` clips them to 1 in every step; ``"minres"`` is
        always bounded.
    max_iter : int, optional
        Largest number of eigendecompositions; 50 for ``"pa"``, 1000 for ``"minres"``.
    tol : float, optional
        Largest change of a communality in a principal-axis step that stops the iteration; 1e-3 for ``"pa"``, 1e-6 for
        ``"minres"``.
    loadings : bool
        If False, loadings may have no columns: ``"pa"`` then computes them only if it needs them.

    Returns
    -------
    Fit
        ``converged`` reports non-convergence; the result is not repaired. With κ >= 0.85 the iteration often takes
        hundreds of steps, sometimes thousands, as communalities reach and exceed 1: compare the split
        with that of a larger ``max_iter``.

    Raises
    ------
    ValueError
        If an argument is out of range or every unit is constant.

    Notes
    -----
    On the CPU, for at least 150 units and many factors, eigenvectors of an earlier step replace decompositions if they
    are accurate enough, see :mod:`fedstat.stats.factor_solvers`. The number of steps is equal, and communalities agree
    to about 1e-8.
    """
    xp = array_namespace(r)
    check.choice("method", method, METHODS)
    check.choice("heywood", heywood, ("allow", "bound"))
    max_iter = check.integer("max_iter", (1000 if method == "minres" else 50) if max_iter is None else max_iter)
    tol = check.real("tol", (1e-6 if method == "minres" else 1e-3) if tol is None else tol, low=0)
    r = xp.astype(r, xp.float64)
    constant = xp.isnan(xp.linalg.diagonal(r))
    n_varying = xp.sum(xp.astype(~constant, xp.int64), axis=-1)
    if bool(xp.any(n_varying == 0)):
        raise ValueError("every unit has zero variance, so that no factors exist. Check that the clients were trained.")
    # A constant unit becomes a zero row and column: its eigenvalue 0 and coordinate eigenvector affect no other unit.
    r = xp.where(constant[..., :, None] | constant[..., None, :], xp.zeros_like(r), r)
    ones = xp.astype(~constant, xp.float64)
    unit = with_diagonal(xp, r, ones)
    g, most = (None, 0) if n_factors is None else _fixed_factors(xp, n_factors, n_varying)
    values, vectors = _decompose(xp, unit, most, method, init, tol)
    g = count_factors(values, kappa=kappa) if g is None else g
    if method == "pa":
        h, bound = _initial_values(xp, init, values, vectors, ones), heywood == "bound"
        pairs = (values, vectors) if isinstance(init, str) and init == "pc" else None
        a, h, n_iter, residual = _iterate(xp, r, h, g, pairs, bound, max_iter, tol, needs_loadings=loadings or bound)
    elif method == "minres":
        h = _initial_values(xp, init, values, vectors, ones)
        h, n_iter, residual = minimise(r, ones, g, h, max_iter=max_iter, tol=tol)
        a = _loadings(xp, *_pairs(xp, r, h, g, None, tol), g)
    else:
        a = _loadings(xp, values, vectors, g) if method == "pc" else vectors * _leading(xp, values, g - 1)
        h, n_iter, residual = xp.sum(a**2, axis=-1), xp.ones_like(g), xp.zeros_like(n_varying, dtype=xp.float64)
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(h))
    return Fit(
        communality=xp.where(constant, nan, h),
        loadings=a[..., : int(xp.max(g))],
        eigenvalues=_pad(xp, values, r.shape[-1]),
        n_factors=g,
        n_iter=n_iter,
        converged=residual <= tol,
        heywood=(h > 1 + _IMPROPER) | ((h > 1 - _IMPROPER) & (xp.sum(a**2, axis=-1) > 1 + _IMPROPER)),
        residual=residual,
    )


def _decompose(xp: Any, r: Array, most: int, method: Method, init: Init, tol: float) -> tuple[Array, Array]:
    """Return all eigenpairs of R, or as many as needed: values without vectors, or ``most`` leading pairs unless 0."""
    has_values = not isinstance(init, str)
    if has_values and method in ITERATE:  # the fit uses no vectors
        return xp.flip(xp.linalg.eigvalsh(r), axis=-1), r
    if not most or (not has_values and init == "smc") or not pays(r.shape[-1], most):
        return full(xp, r)
    return leading(xp, r, most, accuracy=_accuracy(tol))


def starts(r: Array, n_starts: int, *, seed: int, apart: float = 0.01, **options: Any) -> tuple[Fit, int]:
    """Fit from several random initial values; return the best solution and the number of distinct solutions.

    Parameters
    ----------
    r : array (unit, unit)
        One correlation matrix.
    n_starts : int
        Number of uniform draws of initial communalities, in addition to ``options["init"]``.
    seed : int
    apart : float
        Solutions are distinct if a communality differs by more than ``apart``.
    **options
        Arguments of :func:`fit`; the method must iterate.

    Returns
    -------
    best : Fit
        For ``"minres"`` the solution with the smallest objective, the first on ties; for ``"pa"``, which has no
        objective, the solution from ``options["init"]``.
    n_solutions : int
        Number of distinct solutions, including solutions that did not converge.
    """
    xp = array_namespace(r)
    random = generator(seed, "starts").uniform(size=(n_starts, r.shape[-1]))
    first = fit(r, **options)
    stack = xp.zeros((n_starts, 1, 1), dtype=xp.float64, device=device_of(r)) + r
    refits = fit(stack, **{**options, "init": xp.asarray(random, device=device_of(r))})
    nu = xp.concat([first.communality[None], refits.communality])
    nu = xp.where(xp.isnan(nu), xp.zeros_like(nu), nu)
    distinct: list[Array] = []
    for solution in nu:
        if all(bool(xp.max(xp.abs(solution - other)) > apart) for other in distinct):
            distinct.append(solution)
    if options.get("method") != "minres":
        return first, len(distinct)
    clean = xp.where(xp.isnan(r), xp.zeros_like(r), r)
    values = [objective(xp, clean, solution, int(first.n_factors))[0] for solution in nu]
    best = min(range(len(values)), key=lambda i: values[i] - (1e-9 if i == 0 else 0))
    return (first if best == 0 else Fit(*(field[best - 1] for field in refits))), len(distinct)


def _iterate(
    xp: Any,
    r: Array,
    h: Array,
    g: Array,
    initial_pairs: tuple[Array, Array] | None,
    bound: bool,
    max_iter: int,
    tol: float,
    *,
    needs_loadings: bool,
) -> tuple[Array, Array, Array, Array]:
    """Iterate principal axis until each matrix has converged; return loadings, communalities, steps and residuals."""
    n_iter, residual = xp.zeros_like(g), xp.zeros_like(g, dtype=xp.float64)
    is_moving, most = xp.ones_like(g, dtype=xp.bool), int(xp.max(g))
    loadings, pairs, reference = xp.zeros_like(r)[..., :most], initial_pairs, None
    follows = is_numpy_array(r) and r.ndim == 2 and factor_solvers.pays(len(r), most, tol)
    for step in range(max_iter):
        start, new = h, None if reference is None else reference.communalities(h)
        followed = new is not None
        if not followed:
            if step > 0 or pairs is None:
                pairs = _pairs(xp, r, h, g, None if pairs is None else pairs[1], tol)
            new_loadings = _loadings(xp, *pairs, g)[..., :most]
            new = xp.sum(new_loadings**2, axis=-1)
            loadings = xp.where(is_moving[..., None, None], new_loadings, loadings)
            decomposed = (h, *pairs)
        new = xp.clip(new, max=1.0) if bound else new
        residual = xp.where(is_moving, xp.max(xp.abs(new - h), axis=-1), residual)
        h = xp.where(is_moving[..., None], new, h)
        n_iter = n_iter + xp.astype(is_moving, xp.int64)
        is_moving = is_moving & (residual > tol)
        if not bool(xp.any(is_moving)):
            break
        if follows and not followed:
            reference = factor_solvers.Reference(*decomposed, most)
    if followed:
        loadings = (
            _loadings(xp, *_pairs(xp, r, start, g, None, tol), g)[..., :most] if needs_loadings else loadings[..., :0]
        )
    return loadings, h, n_iter, residual


def _pairs(xp: Any, r: Array, h: Array, g: Array, guess: Array | None, tol: float) -> tuple[Array, Array]:
    """Return the leading eigenpairs of the reduced correlation matrix R − Σ_ε, whose diagonal is h."""
    reduced, most = with_diagonal(xp, r, h), int(xp.max(g))
    if pays(r.shape[-1], most):
        return leading(xp, reduced, most, guess=guess, accuracy=_accuracy(tol))
    return full(xp, reduced)


def _accuracy(tol: float) -> float:
    """Return the residual of eigenpairs at which communalities are accurate compared with ``tol``."""
    return min(max(1e-4 * tol, 1e-13), 1e-7)


def _initial_values(xp: Any, init: Init, values: Array, vectors: Array, ones: Array) -> Array:
    if isinstance(init, str) and init == "pc":
        return ones
    if isinstance(init, str) and init == "smc":
        inverse = xp.sum(vectors**2 / xp.clip(values, min=1e-12)[..., None, :], axis=-1)
        return ones * xp.clip(1 - 1 / inverse, min=0.0)
    if isinstance(init, str):
        check.choice("init", init, ("pc", "smc"))
    init = check.numbers("init", init)
    h = xp.astype(xp.asarray(init, device=device_of(ones)), xp.float64)
    if h.shape != ones.shape or bool(xp.any(h < 0)):
        raise ValueError(
            f"init must be 'pc', 'smc' or communalities >= 0 of shape {tuple(ones.shape)}, "
            f"but got shape {tuple(h.shape)} with minimum {float(xp.min(h)):g}"
        )
    return ones * xp.where(xp.isfinite(h), h, ones)  # a unit without a value, constant before, gets 1 as in "pc"


def _leading(xp: Any, values: Array, g: Array) -> Array:
    """Return 1 for the first g columns and 0 for the others, shaped to multiply (..., unit, factor)."""
    position = xp.arange(values.shape[-1], device=device_of(values))
    return xp.astype(position < g[..., None], xp.float64)[..., None, :]


def _loadings(xp: Any, values: Array, vectors: Array, g: Array) -> Array:
    return vectors * xp.sqrt(xp.clip(values, min=0))[..., None, :] * _leading(xp, values, g)


def _pad(xp: Any, values: Array, d: int) -> Array:
    missing = xp.zeros((*values.shape[:-1], d - values.shape[-1]), dtype=xp.float64, device=device_of(values))
    return xp.concat([values, missing * float("nan")], axis=-1)


def _fixed_factors(xp: Any, n_factors: int, n_varying: Array) -> tuple[Array, int]:
    n = check.integer("n_factors", n_factors, high=int(xp.min(n_varying)))
    return n + xp.zeros_like(n_varying), n
