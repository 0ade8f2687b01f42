"""FedFac's decomposition: is its split better than random, stable, certain, and the same for every estimator?

python analysis/fedfac/decomposition.py --runs runs/fedfac-quick --out runs/tables/decomposition
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checks
import pandas as pd
from checks import KAPPA, TAU
from threadpoolctl import threadpool_limits

from fedstat import _cli
from fedstat._utils.loops import track
from fedstat.results.ranks import difference
from fedstat.results.tables import number, plus_minus
from fedstat.store import open_run
from fedstat.study import collect, run_table
from fedstat.study.collect import METHODS, Grid, caption
from fedstat.study.printed_tables import Table, require_writable
from fedstat.study.run_table import WINDOW

ANALYSED = ("local", "fedfac-static", "fedfac-dynamic")
"""Methods whose runs are analysed: those under which clients' weights of a hidden layer differ."""


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/fedfac-quick"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME-1.csv, NAME-1.md, ...")
    cli.add_argument("--rule", choices=run_table.RULES, help="rounds to judge by (default best10)")
    cli.add_argument("--replicates", type=int, default=50, help="bootstrap samples and shuffles (default 50)")
    cli.add_argument("--methods", nargs="+", default=ANALYSED, help="methods whose weights are analysed")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    if args.out is not None:
        require_writable(Path(f"{args.out}-1"))
    grid = collect.select(collect.collect(args.runs), ())
    tables = study(grid, value=args.rule, methods=args.methods, replicates=args.replicates)
    for n, made in enumerate(tables, 1) if args.out is not None else ():
        made.write(Path(f"{args.out}-{n}"))
    print("\n\n\n".join(made.text() for made in tables))


@threadpool_limits.wrap(limits=1, user_api="blas")  # with 128 units two threads are slower than one
def study(
    grid: Grid,
    *,
    value: str | None = None,
    methods: Sequence[str] = ANALYSED,
    replicates: int = 50,
    seed: int = 0,
    progress: bool | None = None,
) -> list[Table]:
    """Tables that answer whether the split is better than random, at which layer, κ and τ, and by which estimator.

    Parameters
    ----------
    grid : Grid
    value : str, optional
        Accuracy that is compared, see :func:`fedstat.study.run_table.choose`.
    methods : sequence of str
        Runs whose weights and splits are analysed.
    replicates : int
        Bootstrap samples of clients, and shuffles of units, for every layer.
    seed : int
    progress : bool or None
        Show how many runs are analysed, see :func:`fedstat.fl.train`; a run takes some seconds.

    Returns
    -------
    list of Table
        Accuracy against random splits; states over rounds; certainty; agreement of estimators. Tables without runs are
        left out.
    """
    value = run_table.choose(grid.table, value)
    better = checks.against_random(grid, value=value)
    runs = collect.in_order(grid)
    runs = runs[runs["method"].isin(methods)]
    keys = ["method", *(collect.varying(runs) if len(runs) else ()), "layer"]
    settled, sure, agree = [], [], []
    with track(runs.to_dict("records"), "run", progress) as records:
        for record in records:
            run, at = (
                open_run(record["path"]),
                {name: record[name] for name in ("scenario", "method", "seed", *collect.SETTINGS)},
            )
            own = {"kappa": record["kappa"], "tau": record["tau"], "estimator": record["estimator"]}
            own = {name: value for name, value in own.items() if collect.setting(value) != "–"}
            settled.append(run_table.states(run).assign(**at))
            for layer, w in checks.hidden_weights(run).items():
                # Only a quantile τ (not "mean") can be taken anew in a sample; agreement is not a factor analysis.
                if not isinstance(record["tau"], str) and record["estimator"] != "icc":
                    sure.append(at | {"layer": layer} | checks.certainty(w, **own, replicates=replicates, seed=seed))
                agree.append(
                    checks.variants(w).assign(
                        design=collect.design(at, keys[1:-1]), scenario=at["scenario"], layer=layer
                    )
                )
    notes = caption(grid, 10_000)
    tables = [_better(better, value, (f"{value}: {run_table.words(value, grid.table)}", *notes))]
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
        str(scenario): pd.DataFrame(
            {
                "method": METHODS.get(r["method"], r["method"]),
                "Λ": r["layers"] or "default",
                "κ": collect.setting(r["kappa"]),
                "τ": collect.setting(r["tau"]),
                "estimator": r["estimator"] or "pa",
                "pairs": r["n"],
                "difference [95 %]": difference(r | {"sim_conf_low": r["conf_low"], "sim_conf_high": r["conf_high"]}),
                "p (Holm)": number(r["p_holm"]),
                "p (signs)": number(r["p_sign_flip"], 3),
            }
            for r in rows.to_dict("records")
        )
        for scenario, rows in table.groupby("scenario", sort=False)
    }
    fedfac, tests = table[checks.by_analysis(table)], int(table["p_holm"].notna().sum())
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
    for (scenario, design), rows in table.groupby(["scenario", "design"], sort=False):
        ari = rows.groupby(["layer", "kappa", "estimator"], sort=False)["ari"].mean().unstack("estimator")
        quality = rows[rows["estimator"] == "pa"].groupby(["layer", "kappa"], sort=False)
        frame = ari.drop(columns="pa").map(number, digits=2)
        frame[f"pa, κ = {KAPPA:g}"] = quality["ari_kappa"].mean().map(lambda x: number(x, 2))
        units = quality["units"].mean().map("{:.0f}".format)
        frame["factors"] = quality["n_factors"].mean().map("{:.0f} of ".format) + units
        frame["converged"] = quality["converged"].mean().map(lambda x: number(x, 2))
        frame["Heywood"] = quality["heywood"].mean().map(lambda x: number(x, 1))
        blocks[f"{scenario}, {design}"] = frame.reset_index().rename(columns={"kappa": "κ"})
    means = (
        "minres, pc, leverage: adjusted Rand index with pa at the same κ, mean over τ and seeds; 0 is chance",
        f"the rest is of pa: agreement with κ = {KAPPA:g}, factors of units, share converged, communalities > 1",
        "headings say how the weights were trained; κ in the rows is that of this analysis",
        _AFTER,
    )
    return Table("Do the estimators agree?", table, blocks, (*means, *notes))


_AFTER = "weights are those after the last round: under FedFac shared units are equal for all clients by construction"


def _mean_blocks(table: pd.DataFrame, keys: list[str], columns: list[str], digits: int) -> dict[str, pd.DataFrame]:
    """Means ± standard errors over seeds, one block per scenario, one row per value of the keys."""
    blocks = {}
    if (table["layers"] == table["layer"]).all():  # if Λ is always one layer
        keys = [name for name in keys if name != "layers"]
    for scenario, rows in table.groupby("scenario", sort=False):
        found: list[dict[str, Any]] = []
        for key, part in rows.groupby(keys, sort=False, dropna=False):
            line = {collect.SETTINGS.get(name, name): collect.setting(x) for name, x in zip(keys, key, strict=True)}
            line["method"] = METHODS.get(line["method"], line["method"])
            means, errors = part[columns].mean(), part[columns].sem()
            found.append(line | {c: plus_minus(float(means[c]), float(errors[c]), digits) for c in columns})
        blocks[str(scenario)] = pd.DataFrame(found)
    return blocks


if __name__ == "__main__":
    sys.exit(main())
