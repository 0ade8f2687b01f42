"""Recovery of the true split over κ, by estimator: draws of model (8), spectra of their correlations, and accuracy."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from itertools import groupby, islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from fedstat._utils import check
from fedstat._utils.lazy import pd, xr
from fedstat.results.tables import plus_minus
from fedstat.sim.model8 import SOURCE, Means, Model8, package_version, replicate_seed, truth
from fedstat.stats import factor, icc, moments, split
from fedstat.store import to_json

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ICC: Literal["icc"] = "icc"
ESTIMATORS: tuple[str, ...] = (*factor.METHODS, ICC)
VARIABLES: dict[str, type] = {"auc": float, "ari": float, "heywood": float, "converged": bool, "n_iter": int}

# Clients whose weights are in memory at once: enough that summing them for the agreement costs little.
_AT_ONCE = 20
_FIELDS = ("communality", "converged", "n_iter")


def correlation(model: Model8) -> Floats:
    """Correlations (unit, unit) of the true weights, summed client by client (FedFac §4.1)."""
    return sums(model, agreement=False)[0]


def sums(model: Model8, *, agreement: bool) -> tuple[Floats, Floats]:
    """R (unit, unit) and, if asked for, ICC2 (1, unit), from one pass over the clients."""
    clients = truth(model)
    total, between = None, None
    while block := [client.w for client in islice(clients, _AT_ONCE)]:
        for w in block:
            of_client = moments.moments(w.T)
            total = of_client if total is None else total + of_client
        if agreement:
            of_block = icc.sums(np.stack(block))
            between = of_block if between is None else between + of_block
    r: Floats = moments.correlation(total)  # type: ignore[arg-type]
    if between is None:
        return r, np.empty((0, model.m))
    return r, icc.coefficients(icc.mean_squares(between)).icc[None, :, icc.TYPES.index("ICC2")]


def scores(
    model: Model8, kappa: list[float], estimators: list[str], *, max_iter: int, tol: float
) -> dict[str, NDArray[Any]]:
    """Scores (kappa, estimator) of one draw of the weights, by :data:`VARIABLES`, and n_factors (kappa,)."""
    r, agreement = sums(model, agreement=ICC in estimators)
    pairs = eigen(r)
    counts = count_factors(pairs[0], kappa)
    by_estimator = []
    for name in estimators:
        if name == ICC:
            scored = {**score(agreement, model.unit_shared), "converged": [True], "n_iter": [0]}
            by_estimator.append({key: np.repeat(x, len(kappa)) for key, x in scored.items()})
            continue
        nu, converged, n_iter = communality(r, name, pairs, counts, max_iter=max_iter, tol=tol)
        by_estimator.append({**score(nu, model.unit_shared), "converged": converged, "n_iter": n_iter})
    out = {name: np.stack([each[name] for each in by_estimator], axis=-1) for name in VARIABLES}
    return {**out, "n_factors": counts}


def eigen(r: Floats) -> tuple[Floats, Floats]:
    """Eigenvalues (component,), descending, and eigenvectors (unit, component) of R."""
    values, vectors = np.linalg.eigh(r)
    return values[::-1], vectors[:, ::-1]


def count_factors(eigenvalues: Floats, kappa: list[float]) -> Integers:
    """Number of factors G (kappa,)."""
    return np.array([factor.count_factors(eigenvalues, kappa=k) for k in kappa])


def communality(
    r: Floats, estimator: str, pairs: tuple[Floats, Floats], counts: Integers, *, max_iter: int, tol: float
) -> tuple[Floats, NDArray[np.bool_], Integers]:
    """ν (count, unit), converged and n_iter (count,) of one estimator for every number of factors."""
    values, vectors = pairs
    if estimator in ("pc", "leverage"):
        weight, last = (np.clip(values, 0, None), 0) if estimator == "pc" else (np.ones_like(values), 1)
        of_count = np.cumsum(vectors**2 * weight, axis=-1).T
        nu = np.concatenate([np.zeros((1, len(r))), of_count])[counts - last]
        return nu, np.ones(len(counts), bool), np.ones(len(counts), np.int64)
    distinct_counts, back = np.unique(counts, return_inverse=True)
    fits = [factor.fit(r, n_factors=int(g), method=estimator, max_iter=max_iter, tol=tol) for g in distinct_counts]  # type: ignore[arg-type]
    nu, converged, n_iter = (np.array([getattr(fit, name) for fit in fits])[back] for name in _FIELDS)
    return nu, converged, n_iter


def score(values: Floats, shared: NDArray[np.bool_]) -> dict[str, Any]:
    """Scores (count,) of communalities or agreement (count, unit) against the truth (unit,)."""
    values = np.round(values, 12)  # what differs by rounding alone is a tie: with all factors ν = 1 for every neuron
    found = split.shared(values, tau=float(1 - shared.mean()))
    return {
        "auc": split.auc(values, shared),
        "ari": split.adjusted_rand(found, shared),
        "heywood": (values > 1 + 1e-12).mean(axis=-1),
    }


def grids(**values: float | Sequence[float]) -> dict[str, list[float]]:
    """Values of p, alpha and kappa as lists, checked."""
    out = {}
    for name, x in values.items():
        numbers = [x] if np.ndim(x) == 0 else list(x)  # type: ignore[arg-type]
        out[name] = check.distinct(name, [check.real(name, number) for number in numbers])
    for k in out.get("kappa", []):
        check.real("kappa", k, low=0, open_low=True, high=1)
    return out


def require_both_kinds(model: Model8) -> None:
    """ValueError if all neurons are of one kind."""
    n_shared = int(model.unit_shared.sum())
    if n_shared in (0, model.m):
        raise ValueError(
            f"p must leave shared and personal neurons, but got p = {model.p:g} with m = {model.m}: "
            f"{n_shared} shared. Recovery has a meaning only when there are two groups to tell apart."
        )


def require_agreement(model: Model8) -> None:
    """ValueError if there is nobody to agree, or nothing to agree on."""
    if model.clients < 2 or model.d < 2:
        raise ValueError(
            f"agreement between clients (icc) needs at least 2 clients and 2 covariates, but got clients = "
            f"{model.clients} and d = {model.d}. Leave icc out of the estimators."
        )


GRID = (*(k / 100 for k in range(3, 100, 3)), 0.85, 0.95, 0.97, 0.98, 0.995, 1.0)


def spectrum(
    *,
    p: float | Sequence[float] = 0.5,
    alpha: float | Sequence[float] = 0.4,
    kappa: float | Sequence[float] = GRID,
    estimator: str = "pa",
    clients: int = 100,
    d: int = 100,
    m: int = 200,
    means: Means = "independent",
    seed: int = 0,
    max_iter: int = 50,
    tol: float = 1e-3,
) -> xr.Dataset:
    r"""Eigenvectors of R on model (8), the neurons they belong to, and the communalities that κ makes of them.

    κ takes eigenvectors in descending order of eigenvalue until their eigenvalues hold a share κ of the sum. An
    eigenvector is weighed by where its squared loadings lie,

    .. math:: s_j = \sum_{i \text{ shared}} \ell_{ij}^2 \Big/ \sum_i \ell_{ij}^2
              = \sum_{i \text{ shared}} u_{ij}^2, \qquad \ell_j = \sqrt{\gamma_j}\, u_j,

    1 if it belongs to the truly shared neurons, 0 if to the personal ones.

    Parameters
    ----------
    p, alpha : float or sequence of float
        Shared shares of neurons and of covariates. p must leave both kinds of neurons.
    kappa : float or sequence of float
        Eigenvalue-ratio thresholds for the communalities, 0 < kappa <= 1; they are sorted.
    estimator : {"pa", "minres", "pc", "leverage"}
        Estimator of ν.
    clients, d, m, means, seed
        As in :func:`fedstat.sim.generate`.
    max_iter, tol
        Stop of the iterated estimators, as in :func:`fedstat.stats.factor.fit`.

    Returns
    -------
    xarray.Dataset
        By (p, alpha, component), components in descending order of eigenvalue: ``eigenvalue`` of R;
        ``cumulative_share`` of the eigenvalues' sum, up to and with the component; ``shared_share`` s of its squared
        loadings. By (p, alpha, kappa): ``n_factors``; ``auc`` of ν for the true label; ``communality`` ν, by unit as
        well. Coordinate ``unit_shared`` (p, unit).

    Raises
    ------
    ValueError
        If an argument is out of range, or p leaves neurons of one kind only.

    Notes
    -----
    Eigenvalues of 0 have no eigenvectors of their own: where R is singular, ``shared_share`` of its last components
    is that of one basis out of many. They carry nothing.

    References
    ----------
    FedFac, §4.1 (the number of factors) and §4.3.1 (model (8)).

    Examples
    --------
    The first eigenvector is the personal neurons', the next ones belong to the shared neurons:

    >>> result = spectrum(p=0.5, kappa=[0.3, 0.75], clients=30, d=30, m=40).squeeze()
    >>> result.shared_share[:6].values.round(2)
    array([0., 1., 1., 1., 1., 1.])
    >>> result.auc.values.round(2), result.n_factors.values
    (array([0.05, 1.  ]), array([ 2, 12]))
    """
    axes = grids(p=p, alpha=alpha, kappa=kappa)
    axes["kappa"].sort()
    check.choice("estimator", estimator, factor.METHODS)
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
        found = [[_one(x, axes["kappa"], estimator, max_iter=max_iter, tol=tol) for x in row] for row in models]
    settings = {**axes, "estimator": estimator, "clients": clients, "d": d, "m": m, "means": means, "seed": seed}
    return xr.Dataset(
        {
            name: (("p", "alpha", *dims), np.array([[one[name] for one in row] for row in found]))
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


def _one(model: Model8, kappa: list[float], estimator: str, *, max_iter: int, tol: float) -> dict[str, Any]:
    r = correlation(model)
    values, vectors = eigen(r)
    counts = count_factors(values, kappa)
    nu, _, _ = communality(r, estimator, (values, vectors), counts, max_iter=max_iter, tol=tol)
    taken = np.cumsum(np.clip(values, 0, None))
    return {
        "eigenvalue": values,
        "cumulative_share": taken / taken[-1],
        "shared_share": (vectors[model.unit_shared] ** 2).sum(axis=0),
        "n_factors": counts,
        "auc": split.auc(np.round(nu, 12), model.unit_shared),
        "communality": nu,
    }


KAPPA = (*(k / 100 for k in range(5, 100, 5)), 0.99)
"""Values of κ that are looked at unless others are given."""

DEFAULT = ("pa", "pc", "leverage", ICC)
"""Estimators of communality, and agreement, that are compared unless others are given."""

DIMS = ("p", "alpha", "kappa", "estimator", "replicate")


def recover(
    *,
    p: float | Sequence[float] = (0.2, 0.5, 0.8),
    alpha: float | Sequence[float] = 0.4,
    kappa: float | Sequence[float] = KAPPA,
    estimators: str | Sequence[str] = DEFAULT,
    clients: int = 100,
    d: int = 100,
    m: int = 200,
    replicates: int = 4,
    means: Means = "independent",
    seed: int = 0,
    max_iter: int = 50,
    tol: float = 1e-3,
    progress: bool = False,
) -> xr.Dataset:
    """Recovery of the true split from the true weights of model (8), over κ, p, α and estimators.

    The factor analysis sees what no training has blurred: the weights W_c of all clients, as in the paper's oracle
    decomposition (FedFac §4.3.1). What is lost here is lost to the choice of κ and of the estimator alone. Agreement
    between clients, which has no κ, is shown for comparison. It must find the split here: the true weights of a shared
    neuron are the same for every client, so that its agreement is 1, and that of a personal one is not.

    Parameters
    ----------
    p, alpha : float or sequence of float
        Shared shares of neurons and of covariates. p must leave both kinds of neurons.
    kappa : float or sequence of float
        Eigenvalue-ratio thresholds, 0 < kappa <= 1.
    estimators : sequence of str
        Estimators of ν, of :func:`fedstat.stats.factor.fit`, and ``"icc"``: agreement between clients, ICC2 of
        :func:`fedstat.icc`, which needs no κ. It is repeated along kappa.
    clients, d, m, means
        As in :func:`fedstat.sim.generate`.
    replicates : int
        Draws of the weights: the first of ``generate(seed=seed)``, each other one of a seed of its own
        (:func:`fedstat.sim.model8.replicate_seed`).
    seed : int
    max_iter, tol
        Stop of the iterated estimators, as in :func:`fedstat.stats.factor.fit`.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.Dataset
        Dims p, alpha, kappa, estimator, replicate. ``auc``: chance that a shared neuron has a higher ν (``"icc"``: a
        higher ICC2) than a personal one. ``ari``: adjusted Rand index of the split whose τ gives the true number of
        shared neurons; it knows the two groups but not which is the shared one, so an inverted split of equal halves
        scores 1. ``heywood``: share of neurons with ν > 1. ``converged``, ``n_iter`` (eigendecompositions): ``"icc"``
        needs none, has always converged, and its heywood is 0. ``n_factors`` (p, alpha, kappa, replicate), which
        concerns the estimators of ν.

    Raises
    ------
    ValueError
        If an argument is out of range, p leaves neurons of one kind only, or ``"icc"`` is requested with fewer than 2
        clients or covariates.

    Notes
    -----
    κ acts through the number of factors G alone. One eigendecomposition of R therefore gives ``pc`` and
    ``leverage`` at every κ (cumulative sums over factors), and an iterated estimator runs once for every G that
    occurs, not for every κ.

    Examples
    --------
    >>> result = recover(p=0.5, kappa=[0.2, 0.6], clients=20, d=20, m=20, replicates=2)
    >>> tidy(result)[["kappa", "estimator", "auc", "n_factors"]].round(2)
       kappa estimator   auc  n_factors
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
    axes["estimator"] = [estimators] if isinstance(estimators, str) else list(estimators)
    for name in check.distinct("estimators", axes["estimator"]):
        check.choice("estimators", name, ESTIMATORS)
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
        if ICC in axes["estimator"]:
            require_agreement(model)

    out: dict[str, NDArray[Any]] = {
        name: np.empty([len(axes[dim]) for dim in DIMS], dtype) for name, dtype in VARIABLES.items()
    }
    n_factors = np.empty([len(axes[dim]) for dim in DIMS if dim != "estimator"], np.int64)
    # Matrices of a few hundred units gain nothing from BLAS threads, and on a busy machine lose twentyfold by them.
    with threadpool_limits(1, user_api="blas"):
        for (i, j, r), model in tqdm(models.items(), disable=not progress, unit="draw"):
            found = scores(model, axes["kappa"], axes["estimator"], max_iter=max_iter, tol=tol)
            n_factors[i, j, :, r] = found.pop("n_factors")
            for name, values in found.items():
                out[name][i, j, ..., r] = values

    settings = {name: value for name, value in axes.items() if name != "replicate"}
    settings |= {"clients": clients, "d": d, "m": m, "replicates": replicates, "means": means, "seed": seed}
    return xr.Dataset(
        {
            **{name: (DIMS, values) for name, values in out.items()},
            "n_factors": (("p", "alpha", "kappa", "replicate"), n_factors),
        },
        coords={name: np.array(x, object) if name == "estimator" else x for name, x in axes.items()},
        attrs={
            "title": "Recovery of the split of model (8) from its true weights",
            "source": SOURCE,
            "config": to_json(settings | {"max_iter": max_iter, "tol": tol}),
            "seed": seed,
            "version": package_version(),
        },
    )


