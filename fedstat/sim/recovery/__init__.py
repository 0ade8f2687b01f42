"""How well a communality tells shared from personal neurons, as a function of κ (FedFac §4.1, on model (8))."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from fedstat import _check
from fedstat.sim.generate import SOURCE, Means, Model8, package_version, truth
from fedstat.stats import factor, moments, split
from fedstat.store import to_json

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

KAPPA = (*(k / 100 for k in range(5, 100, 5)), 0.99)
DIMS = ("p", "alpha", "kappa", "estimator", "replicate")


def recovery(
    *,
    p: float | Sequence[float] = (0.2, 0.5, 0.8),
    alpha: float | Sequence[float] = 0.4,
    kappa: float | Sequence[float] = KAPPA,
    estimators: str | Sequence[str] = ("pa", "pc", "leverage"),
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
    """Recovery of the true split from the true weights of model (8), over κ, p, α and estimators of ν.

    The factor analysis sees what no training has blurred: the weights W_c of all clients, as in the paper's oracle
    decomposition (FedFac §4.3.1). What is lost here is lost to the choice of κ and of the estimator alone.

    Parameters
    ----------
    p, alpha : float or sequence of float
        Shared shares of neurons and of covariates. p must leave both kinds of neurons.
    kappa : float or sequence of float
        Eigenvalue-ratio thresholds, 0 < kappa <= 1.
    estimators : sequence of str
        Estimators of ν, of :func:`fedstat.stats.factor.fit`.
    clients, d, m, means
        As in :func:`fedstat.sim.generate`.
    replicates : int
        Draws of the weights; replicate r is the truth of ``generate(seed=seed + r)``.
    seed : int
    max_iter, tol
        Stop of the iterated estimators, as in :func:`fedstat.stats.factor.fit`.
    progress : bool
        Show a progress bar on stderr.

    Returns
    -------
    xarray.Dataset
        Dims p, alpha, kappa, estimator, replicate. ``auc``: chance that a shared neuron has a higher ν than a
        personal one. ``ari``: adjusted Rand index of the split whose τ gives the true number of shared neurons; it
        knows the two groups but not which is the shared one, so an inverted split of equal halves scores 1.
        ``heywood``: share of neurons with ν > 1. ``converged``, ``n_iter`` (eigendecompositions). ``n_factors``
        (p, alpha, kappa, replicate).

    Raises
    ------
    ValueError
        If an argument is out of range, or p leaves neurons of one kind only.

    Notes
    -----
    κ acts through the number of factors G alone. One eigendecomposition of R therefore gives ``pc`` and
    ``leverage`` at every κ (cumulative sums over factors), and an iterated estimator runs once for every G that
    occurs, not for every κ.

    Examples
    --------
    >>> result = recovery(p=0.5, kappa=[0.2, 0.6], clients=20, d=20, m=20, replicates=2)
    >>> tidy(result)[["kappa", "estimator", "auc", "n_factors"]].round(2)
       kappa estimator   auc  n_factors
    0    0.2        pa  0.00        1.0
    1    0.2        pc  0.00        1.0
    2    0.2  leverage  0.50        1.0
    3    0.6        pa  0.86        4.0
    4    0.6        pc  0.94        4.0
    5    0.6  leverage  0.90        4.0
    """
    grids: dict[str, Any] = {name: _numbers(name, x) for name, x in (("p", p), ("alpha", alpha), ("kappa", kappa))}
    for k in grids["kappa"]:
        _check.real("kappa", k, low=0, open_low=True, high=1)
    grids["estimator"] = [estimators] if isinstance(estimators, str) else list(estimators)
    for name in _distinct("estimators", grids["estimator"]):
        _check.choice("estimators", name, factor.METHODS)
    grids["replicate"] = list(range(_check.integer("replicates", replicates)))
    _check.integer("max_iter", max_iter, low=2)
    _check.real("tol", tol, low=0)
    models = {
        (i, j, r): Model8(clients=clients, d=d, m=m, p=p_i, alpha=alpha_j, means=means, seed=seed + r)
        for i, p_i in enumerate(grids["p"])
        for j, alpha_j in enumerate(grids["alpha"])
        for r in grids["replicate"]
    }
    for model in models.values():
        _check_both_kinds(model)

    out: dict[str, NDArray[Any]] = {
        name: np.empty([len(grids[dim]) for dim in DIMS], dtype) for name, dtype in _VARIABLES.items()
    }
    n_factors = np.empty([len(grids[dim]) for dim in DIMS if dim != "estimator"], np.int64)
    # Matrices of a few hundred units gain nothing from BLAS threads, and on a busy machine lose twentyfold by them.
    with threadpool_limits(1, user_api="blas"):
        for (i, j, r), model in tqdm(models.items(), disable=not progress, unit="draw"):
            draw = _one_draw(model, grids["kappa"], grids["estimator"], max_iter=max_iter, tol=tol)
            n_factors[i, j, :, r] = draw.pop("n_factors")
            for name, scores in draw.items():
                out[name][i, j, ..., r] = scores

    settings = {name: value for name, value in grids.items() if name != "replicate"}
    settings |= {"clients": clients, "d": d, "m": m, "replicates": replicates, "means": means, "seed": seed}
    return xr.Dataset(
        {
            **{name: (DIMS, values) for name, values in out.items()},
            "n_factors": (("p", "alpha", "kappa", "replicate"), n_factors),
        },
        coords={name: np.array(x, object) if name == "estimator" else x for name, x in grids.items()},
        attrs={
            "title": "Recovery of the split of model (8) from its true weights",
            "source": SOURCE,
            "config": to_json(settings | {"max_iter": max_iter, "tol": tol}),
            "seed": seed,
            "version": package_version(),
        },
    )


def correlation(model: Model8) -> Floats:
    """Correlations (unit, unit) of the true weights, summed client by client without stacking them."""
    clients = truth(model)
    total = moments.moments(next(clients).w.T)
    for client in clients:
        total = total + moments.moments(client.w.T)
    r: Floats = moments.correlation(total)
    return r


def tidy(result: xr.Dataset) -> pd.DataFrame:
    """One row per p, alpha, kappa and estimator: means over replicates and their standard errors.

    Parameters
    ----------
    result : xarray.Dataset
        What :func:`recovery` returns.

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


