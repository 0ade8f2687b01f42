"""Recovery of the true split of model (8) from true weights, by κ and method."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat._utils.loops import track
from fedstat.results.base import TERMINAL, aligned
from fedstat.sim.model8 import SOURCE, Means, Model8, package_version, replicate_seed, truth
from fedstat.stats import factor, icc, moments, split
from fedstat.store import to_json

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ICC: Literal["icc"] = "icc"
ESTIMATORS: tuple[str, ...] = (*factor.METHODS, ICC)
VARIABLES: dict[str, type] = {"auc": float, "ari": float, "heywood": float, "converged": bool, "n_iter": int}

# Clients per block: small enough for memory, large enough that sums for the agreement take little time.
_BLOCK = 20
_FIELDS = ("communality", "converged", "n_iter")


def correlation(model: Model8) -> Floats:
    """Compute correlations (unit, unit) of the true weights, client by client (FedFac §4.1)."""
    return sums(model, agreement=False)[0]


def sums(model: Model8, *, agreement: bool) -> tuple[Floats, Floats]:
    """Compute R (unit, unit) and, if ``agreement``, ICC2 (1, unit), in one pass over the clients."""
    clients = truth(model)
    total, between = None, None
    while block := [client.w for client in islice(clients, _BLOCK)]:
        for w in block:
            client_sums = moments.moments(w.T)
            total = client_sums if total is None else total + client_sums
        if agreement:
            block_sums = icc.sums(np.stack(block))
            between = block_sums if between is None else between + block_sums
    r: Floats = moments.correlation(total)  # type: ignore[arg-type]
    if between is None:
        return r, np.empty((0, model.m))
    return r, icc.coefficients(icc.mean_squares(between)).icc[None, :, icc.TYPES.index("ICC2")]


def scores(
    model: Model8, kappa: list[float], methods: list[str], *, max_iter: int, tol: float
) -> dict[str, NDArray[Any]]:
    """Compute :data:`VARIABLES` (kappa, method) of one draw of the weights, and n_factors (kappa,)."""
    r, agreement = sums(model, agreement=ICC in methods)
    pairs = eigen(r)
    counts = count_factors(pairs[0], kappa)
    by_method = []
    for name in methods:
        if name == ICC:
            values = {**score(agreement, model.unit_shared), "converged": [True], "n_iter": [0]}
            by_method.append({key: np.repeat(x, len(kappa)) for key, x in values.items()})
            continue
        nu, converged, n_iter = communality(r, name, pairs, counts, max_iter=max_iter, tol=tol)
        by_method.append({**score(nu, model.unit_shared), "converged": converged, "n_iter": n_iter})
    out = {name: np.stack([values[name] for values in by_method], axis=-1) for name in VARIABLES}
    return {**out, "n_factors": counts}


def eigen(r: Floats) -> tuple[Floats, Floats]:
    """Compute eigenvalues (component,), descending, and eigenvectors (unit, component) of R."""
    values, vectors = np.linalg.eigh(r)
    return values[::-1], vectors[:, ::-1]


def count_factors(eigenvalues: Floats, kappa: list[float]) -> Integers:
    """Count the factors G (kappa,)."""
    return np.array([factor.count_factors(eigenvalues, kappa=k) for k in kappa])


def communality(
    r: Floats, method: str, pairs: tuple[Floats, Floats], counts: Integers, *, max_iter: int, tol: float
) -> tuple[Floats, NDArray[np.bool_], Integers]:
    """Compute ν (count, unit), converged and n_iter (count,) of one method for every number of factors."""
    values, vectors = pairs
    if method in ("pc", "leverage"):
        weight, offset = (np.clip(values, 0, None), 0) if method == "pc" else (np.ones_like(values), 1)
        cumulative = np.cumsum(vectors**2 * weight, axis=-1).T
        nu = np.concatenate([np.zeros((1, len(r))), cumulative])[counts - offset]
        return nu, np.ones(len(counts), bool), np.ones(len(counts), np.int64)
    distinct_counts, index = np.unique(counts, return_inverse=True)
    fits = [factor.fit(r, n_factors=int(g), method=method, max_iter=max_iter, tol=tol) for g in distinct_counts]  # type: ignore[arg-type]
    nu, converged, n_iter = (np.array([getattr(fit, name) for fit in fits])[index] for name in _FIELDS)
    return nu, converged, n_iter


def score(values: Floats, shared: NDArray[np.bool_]) -> dict[str, Any]:
    """Score communalities or agreement (count, unit) against the true split (unit,)."""
    values = np.round(values, 12)  # rounding errors are ties: with all factors, ν = 1 for every unit
    estimate = split.shared(values, tau=float(1 - shared.mean()))
    return {
        "auc": split.auc(values, shared),
        "ari": split.adjusted_rand(estimate, shared),
        "heywood": (values > 1 + 1e-12).mean(axis=-1),
    }


def grids(**values: float | Sequence[float]) -> dict[str, list[float]]:
    """Validate values of p, alpha and kappa and return them as lists."""
    out = {}
    for name, x in values.items():
        numbers = [x] if np.ndim(x) == 0 else list(x)  # type: ignore[arg-type]
        out[name] = check.distinct(name, [check.real(name, number) for number in numbers])
    for k in out.get("kappa", []):
        check.real("kappa", k, low=0, open_low=True, high=1)
    return out


def require_both_kinds(model: Model8) -> None:
    """Raise ValueError if all units are shared, or all are personal."""
    n_shared = int(model.unit_shared.sum())
    if n_shared in (0, model.m):
        raise ValueError(
            f"p must give both shared and personal units, but got {n_shared} shared with p = {model.p:g} and m = "
            f"{model.m}. Use a p further from 0 and 1."
        )


def require_agreement(model: Model8) -> None:
    """Raise ValueError if agreement has fewer than 2 clients or covariates."""
    if model.clients < 2 or model.d < 2:
        raise ValueError(
            f"agreement between clients (icc) needs at least 2 clients and 2 covariates, but got clients = "
            f"{model.clients} and d = {model.d}. Leave icc out of the methods."
        )


GRID = (*(k / 100 for k in range(3, 100, 3)), 0.85, 0.95, 0.97, 0.98, 0.995, 1.0)


@check.named_options()
def spectrum(
    *,
    p: float | Sequence[float] = 0.5,
    alpha: float | Sequence[float] = 0.4,
    kappa: float | Sequence[float] = GRID,
    method: str = "pa",
    clients: int = 100,
    d: int = 100,
    m: int = 200,
    means: Means = "independent",
    seed: int = 0,
    max_iter: int = 50,
    tol: float = 1e-3,
) -> xr.Dataset:
    r"""Compute the spectrum of R on model (8), its relation to shared units, and communalities by κ.

    κ selects eigenvectors in descending order of eigenvalue until their eigenvalues reach the proportion κ of the sum.
    The score of an eigenvector is the proportion of its squared loadings on shared units,

    .. math:: s_j = \sum_{i \text{ shared}} \ell_{ij}^2 / \sum_i \ell_{ij}^2, \qquad \ell_j = \sqrt{\gamma_j}\, u_j,

    which is 1 if it belongs to truly shared units and 0 if it belongs to personal units.

    Parameters
    ----------
    p, alpha : float or sequence of float
        Proportions of shared units and of shared covariates. p must give both shared and personal units.
    kappa : float or sequence of float
        Proportions of the eigenvalue sum, 0 < kappa <= 1; they are sorted.
    method : {"pa", "minres", "pc", "leverage"}
        Estimator of ν.
    clients, d, m, means, seed
        Parameters of :func:`fedstat.sim.generate`.
    max_iter, tol
        Stopping rule of iterative methods, as in :func:`fedstat.stats.factor.fit`.

    Returns
    -------
    xarray.Dataset
        Coordinate ``unit_shared`` (p, unit). Variables by (p, alpha, component), in descending order of eigenvalue:

        - ``eigenvalue`` of R;
        - ``cumulative_share``, the proportion of the eigenvalue sum up to this component;
        - ``shared_share``, the proportion s of its squared loadings.

        Variables by (p, alpha, kappa):

        - ``n_factors``;
        - ``auc`` of ν for the true groups;
        - ``communality`` ν, by unit as well.

    Raises
    ------
    ValueError
        If an argument is out of range, or p gives only shared or only personal units.

    Notes
    -----
    If R is singular, the eigenvectors of eigenvalue 0 are an arbitrary basis. ``shared_share`` of these last components
    depends on that basis and has no meaning.

    References
    ----------
    FedFac, §4.1 (the number of factors) and §4.3.1 (model (8)).

    Examples
    --------
    The first eigenvector belongs to personal units, the next ones to shared units:

    >>> result = spectrum(p=0.5, kappa=[0.3, 0.75], clients=30, d=30, m=40).squeeze()
    >>> result.shared_share[:6].values.round(2)
    array([0., 1., 1., 1., 1., 1.])
    >>> result.auc.values.round(2), result.n_factors.values
    (array([0.05, 1.  ]), array([ 2, 12]))
    """
    axes = grids(p=p, alpha=alpha, kappa=kappa)
    axes["kappa"].sort()
    check.choice("method", method, factor.METHODS)
    check.integer("max_iter", max_iter, low=2)
    check.real("tol", tol, low=0)
    models = [
        [Model8(clients=clients, d=d, m=m, p=p_i, alpha=alpha_j, means=means, seed=seed) for alpha_j in axes["alpha"]]
        for p_i in axes["p"]
    ]
    for row in models:
        for model in row:
            require_both_kinds(model)
    with threadpool_limits(1, user_api="blas"):
        spectra = [[_decompose(x, axes["kappa"], method, max_iter=max_iter, tol=tol) for x in row] for row in models]
    settings = {**axes, "method": method, "clients": clients, "d": d, "m": m, "means": means, "seed": seed}
    return xr.Dataset(
        {
            name: (("p", "alpha", *dims), np.array([[values[name] for values in row] for row in spectra]))
            for name, dims in _DIMS.items()
        },
        coords={
            **axes,
            "component": np.arange(1, m + 1),
            "unit": np.arange(m),
            "unit_shared": (("p", "unit"), np.array([row[0].unit_shared for row in models])),
        },
        attrs={
            "title": "Eigenvectors of R and communalities over kappa, true weights of model (8)",
            "source": SOURCE,
            "config": to_json(settings | {"max_iter": max_iter, "tol": tol}),
            "seed": seed,
            "version": package_version(),
        },
    )


_DIMS = {
    "eigenvalue": ("component",),
    "cumulative_share": ("component",),
    "shared_share": ("component",),
    "n_factors": ("kappa",),
    "auc": ("kappa",),
    "communality": ("kappa", "unit"),
}


def _decompose(model: Model8, kappa: list[float], method: str, *, max_iter: int, tol: float) -> dict[str, Any]:
    r = correlation(model)
    values, vectors = eigen(r)
    counts = count_factors(values, kappa)
    nu, _, _ = communality(r, method, (values, vectors), counts, max_iter=max_iter, tol=tol)
    cumulative = np.cumsum(np.clip(values, 0, None))
    return {
        "eigenvalue": values,
        "cumulative_share": cumulative / cumulative[-1],
        "shared_share": (vectors[model.unit_shared] ** 2).sum(axis=0),
        "n_factors": counts,
        "auc": split.auc(np.round(nu, 12), model.unit_shared),
        "communality": nu,
    }


KAPPA = (*(k / 100 for k in range(5, 100, 5)), 0.99)
"""Default values of κ."""

DEFAULT = ("pa", "pc", "leverage", ICC)
"""Default methods: of communality, and agreement."""

DIMS = ("p", "alpha", "kappa", "method", "replicate")


@check.named_options()
def recover(
    *,
    p: float | Sequence[float] = (0.2, 0.5, 0.8),
    alpha: float | Sequence[float] = 0.4,
    kappa: float | Sequence[float] = KAPPA,
    methods: str | Sequence[str] = DEFAULT,
    clients: int = 100,
    d: int = 100,
    m: int = 200,
    replicates: int = 4,
    means: Means = "independent",
    seed: int = 0,
    max_iter: int = 50,
    tol: float = 1e-3,
    progress: bool | None = None,
) -> xr.Dataset:
    """Measure recovery of the true split from the true weights of model (8), over κ, p, α and methods.

    The factor analysis gets the true weights W_c of all clients, as in the paper's oracle decomposition (FedFac
    §4.3.1), so any error is due to κ and the method. Agreement between clients has no κ. It recovers the split by
    construction: it is 1 for a shared unit, whose true weights are equal for all clients, and else below 1.

    Parameters
    ----------
    p, alpha : float or sequence of float
        Proportions of shared units and of shared covariates. p must give both shared and personal units.
    kappa : float or sequence of float
        Proportions of the eigenvalue sum, 0 < kappa <= 1.
    methods : sequence of str
        Estimators of ν of :func:`fedstat.stats.factor.fit`, and ``"icc"``: agreement between clients, ICC2 of
        :func:`fedstat.icc`. It needs no κ and is repeated along kappa.
    clients, d, m, means
        Parameters of :func:`fedstat.sim.generate`.
    replicates : int
        Number of draws of the weights; the first equals ``generate(seed=seed)``.
    seed : int
    max_iter, tol
        Stopping rule of iterative methods, as in :func:`fedstat.stats.factor.fit`.
    progress : bool or None
        Show how many draws are done; see :func:`fedstat.fl.train`.

    Returns
    -------
    xarray.Dataset
        Dims p, alpha, kappa, method, replicate. Variables:

        - ``auc``: probability that a shared unit has a higher ν (``"icc"``: ICC2) than a personal unit.
        - ``ari``: adjusted Rand index of the split, with τ set to give the true number of shared units. It does not
          depend on which group is called shared, so a reversed split into equal halves scores 1.
        - ``heywood``: proportion of units with ν > 1; 0 for ``"icc"``.
        - ``converged``, ``n_iter`` (eigendecompositions): ``"icc"`` needs none and counts as converged.
        - ``n_factors`` (p, alpha, kappa, replicate), for the methods that estimate ν.

    Raises
    ------
    ValueError
        If an argument is out of range, p gives only shared or only personal units, or ``"icc"`` has fewer than 2
        clients or covariates.

    Notes
    -----
    κ affects the result only through the number of factors G. An iterative method runs once per distinct G.

    Examples
    --------
    >>> result = recover(p=0.5, kappa=[0.2, 0.6], clients=20, d=20, m=20, replicates=2)
    >>> tidy(result)[["kappa", "method", "auc", "n_factors"]].round(2)
       kappa    method   auc  n_factors
    0    0.2        pa  0.00        1.0
    1    0.2        pc  0.00        1.0
    2    0.2  leverage  0.50        1.0
    3    0.2       icc  1.00        1.0
    4    0.6        pa  0.79        4.0
    5    0.6        pc  0.92        4.0
    6    0.6  leverage  0.85        4.0
    7    0.6       icc  1.00        4.0
    """
    axes: dict[str, Any] = grids(p=p, alpha=alpha, kappa=kappa)
    axes["method"] = [methods] if isinstance(methods, str) else list(methods)
    for name in check.distinct("methods", axes["method"]):
        check.choice("methods", name, ESTIMATORS)
    axes["replicate"] = list(range(check.integer("replicates", replicates)))
    check.integer("max_iter", max_iter, low=2)
    check.real("tol", tol, low=0)
    models = {
        (i, j, r): Model8(clients=clients, d=d, m=m, p=p_i, alpha=alpha_j, means=means, seed=replicate_seed(seed, r))
        for i, p_i in enumerate(axes["p"])
        for j, alpha_j in enumerate(axes["alpha"])
        for r in axes["replicate"]
    }
    for model in models.values():
        require_both_kinds(model)
        if ICC in axes["method"]:
            require_agreement(model)

    out: dict[str, NDArray[Any]] = {
        name: np.empty([len(axes[dim]) for dim in DIMS], dtype) for name, dtype in VARIABLES.items()
    }
    n_factors = np.empty([len(axes[dim]) for dim in DIMS if dim != "method"], np.int64)
    # BLAS threads do not speed up a few hundred units, and on a busy machine make them twenty times slower.
    with threadpool_limits(1, user_api="blas"), track(models.items(), "draw", progress) as draws:
        for (i, j, r), model in draws:
            by_name = scores(model, axes["kappa"], axes["method"], max_iter=max_iter, tol=tol)
            n_factors[i, j, :, r] = by_name.pop("n_factors")
            for name, values in by_name.items():
                out[name][i, j, ..., r] = values

    settings = {name: axes[name] for name in ("p", "alpha", "kappa")} | {"methods": axes["method"]}
    settings |= {"clients": clients, "d": d, "m": m, "replicates": replicates, "means": means, "seed": seed}
    return xr.Dataset(
        {
            **{name: (DIMS, values) for name, values in out.items()},
            "n_factors": (("p", "alpha", "kappa", "replicate"), n_factors),
        },
        coords={name: np.array(x, object) if name == "method" else x for name, x in axes.items()},
        attrs={
            "title": "Recovery of the split of model (8) from its true weights",
            "source": SOURCE,
            "config": to_json(settings | {"max_iter": max_iter, "tol": tol}),
            "seed": seed,
            "version": package_version(),
        },
    )


def tidy(result: xr.Dataset) -> pd.DataFrame:
    """Return one row per p, alpha, kappa and method: means over replicates and their standard errors.

    Parameters
    ----------
    result : xarray.Dataset
        Result of :func:`recover`.

    Returns
    -------
    pandas.DataFrame
        Columns p, alpha, kappa, method; ``auc``, ``auc_se``, ``ari``, ``ari_se`` (NaN for one replicate);
        means of ``heywood``, ``converged`` (proportion of replicates), ``n_iter``, ``n_factors``.
    """
    n = result.sizes["replicate"]
    mean = result.mean("replicate")
    for name in ("auc", "ari"):
        values = result[name]
        mean[f"{name}_se"] = values.std("replicate", ddof=1) / np.sqrt(n) if n > 1 else xr.full_like(mean[name], np.nan)
    columns = ["auc", "auc_se", "ari", "ari_se", "heywood", "converged", "n_iter", "n_factors"]
    return mean.to_dataframe(dim_order=[dim for dim in DIMS if dim != "replicate"])[columns].reset_index()


# Largest difference of mean AUCs at which methods count as similar.
AGREE = 0.05


def report(result: xr.Dataset) -> str:
    """Return a table of AUC by κ and method for every p and α, with the κ of reversed and of similar AUCs."""
    config, rows = json.loads(result.attrs["config"]), tidy(result)
    n, agreement = result.sizes["replicate"], ICC in result["method"].values
    over = f"mean (SE) of {n} draws" if n > 1 else "one draw, no SE"
    icc = " icc: 1 by construction, needs no kappa." if agreement else ""
    title = f"AUC of communality for shared units (true weights of model (8)): {over}.{icc} AUC < 0.5: order reversed."
    sizes = f"{config['clients']} clients, {config['d']} covariates, {config['m']} units; G: mean number of factors"
    parts = [f"{textwrap.fill(title, TERMINAL)}\n{sizes}"]
    for (p, alpha), block in rows.groupby(["p", "alpha"], sort=False):
        parts.append(f"p = {p:g}, alpha = {alpha:g}\n{_format_table(block)}\n{_describe_kappa(block)}")
    if not rows["converged"].eq(1).all():
        note = f"* not converged in {config['max_iter']} eigendecompositions in at least one draw; last iterate used."
        parts.append(textwrap.fill(note, TERMINAL, subsequent_indent="  "))
    return "\n\n".join(parts)


def _format_table(block: pd.DataFrame) -> str:
    names = list(dict.fromkeys(block["method"]))
    heads = ["icc (no kappa)" if name == ICC else name for name in names]
    rows = []
    for kappa, row in block.groupby("kappa", sort=False):
        cells = [_format_cell(*x) for x in zip(row["auc"], row["auc_se"], row["converged"], strict=True)]
        rows.append([f"{kappa:.2f}", f"{row['n_factors'].iloc[0]:.1f}", *cells])
    return aligned(pd.DataFrame(rows, columns=["kappa", "G", *heads]))


def _format_cell(auc: float, se: float, converged: float) -> str:
    mark = " " if converged == 1 else "*"
    return (f"{auc:.3f} ({se:.3f})" if np.isfinite(se) else f"{auc:.3f}") + mark


def _describe_kappa(block: pd.DataFrame) -> str:
    auc = block.pivot(index="kappa", columns="method", values="auc")[list(dict.fromkeys(block["method"]))]
    reversed_ = [f"{name} at kappa {', '.join(runs(auc[name] < 0.5))}" for name in auc if (auc[name] < 0.5).any()]
    sentences = [f"Order reversed: {'; '.join(reversed_) or 'none'}."]
    nu = auc.drop(columns=ICC, errors="ignore")
    if nu.shape[1] > 1:
        close = nu.max(axis=1) - nu.min(axis=1) <= AGREE
        names = ", ".join(map(str, nu))
        ranges = [f"kappa {run} (AUC {_format_range(nu.loc[list(ks)])})" for run, ks in runs(close).items()]
        sentences.append(f"AUCs of {names} within {AGREE} of each other: {', '.join(ranges) or 'at no kappa'}.")
    return "\n".join(textwrap.fill(s, TERMINAL, subsequent_indent="  ", break_on_hyphens=False) for s in sentences)


def _format_range(auc: pd.DataFrame) -> str:
    low, high = f"{auc.min().min():.3f}", f"{auc.max().max():.3f}"
    return low if low == high else f"{low} to {high}"


def runs(holds: pd.Series) -> dict[str, list[float]]:
    """Group neighboring index values where the series is True; keys name the range of a group.

    Examples
    --------
    >>> runs(pd.Series([True, True, False, True], index=[0.1, 0.2, 0.3, 0.4]))
    {'0.1–0.2': [0.1, 0.2], '0.4': [0.4]}
    """
    groups = groupby(holds.items(), key=lambda item: bool(item[1]))
    true_runs = [[float(str(k)) for k, _ in run] for is_true, run in groups if is_true]
    return {f"{run[0]:g}" if len(run) == 1 else f"{run[0]:g}–{run[-1]:g}": run for run in true_runs}
