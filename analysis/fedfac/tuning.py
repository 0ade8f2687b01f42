"""FedFac Tables 4 to 6: Λ, then τ, then κ, each chosen on validation data and shown on test data (§5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
from _tables import Asked, Reference

from fedstat.labelled import compare
from fedstat.results.ranks import difference
from fedstat.results.tables import number, plus_minus
from fedstat.study import collect, run_table
from fedstat.study.collect import METHODS, Grid, scenarios
from fedstat.study.printed_tables import Table
from fedstat.study.within_seeds import SE, TOGETHER

STAGES = {"table4": ("layers", "Λ"), "table5": ("tau", "τ"), "table6": ("kappa", "κ")}
"""What each table of §5.3 varies, in the order of tuning."""

TAU, KAPPA = 0.5, 0.85
"""τ and κ while Λ is tuned (FedFac Table 4), and κ while τ is tuned."""


def tuning(grid: Grid, asked: Asked, *, name: str, method: str = "fedfac-dynamic") -> Table:
    """Tables 4–6: vary one setting of FedFac, choose the best on validation data, show its test accuracy.

    Parameters
    ----------
    grid : Grid
        Runs of ``method`` in which layers, tau or kappa vary; they need validation data.
    asked : Asked
    name : {"table4", "table5", "table6"}
        Table 4 varies Λ at τ = 0.5 and κ = 0.85; Table 5 varies τ at the Λ chosen there; Table 6 κ at both.
    method : str

    Raises
    ------
    ValueError
        If there are no such runs, or none with validation data; nothing is chosen on test data.
    """
    varied, symbol = STAGES[name]
    blocks, values, notes = {}, [], []
    runs = collect.in_order(grid)
    for scenario in scenarios(grid):
        rows = runs[(runs["scenario"] == scenario) & (runs["method"] == method)]
        rows, fixed = _stage(rows, name, grid.configs[scenario])
        if not len(rows):
            notes.append(f"{scenario}: not run at {fixed}")
            continue
        table = _tuned(rows, varied, run_table.chosen(rows, varied, grid.configs[scenario]))
        theirs = asked.paper.of(name, scenario)
        table["paper"] = [theirs.get(str(x)) for x in table[varied]]
        values.append(table.assign(scenario=scenario, fixed=fixed))
        blocks[f"{scenario}; {fixed}"] = _tuning_block(table, varied, symbol)
        if len(table) == 1:
            notes.append(f"{scenario}: one {symbol} only was run")
    if not values:
        raise ValueError(f"no finished run of {method} is one of {name}: {'; '.join(notes) or 'no such run at all'}")
    blocks |= _references(grid, asked.paper, name, symbol)
    said = (
        f"chosen (*): best mean validation accuracy; test: of the round chosen on validation data; {SE}",
        f"best10: {run_table.words('best10', runs)}",
        f"difference: test, from the chosen, within seeds; {TOGETHER}",
    )  # fmt: skip
    title = f"Table {name[-1]}. Tuning {symbol} on validation data, {METHODS.get(method, method)}"
    return Table(title, pd.concat(values, ignore_index=True), blocks, (*said, *notes, *asked.paper.notes(grid)))


def _stage(rows: pd.DataFrame, name: str, config: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """Runs of one stage of tuning, and their common settings in words."""
    fixed: dict[str, Any] = {"tau": TAU, "kappa": KAPPA}
    if name != "table4":
        fixed = {"layers": _best_of(rows, "table4", config), "kappa": KAPPA}
    if name == "table6":
        fixed = {"layers": fixed["layers"], "tau": _best_of(rows, "table5", config)}
    for key, value in fixed.items():
        rows = rows[rows[key] == value]
    return rows, ", ".join(f"{collect.SETTINGS[k]} = {v if v is not None else 'none'}" for k, v in fixed.items())


def _best_of(rows: pd.DataFrame, name: str, config: Mapping[str, Any]) -> Any:
    """The choice of a stage of tuning; None if none of its runs exist."""
    rows, _ = _stage(rows, name, config)
    return run_table.chosen(rows, STAGES[name][0], config) if len(rows) else None


def _tuned(rows: pd.DataFrame, varied: str, chosen: Any) -> pd.DataFrame:
    """Comparison of the values of one setting with the chosen one, in the order of the rows."""
    names = rows.assign(value=rows[varied].map(str))
    table = compare(names, reference=str(chosen), value="validated", method="value").table
    means = names.groupby("value")[["validation", "best10"]].agg(["mean", "sem"])
    table["chosen"] = table["method"] == str(chosen)
    for name in ("validation", "best10"):
        for kind in ("mean", "sem"):
            table[f"{name}_{kind}"] = table["method"].map(means[name, kind])
    return table.rename(columns={"method": varied})


def _tuning_block(table: pd.DataFrame, varied: str, symbol: str) -> pd.DataFrame:
    return pd.DataFrame(
        {
            symbol: f"{r[varied]}{' *' if r['chosen'] else ''}",
            "validation": plus_minus(r["validation_mean"], r["validation_sem"]),
            "test": plus_minus(r["mean"], r["std_error_mean"]),
            "difference [95 %]": "chosen" if r["chosen"] else difference(r),
            "best10": number(r["best10_mean"]),
            "paper": number(r["paper"]),
        }
        for r in table.to_dict("records")
    )


def _references(grid: Grid, paper: Reference, name: str, symbol: str) -> Mapping[str, pd.DataFrame]:
    """The paper's own settings, if none of them was run: a reference, not results."""
    if any(paper.of(name, scenario) for scenario in scenarios(grid)):
        return {}
    settings = pd.DataFrame(paper.tables.get(name, {}))
    shown = settings.map(number).reset_index(names=symbol)
    return {"The paper's values, as a reference (CIFAR-100, VGG-16; not run here)": shown} if len(settings) else {}