_VARIABLES: dict[str, type] = {"auc": float, "ari": float, "heywood": float, "converged": bool, "n_iter": int}


def _one_draw(
    model: Model8, kappa: list[float], estimators: list[str], *, max_iter: int, tol: float
) -> dict[str, NDArray[Any]]:
    """Scores (kappa, estimator) of one draw of the weights, and n_factors (kappa,)."""
    r = correlation(model)
    values, vectors = (x[..., ::-1] for x in np.linalg.eigh(r))
    counts = np.array([factor.count_factors(values, kappa=k) for k in kappa])
    by_estimator = []
    for name in estimators:
        nu, converged, n_iter = _communality(r, name, (values, vectors), counts, max_iter=max_iter, tol=tol)
        by_estimator.append({**_scores(nu, model.unit_shared), "converged": converged, "n_iter": n_iter})
    scores = {name: np.stack([each[name] for each in by_estimator], axis=-1) for name in _VARIABLES}
    return {**scores, "n_factors": counts}


def _communality(
    r: Floats, estimator: str, eigen: tuple[Floats, Floats], counts: Integers, *, max_iter: int, tol: float
) -> tuple[Floats, NDArray[np.bool_], Integers]:
    """ν (count, unit), converged and n_iter (count,) of one estimator for every number of factors."""
    values, vectors = eigen
    if estimator in ("pc", "leverage"):
        weight, last = (np.clip(values, 0, None), 0) if estimator == "pc" else (np.ones_like(values), 1)
        of_count = np.cumsum(vectors**2 * weight, axis=-1).T
        nu = np.concatenate([np.zeros((1, len(r))), of_count])[counts - last]
        return nu, np.ones(len(counts), bool), np.ones(len(counts), np.int64)
    distinct, back = np.unique(counts, return_inverse=True)
    fits = [factor.fit(r, n_factors=int(g), method=estimator, max_iter=max_iter, tol=tol) for g in distinct]  # type: ignore[arg-type]
    nu, converged, n_iter = (np.array([getattr(fit, name) for fit in fits])[back] for name in _FIELDS)
    return nu, converged, n_iter


_FIELDS = ("communality", "converged", "n_iter")


def _scores(nu: Floats, truth: NDArray[np.bool_]) -> dict[str, Any]:
    """Scores (count,) of ν (count, unit) against the truth (unit,)."""
    nu = np.round(nu, 12)  # what differs by rounding alone is a tie: with all factors ν = 1 for every neuron
    found = split.shared(nu, tau=float(1 - truth.mean()))
    return {
        "auc": split.auc(nu, truth),
        "ari": [adjusted_rand_score(truth, labels) for labels in found],
        "heywood": (nu > 1 + 1e-12).mean(axis=-1),
    }


def _numbers(name: str, values: float | Sequence[float]) -> list[float]:
    numbers = [values] if np.ndim(values) == 0 else list(values)  # type: ignore[arg-type]
    return _distinct(name, [_check.real(name, x) for x in numbers])


def _distinct(name: str, values: list[Any]) -> list[Any]:
    if not values or len(set(values)) < len(values):
        raise ValueError(f"{name} must hold at least one value and none twice, but got {values!r}")
    return values


def _check_both_kinds(model: Model8) -> None:
    n_shared = int(model.unit_shared.sum())
    if n_shared in (0, model.m):
        raise ValueError(
            f"p must leave shared and personal neurons, but got p = {model.p:g} with m = {model.m}: "
            f"{n_shared} shared. Recovery has a meaning only when there are two groups to tell apart."
        )
