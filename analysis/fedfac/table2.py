"""FedFac Table 2: test accuracy of all methods, paired with FedFac, and the mixed model of methods and settings."""

from __future__ import annotations

from pathlib import Path

import _tables as study
import pandas as pd
from _mixed import mixed
from _tables import Asked

from fedstat._utils.settings import read_toml
from fedstat.results.tables import interval, p_value
from fedstat.study import collect, run_table
from fedstat.study import grid as grids
from fedstat.study.collect import Grid, ordered, origin, scenarios, title_of
from fedstat.study.printed_tables import Table

NAME = "simulations/fedfac.toml"
FILE = Path(__file__).parents[2] / NAME
TUNED = (
    f"{NAME}: FedFac's Λ, κ and τ were tuned on validation samples of CIFAR-10 and used for the "
    "other data too (Shakespeare's Λ was not tuned); FedProx's μ = 0.01, LG-FedAvg's one global layer and other "
    "methods' settings were not tuned"
)
UNKNOWN = f"runs that are not those of {NAME}: whether any setting was tuned is not known here"


def accuracy(grid: Grid, asked: Asked) -> Table:
    """Table 2: test accuracy of all methods, compared by one rule, with the other rules beside it."""
    reference = asked.reference or "fedfac-dynamic"
    return study.accuracy(
        grid, asked.paper, name="table2", title=f"Table 2. Test accuracy, compared with {title_of(reference)}",
        reference=reference, rule=asked.rule, said=(*designs(grid), *tuned(grid)),
    )  # fmt: skip


def interaction(grid: Grid, asked: Asked) -> Table:
    """Mixed model accuracy ~ method * heterogeneity + (1 | seed), for each data set with two or more settings."""
    blocks, values, notes = {}, [], []
    rule = run_table.choose(grid.table, asked.rule)
    datasets = {scenario: str(grid.configs[scenario]["data"]) for scenario in scenarios(grid)}
    for name in dict.fromkeys(datasets.values()):
        rows = grid.table[grid.table["scenario"].map(datasets) == name]
        rows = rows.assign(place=rows["method"].map(ordered(rows["method"]).index)).sort_values(["scenario", "place"])
        if rows["scenario"].nunique() < 2:
            notes.append(f"{name}: one setting only, so no model of heterogeneity")
            continue
        try:
            fit = mixed(rows, reference=asked.reference or "fedavg", value=rule, heterogeneity="scenario", group="seed")
        except ValueError as error:
            notes.append(f"{name}: no mixed model: {error}")
            continue
        sd = f"standard deviations: seeds {fit.group_variance**0.5:.4f}, residual {fit.residual_variance**0.5:.4f}"
        values.append(fit.table.assign(data=name, group_variance=fit.group_variance, singular=fit.singular))
        blocks[f"{name} ({fit.n} runs, {fit.groups} seeds; {sd})"] = pd.DataFrame(
            {
                "term": [t.replace("heterogeneity[", "setting[") for t in fit.table["term"]],
                "estimate [95 %]": [interval(*r) for r in fit.table[["estimate", "conf_low", "conf_high"]].to_numpy()],
                "p": [p_value(p) for p in fit.table["p_value"]],
            }
        )
        notes += [f"{name}: {fit.note}"] if fit.note else []
    notes.append(f"{rule}: {run_table.words(rule, grid.table)}")
    notes.append("t tests with N − seeds − (terms − 1) degrees of freedom; p not adjusted")
    table = pd.concat(values) if values else pd.DataFrame()
    title = f"Mixed model {rule} ~ method * setting + (1 | seed)"
    return Table(title, table, blocks, (*notes, *origin(grid)))


def designs(grid: Grid) -> list[str]:
    """Settings of FedFac, and the data they were used on."""
    found: dict[str, list[str]] = {}
    for run in collect.in_order(grid).to_dict("records"):
        if run["method"].startswith("fedfac"):
            found.setdefault(collect.design(run, collect.SETTINGS).partition(", ")[2], []).append(run["scenario"])
    return [f"FedFac with {what}: {'; '.join(dict.fromkeys(where))}" for what, where in found.items()]


def tuned(grid: Grid) -> list[str]:
    """What is known about tuning: only for runs of one file, recognised by their names, which identify all settings."""
    names = {grids.name_of(run) for scale in read_toml(FILE)["scale"] for run in grids.cells(FILE, scale=scale)}
    of_file = {Path(path).stem in names for path in grid.table["path"]}
    return [note for known, note in ((True, TUNED), (False, UNKNOWN)) if known in of_file]
