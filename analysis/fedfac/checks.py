"""Is a split of real networks better than chance, certain, and the same for every estimator?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from fedstat.fl import nets
from fedstat.labelled import bootstrap, fa, permutation_test
from fedstat.labelled.layer import read_layer
from fedstat.labelled.sums import sums
from fedstat.results import ConvergenceWarning
from fedstat.stats import factor
from fedstat.stats.moments import correlation
from fedstat.stats.split import adjusted_rand
from fedstat.study import collect, run_table
from fedstat.study.collect import Grid
from fedstat.study.compare import against_zero

KAPPAS, TAUS = (0.5, 0.75, 0.85, 0.9, 0.95), (0.25, 0.5, 0.75)
KAPPA, TAU = 0.85, 0.5


def hidden_weights(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Final weights of the hidden layers in which clients differ: layer to (client, unit, weight)."""
    shapes = json.loads(run.attrs["config"]).get("shapes", {})
    last = nets.layer_of(list(shapes)[-1]) if shapes else None
    found: dict[str, xr.DataArray] = {}
    for layer, node in (run["weights"].children if "weights" in run.children else {}).items():
        if layer != last and "w" in node and node.sizes["client"] > 1:
            w = xr.DataArray(node["w"]).isel(checkpoint=-1).load()
            if bool((w != w.isel(client=0)).any()):
                found[str(layer)] = w
    return found


def variants(weights: xr.DataArray, *, kappas: Sequence[float] = KAPPAS, taus: Sequence[float] = TAUS) -> pd.DataFrame:
    """Splits of one layer by every estimator at several κ and τ, against the paper's estimator.

    Parameters
    ----------
    weights : DataArray (client, unit, weight)
    kappas, taus : sequence of float

    Returns
    -------
    DataFrame
        ``estimator``, ``kappa``, ``tau``; ``ari``, adjusted Rand index with principal axis at the same κ and τ;
        ``ari_kappa``, with principal axis at κ = 0.85 and the same τ; ``units``, number with a communality;
        ``n_factors``; ``converged``; ``heywood``, the number of communalities above 1. Non-convergence, and as many
        factors as units (every communality is then 1 and uninformative), show in the columns, without warnings.
    """
    r = correlation(sums(read_layer(weights)).moments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fits = {
            (e, k): fa(r, corr=True, kappa=k, method=e)
            for e, k in product(factor.METHODS, dict.fromkeys((*kappas, KAPPA)))
        }
        rows = []
        for e, k, t in product(factor.METHODS, kappas, taus):
            fit, shared = fits[e, k], fits[e, k].split(tau=t).shared
            rows.append(
                {
                    "estimator": e,
                    "kappa": k,
                    "tau": t,
                    "ari": float(adjusted_rand(shared, fits["pa", k].split(tau=t).shared)),
                    "ari_kappa": float(adjusted_rand(shared, fits["pa", KAPPA].split(tau=t).shared)),
                    "units": int(np.isfinite(fit.communality).sum()),
                    "n_factors": fit.n_factors,
                    "converged": fit.converged,
                    "heywood": int(fit.heywood.sum()),
                }
            )
    return pd.DataFrame(rows)


def certainty(
    weights: xr.DataArray,
    *,
    kappa: float = KAPPA,
    tau: float = TAU,
    estimator: factor.Method = "pa",
    replicates: int = 50,
    seed: int = 0,
) -> dict[str, float]:
    """How sure is the split of one layer when clients are resampled?

    Parameters
    ----------
    weights : DataArray (client, unit, weight)
    kappa, tau, estimator
        Settings of the split.
    replicates : int
        Bootstrap samples of clients, and shuffles of units.
    seed : int

    Returns
    -------
    dict
        ``sure``: proportion of units that are shared in at least 95 % or at most 5 % of the samples; ``ari``: mean
        adjusted Rand index of a sample's split and that of all clients, 0 for chance; ``p_identity``: p value of the
        test that units have an identity across clients, by shuffling them within clients; NaN for minres, which takes
        over a second per shuffle.
    """
    how: dict[str, Any] = {"kappa": kappa, "method": estimator, "seed": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        drawn = bootstrap(weights, tau=tau, n_boot=replicates, **how)
        identity = np.nan
        if estimator != "minres":
            identity = float(permutation_test(weights, n_permutations=replicates, **how).p_value)
    p = np.asarray(drawn.prop_shared)
    return {
        "sure": float(((p >= 0.95) | (p <= 0.05)).mean()),
        "ari": float(np.mean([adjusted_rand(s, drawn.split.shared) for s in drawn.shared])),
        "p_identity": identity,
    }


def against_random(grid: Grid, *, value: str | None = None) -> pd.DataFrame:
    """FedFac minus a random split of the same size, within settings and seeds, by Λ, κ, τ and estimator.

    Likewise a random split that is redrawn in every round: what is lost when a split does not stay.

    Returns
    -------
    DataFrame
        ``scenario``, ``method``, ``layers``, ``kappa``, ``tau``, ``estimator``, and the columns of
        :func:`fedstat.compare`; Holm's adjustment runs over all rows.
    """
    table, value = collect.in_order(grid), run_table.choose(grid.table, value)
    chance = table[table["method"] == "random"].set_index(["scenario", "layers", "tau", "seed"])[value]
    others = table[by_analysis(table) | (table["method"] == "random-redrawn")]
    there = others.set_index(chance.index.names).index.isin(chance.index)
    if not there.any():
        return pd.DataFrame()
    settings = ["scenario", "method", *collect.SETTINGS]
    data = others[there].assign(of=lambda t: t.groupby(settings, dropna=False, sort=False).ngroup().map(str))
    data["less"] = data[value] - chance.loc[pd.MultiIndex.from_frame(data[chance.index.names])].to_numpy()
    return data[["of", *settings]].drop_duplicates("of").merge(against_zero(data, "of", "less")).drop(columns="of")


def by_analysis(table: pd.DataFrame) -> pd.Series[bool]:
    """Runs whose split is by factor analysis."""
    return table["method"].str.startswith("fedfac")
