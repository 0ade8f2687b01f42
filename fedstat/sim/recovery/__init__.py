"""How well shared and personal neurons are told apart, as a function of κ (FedFac §4.1, on model (8))."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from fedstat import _check
from fedstat._later import pd, xr
from fedstat.sim.model8 import SOURCE, Means, Model8, package_version, replicate_seed
from fedstat.sim.recovery import draw
from fedstat.sim.recovery.draw import correlation
from fedstat.sim.recovery.spectra import spectrum
from fedstat.store import to_json

__all__ = ["DEFAULT", "KAPPA", "correlation", "recover", "spectrum", "tidy"]

KAPPA = (*(k / 100 for k in range(5, 100, 5)), 0.99)
"""Values of κ that are looked at unless others are given."""

DEFAULT = ("pa", "pc", "leverage", draw.ICC)
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
    grids: dict[str, Any] = draw.grids(p=p, alpha=alpha, kappa=kappa)
    grids["estimator"] = [estimators] if isinstance(estimators, str) else list(estimators)
    for name in _check.distinct("estimators", grids["estimator"]):
        _check.choice("estimators", name, draw.ESTIMATORS)
    grids["replicate"] = list(range(_check.integer("replicates", replicates)))
    _check.integer("max_iter", max_iter, low=2)
    _check.real("tol", tol, low=0)
    models = {
        (i, j, r): Model8(clients=clients, d=d, m=m, p=p_i, alpha=alpha_j, means=means, seed=replicate_seed(seed, r))
        for i, p_i in enumerate(grids["p"])
        for j, alpha_j in enumerate(grids["alpha"])
        for r in grids["replicate"]
    }
    for model in models.values():
        draw.require_both_kinds(model)
        if draw.ICC in grids["estimator"]:
            draw.require_agreement(model)

    out: dict[str, NDArray[Any]] = {
        name: np.empty([len(grids[dim]) for dim in DIMS], dtype) for name, dtype in draw.VARIABLES.items()
    }
    n_factors = np.empty([len(grids[dim]) for dim in DIMS if dim != "estimator"], np.int64)
    # Matrices of a few hundred units gain nothing from BLAS threads, and on a busy machine lose twentyfold by them.
    with threadpool_limits(1, user_api="blas"):
        for (i, j, r), model in tqdm(models.items(), disable=not progress, unit="draw"):
            found = draw.scores(model, grids["kappa"], grids["estimator"], max_iter=max_iter, tol=tol)
            n_factors[i, j, :, r] = found.pop("n_factors")
            for name, values in found.items():
                out[name][i, j, ..., r] = values

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