def tidy(result: xr.Dataset) -> pd.DataFrame:
    """One row per p, alpha, kappa and estimator: means over replicates and their standard errors.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`recover` returns.

    Returns
    -------
    pandas.DataFrame
        Columns p, alpha, kappa, estimator; ``auc``, ``auc_se``, ``ari``, ``ari_se`` (NaN for one replicate);
        means of ``heywood``, ``converged`` (share of replicates), ``n_iter``, ``n_factors``.
    """
    n = result.sizes["replicate"]
    mean = result.mean("replicate")
    for name in ("auc", "ari"):
        values = result[name]
        mean[f"{name}_se"] = values.std("replicate", ddof=1) / np.sqrt(n) if n > 1 else xr.full_like(mean[name], np.nan)
    columns = ["auc", "auc_se", "ari", "ari_se", "heywood", "converged", "n_iter", "n_factors"]
    return mean.to_dataframe(dim_order=[dim for dim in DIMS if dim != "replicate"])[columns].reset_index()


# Estimators whose mean AUCs are no further apart than this are said to agree.
AGREE = 0.05


def report(result: xr.Dataset) -> str:
    """Tables of AUC by κ and estimator, one for every p and α, and sentences on where they invert and agree."""
    config, rows = json.loads(result.attrs["config"]), tidy(result)
    n, agreement = result.sizes["replicate"], ICC in result["estimator"].values
    over = f"mean ± standard error over {n} draws" if n > 1 else "one draw, so no standard error"
    icc = (
        "icc: of the clients' agreement on a neuron's weights (ICC2), which has no kappa; it must be 1 here,\n"
        "for the true weights of a shared neuron are the same for every client\n"
    )
    head = (
        f"AUC of the communality for 'is shared', true weights of model (8)\n{icc if agreement else ''}"
        f"C = {config['clients']} clients, d = {config['d']}, m = {config['m']}; {over}; G: mean number of factors"
    )
    parts = [head]
    for (p, alpha), block in rows.groupby(["p", "alpha"], sort=False):
        parts.append(f"p = {p:g}, alpha = {alpha:g}\n{_table(block)}\n{_findings(block)}")
    if not rows["converged"].eq(1).all():
        parts.append(
            f"* had not converged after {config['max_iter']} eigendecompositions in some draw; the last iterate counts."
        )
    return "\n\n".join(parts)


