"""What the decomposition means on real data: is a split stable, certain, agreed on, and better than chance?"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from threadpoolctl import threadpool_limits

from fedstat.fl import nets
from fedstat.labelled import bootstrap, fa, permutation_test
from fedstat.labelled.coerce import client_sums, correlation_of
from fedstat.results import ConvergenceWarning
from fedstat.stats import factor
from fedstat.stats.split import adjusted_rand
from fedstat.store import open_run
from fedstat.study import rules, show, summary
from fedstat.study.rules import WINDOW
from fedstat.study.show import METHODS, Table, caption, number, plus_minus
from fedstat.study.summary import Grid
from fedstat.study.tables import against_zero, claim

KAPPAS, TAUS = (0.5, 0.75, 0.85, 0.9, 0.95), (0.25, 0.5, 0.75)
KAPPA, TAU = 0.85, 0.5
ANALYSED = ("local", "fedfac-static", "fedfac-dynamic")
"""Methods whose runs are analysed: those under which clients' weights of a hidden layer differ."""


def hidden_weights(run: xr.DataTree) -> dict[str, xr.DataArray]:
    """Last weights of the hidden layers in which clients differ: layer to (client, unit, weight)."""
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
        ``ari_kappa``, with principal axis at κ = 0.85 and the same τ; ``units``, those with a communality;
        ``n_factors``; ``converged``; ``heywood``, the number of communalities above 1. Non-convergence, and as many
        factors as units (every communality is 1 then, and tells nothing), are columns and no warnings.
    """
    m, *_ = client_sums(weights)
    r = correlation_of(m)
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
    """How sure is the split of one layer, clients being resampled?

    Parameters
    ----------
    weights : DataArray (client, unit, weight)
    kappa, tau, estimator
        Of the split.
    replicates : int
        Bootstrap samples of clients, and shuffles of units.
    seed : int

    Returns
    -------
    dict
        ``sure``: share of units that are shared in at least 95 % or at most 5 % of the samples; ``ari``: mean adjusted
        Rand index of a sample's split with the split of all clients, 0 for chance; ``p_identity``: of the test that
        units have an identity across clients, by shuffling them within clients; NaN for minres, which takes a second
        and more for every shuffle.
    """
    how: dict[str, Any] = {"kappa": kappa, "method": estimator, "replicates": replicates, "seed": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        drawn = bootstrap(weights, tau=tau, **how)
        identity = np.nan if estimator == "minres" else float(permutation_test(weights, **how).p_value)
    p = np.asarray(drawn.p_shared)
    return {
        "sure": float(((p >= 0.95) | (p <= 0.05)).mean()),
        "ari": float(np.mean([adjusted_rand(s, drawn.split.shared) for s in drawn.shared])),
        "p_identity": identity,
    }


def against_random(grid: Grid, *, value: str | None = None) -> pd.DataFrame:
    """FedFac less a random split of as many units, within settings and seeds, by Λ, κ, τ and estimator.

    So too a random split that is drawn anew in every round: what a split loses that does not stay.

    Returns
    -------
    DataFrame
        ``label``, ``method``, ``layers``, ``kappa``, ``tau``, ``estimator``, and the columns of
        :func:`fedstat.stats.compare.paired`; Holm's adjustment runs over all rows.
    """
    table, value = show.in_order(grid), rules.choose(grid.table, value)
    chance = table[table["method"] == "random"].set_index(["label", "layers", "tau", "seed"])[value]
    others = table[_by_analysis(table) | (table["method"] == "random-redrawn")]
    there = others.set_index(chance.index.names).index.isin(chance.index)
    if not there.any():
        return pd.DataFrame()
    settings = ["label", "method", *show.SETTINGS]
    data = others[there].assign(of=lambda t: t.groupby(settings, dropna=False, sort=False).ngroup().map(str))
    data["less"] = data[value] - chance.loc[pd.MultiIndex.from_frame(data[chance.index.names])].to_numpy()
    return data[["of", *settings]].drop_duplicates("of").merge(against_zero(data, "of", "less")).drop(columns="of")


def _by_analysis(table: pd.DataFrame) -> pd.Series[bool]:
    return table["method"].str.startswith("fedfac")


@threadpool_limits.wrap(limits=1, user_api="blas")  # at 128 units two threads take longer than one
def study(
    grid: Grid,
    *,
    value: str | None = None,
    methods: Sequence[str] = ANALYSED,
    replicates: int = 50,
    seed: int = 0,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
) -> list[Table]:
    """Tables that answer whether the split is better than random, at which layer, κ and τ, and by which estimator.

    Parameters
    ----------
    grid : Grid
    value : str, optional
        Accuracy that is compared, see :func:`fedstat.study.rules.choose`.
    methods : sequence of str
        Runs whose weights and splits are analysed.
    replicates : int
        Bootstrap samples of clients, and shuffles of units, for every layer.
    seed : int
    progress : callable
        Wraps the list of the runs that are analysed, as tqdm does; a run takes some seconds.

    Returns
    -------
    list of Table
        Accuracy against random splits; states over rounds; certainty; agreement of estimators. A part of which nothing
        was run is left out.
    """
    value = rules.choose(grid.table, value)
    better = against_random(grid, value=value)
    runs = show.in_order(grid)
    runs = runs[runs["method"].isin(methods)]
    keys = ["method", *(show.varying(runs) if len(runs) else ()), "layer"]
    settled, sure, agree = [], [], []
    for record in progress(runs.to_dict("records")):
        run, at = open_run(record["path"]), {name: record[name] for name in ("label", "method", "seed", *show.SETTINGS)}
        own = {"kappa": record["kappa"], "tau": record["tau"], "estimator": record["estimator"]}
        own = {name: value for name, value in own.items() if show.setting(value) != "–"}
        settled.append(summary.states(run).assign(**at))
        for layer, w in hidden_weights(run).items():
            # "mean" is no quantile, which alone is taken anew in a sample; agreement is no factor analysis.
            if not isinstance(record["tau"], str) and record["estimator"] != "icc":
                sure.append(at | {"layer": layer} | certainty(w, **own, replicates=replicates, seed=seed))
            agree.append(variants(w).assign(design=show.design(at, keys[1:-1]), label=at["label"], layer=layer))
    notes = caption(grid, 10_000)
    tables = [_better(better, value, (f"{value}: {rules.words(value, grid.table)}", *notes))]
    if any(map(len, settled)):
        tables.append(_settled(pd.concat(settled), keys, notes))
    if sure:
        tables.append(_sure(pd.DataFrame(sure), keys, replicates, notes))
    if agree:
        tables.append(_agree(pd.concat(agree), notes))
    return tables


def _better(table: pd.DataFrame, value: str, notes: Sequence[str]) -> Table:
    title = f"Is FedFac's split better than a random one? Differences in {value}"
    if not len(table):
        return Table(title, table, {}, ("no pair of FedFac and a random split of the same Λ, τ and seed", *notes))
    shown = {
        str(label): pd.DataFrame(
            {
                "method": METHODS.get(r["method"], r["method"]),
                "Λ": r["layers"] or "default",
                "κ": show.setting(r["kappa"]),
                "τ": show.setting(r["tau"]),
                "estimator": r["estimator"] or "pa",
                "pairs": r["n"],
                "difference [95 %]": claim(r["difference"], r["conf_low"], r["conf_high"], r["n"] - 1),
                "p (Holm)": number(r["p_holm"]),
                "p (signs)": number(r["p_sign_flip"], 3),
            }
            for r in rows.to_dict("records")
        )
        for label, rows in table.groupby("label", sort=False)
    }
    fedfac, tests = table[_by_analysis(table)], int(table["p_holm"].notna().sum())
    clear = fedfac["p_holm"] < 0.05
    wins, losses = (int((clear & (sign * fedfac["difference"] > 0)).sum()) for sign in (1, -1))
    unclear = int(fedfac["p_holm"].notna().sum()) - wins - losses
    answer = (
        f"of {len(fedfac)} comparisons {int((fedfac['difference'] > 0).sum())} favour FedFac; at 5 % after Holm over "
        f"{tests} tests {wins} are for it, {losses} against it, {unclear} open"
    )
    means = "difference: from random, drawn once, mean over seeds, [95 %] each on its own; p (signs): exact sign flips"
    return Table(title, table, shown, (answer, means, *notes))


def _settled(table: pd.DataFrame, keys: list[str], notes: Sequence[str]) -> Table:
    table = table.assign(share=table["shared"] / table["units"])
    blocks = _mean_blocks(table, keys, ["share", "stable", "agreement", "n_factors", "converged"], 2)
    means = (
        f"share: of units that are shared; stable: that keep their state between rounds, mean over the last {WINDOW}",
        "agreement: adjusted Rand index of the split half-way with the last; converged: share of the rounds",
    )
    return Table("Does the split settle?", table, blocks, (*means, *notes))


def _sure(table: pd.DataFrame, keys: list[str], replicates: int, notes: Sequence[str]) -> Table:
    blocks = _mean_blocks(table, keys, ["sure", "ari", "p_identity"], 3)
    least = 2 / (replicates + 1)
    means = (
        f"sure: units that are shared in ≥ 95 % or ≤ 5 % of {replicates} samples of clients",
        f"every run with its own κ, τ (if a quantile) and estimator; Local has none: κ = {KAPPA}, τ = {TAU}, pa",
        "ari: adjusted Rand index of a sample's split with that of all clients; 0 is chance",
        f"p_identity: units shuffled within clients; cannot fall below {least:.2g} here; not for minres, too slow",
        "clients start from common weights, so that identity of units is in part that of the start",
        _AFTER,
    )
    return Table("How sure is the split?", table, blocks, (*means, *notes))


def _agree(table: pd.DataFrame, notes: Sequence[str]) -> Table:
    blocks = {}
    for (label, design), rows in table.groupby(["label", "design"], sort=False):
        ari = rows.groupby(["layer", "kappa", "estimator"], sort=False)["ari"].mean().unstack("estimator")
        quality = rows[rows["estimator"] == "pa"].groupby(["layer", "kappa"], sort=False)
        frame = ari.drop(columns="pa").map(number, digits=2)
        frame[f"pa, κ = {KAPPA:g}"] = quality["ari_kappa"].mean().map(lambda x: number(x, 2))
        units = quality["units"].mean().map("{:.0f}".format)
        frame["factors"] = quality["n_factors"].mean().map("{:.0f} of ".format) + units
        frame["converged"] = quality["converged"].mean().map(lambda x: number(x, 2))
        frame["Heywood"] = quality["heywood"].mean().map(lambda x: number(x, 1))
        blocks[f"{label}, {design}"] = frame.reset_index().rename(columns={"kappa": "κ"})
    means = (
        "minres, pc, leverage: adjusted Rand index with pa at the same κ, mean over τ and seeds; 0 is chance",
        f"the rest is of pa: agreement with κ = {KAPPA:g}, factors of units, share converged, communalities > 1",
        "headings say how the weights were trained; κ in the rows is that of this analysis",
        _AFTER,
    )
    return Table("Do the estimators agree?", table, blocks, (*means, *notes))


_AFTER = "weights are those after the last round: under FedFac shared units are equal for all clients by construction"


def _mean_blocks(table: pd.DataFrame, keys: list[str], columns: list[str], digits: int) -> dict[str, pd.DataFrame]:
    """Means ± standard errors over seeds, one block per label, one row per value of the keys."""
    blocks = {}
    if (table["layers"] == table["layer"]).all():  # as where Λ is one layer
        keys = [name for name in keys if name != "layers"]
    for label, rows in table.groupby("label", sort=False):
        found: list[dict[str, Any]] = []
        for key, part in rows.groupby(keys, sort=False, dropna=False):
            line = {show.SETTINGS.get(name, name): show.setting(x) for name, x in zip(keys, key, strict=True)}
            line["method"] = METHODS.get(line["method"], line["method"])
            means, errors = part[columns].mean(), part[columns].sem()
            found.append(line | {c: plus_minus(float(means[c]), float(errors[c]), digits) for c in columns})
        blocks[str(label)] = pd.DataFrame(found)
    return blocks