def _table(block: pd.DataFrame) -> str:
    names = list(dict.fromkeys(block["estimator"]))
    heads = ["icc (no kappa)" if name == ICC else name for name in names]
    lines = ["kappa      G" + "".join(f"{name:>16}" for name in heads)]
    for kappa, row in block.groupby("kappa", sort=False):
        cells = [_cell(*x) for x in zip(row["auc"], row["auc_se"], row["converged"], strict=True)]
        lines.append(f"{kappa:5.2f}  {row['n_factors'].iloc[0]:5.1f}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def _cell(auc: float, se: float, converged: float) -> str:
    mark = " " if converged == 1 else "*"
    return plus_minus(auc, se, 3) + mark


def _findings(block: pd.DataFrame) -> str:
    auc = block.pivot(index="kappa", columns="estimator", values="auc")[list(dict.fromkeys(block["estimator"]))]
    inverted = [f"{name} at kappa {', '.join(runs(auc[name] < 0.5))}" for name in auc if (auc[name] < 0.5).any()]
    sentences = ["Inverted (AUC < 0.5): " + ("; ".join(inverted) if inverted else "none") + "."]
    nu = auc.drop(columns=ICC, errors="ignore")
    if nu.shape[1] > 1:
        close = nu.max(axis=1) - nu.min(axis=1) <= AGREE
        of = ", ".join(map(str, nu))
        where = [f"kappa {run} (AUC {_span(nu.loc[list(ks)])})" for run, ks in runs(close).items()]
        sentences.append(f"AUCs of {of} within {AGREE} of each other: {', '.join(where) if where else 'at no kappa'}.")
    return "\n".join(textwrap.fill(s, 98, subsequent_indent="  ", break_on_hyphens=False) for s in sentences)


def _span(auc: pd.DataFrame) -> str:
    low, high = f"{auc.min().min():.3f}", f"{auc.max().max():.3f}"
    return low if low == high else f"{low} to {high}"


def runs(holds: pd.Series) -> dict[str, list[float]]:
    """Neighbouring index values where the series holds, by the name of the range they span.

    Examples
    --------
    >>> runs(pd.Series([True, True, False, True], index=[0.1, 0.2, 0.3, 0.4]))
    {'0.1–0.2': [0.1, 0.2], '0.4': [0.4]}
    """
    found = [
        [float(str(k)) for k, _ in run] for yes, run in groupby(holds.items(), key=lambda item: bool(item[1])) if yes
    ]
    return {f"{run[0]:g}" if len(run) == 1 else f"{run[0]:g}–{run[-1]:g}": run for run in found}
