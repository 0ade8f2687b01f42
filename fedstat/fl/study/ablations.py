"""Tables 4–6 and 8 of the FedFac paper: tuning Λ, τ and κ on validation data; masked parts; random splits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedstat.fl.study.show import METHODS, Table, interval, labels, number, plus_minus, published
from fedstat.fl.study.summary import Grid
from fedstat.fl.study.tables import (
    POOLED,
    SE,
    Paper,
    compared,
    line,
    mean_over_clients,
    p_text,
    source,
    together,
    with_pooled,
)
from fedstat.stats import compare
from fedstat.store import open_run

STAGES = {"table4": ("layers", "Λ"), "table5": ("tau", "τ"), "table6": ("kappa", "κ")}
"""What each table of §5.3 varies, in the order of tuning."""

TAU, KAPPA = 0.5, 0.85
"""τ and κ while Λ is tuned (FedFac Table 4), κ while τ is."""


def tuning(grid: Grid, paper: Paper, _: Namespace, *, name: str, method: str = "fedfac-dynamic") -> Table:
    """Tables 4–6: one setting of FedFac is varied, the best on validation data is chosen, its test accuracy is shown.

    Parameters
    ----------
    grid : Grid
        Runs of ``method`` in which layers, tau or kappa vary; they need validation data.
    paper : mapping
    name : {"table4", "table5", "table6"}
        Table 4 varies Λ at τ = 0.5 and κ = 0.85; Table 5 varies τ at the Λ chosen there; Table 6 κ at both.
    method : str

    Raises
    ------
    ValueError
        If there are no such runs, or none with validation data: nothing is chosen on test data.
    """
    varied, symbol = STAGES[name]
    blocks, values, notes = {}, [], []
    for label in labels(grid):
        rows = grid.table[(grid.table["label"] == label) & (grid.table["method"] == method)]
        rows, fixed = _stage(rows, name)
        if not len(rows):
            notes.append(f"{label}: not run at {fixed}")
            continue
        table = _tuned(rows, varied)
        theirs = published(paper, name, label)
        table["paper"] = [theirs.get(str(x)) for x in table[varied]]
        values.append(table.assign(label=label, fixed=fixed))
        blocks[f"{label}; {fixed}"] = _tuning_block(table, varied, symbol)
        if len(table) == 1:
            notes.append(f"{label}: one {symbol} only was run")
    if not values:
        raise ValueError(f"no finished run of {method} is one of {name}: {'; '.join(notes) or 'no such run at all'}")
    blocks |= _references(grid, paper, name, symbol)
    said = (
        f"chosen (*): best mean validation accuracy; test: of the round chosen on validation data; {SE}",
        "best10: best mean over 10 consecutive rounds of the test data",
        "difference: test, from the chosen, paired over seeds, 95 % for all rows of a block together (Bonferroni)",
    )  # fmt: skip
    title = f"Table {name[-1]}. Tuning {symbol} on validation data, {METHODS.get(method, method)}"
    return Table(title, pd.concat(values, ignore_index=True), blocks, (*said, *notes, *source(grid, paper)))


def masking(grid: Grid, paper: Paper, _: Namespace) -> Table:
    """Table 8 A: accuracy when the shared or the personal units are replaced by random values."""
    rows = []
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        if "masking" in tree.children:
            group = tree["masking"].to_dataset().assign(n_test=tree["metrics/n_test"])
            mean = mean_over_clients(group["accuracy"].mean("draw"), group)
            if np.ptp(mean.to_numpy()) == 0:  # no layer has shared and personal units, so that nothing was masked
                continue
            here = {"label": run["label"], "seed": run["seed"], "of": run["method"]}
            rows += [here | {"method": str(part), "masked": float(mean.sel(part=part))} for part in mean["part"].values]
    if not rows:
        raise ValueError("no run with a split layer was evaluated with masked parts: run with masking asked for")
    table = pd.DataFrame(rows)
    blocks, values, notes = {}, [], []
    for (label, method), part in table.groupby(["label", "of"], sort=False):
        here = {"label": str(label), "of": str(method)}
        found = compare.paired(part, reference="none", value="masked")
        both = compare.paired(part, reference="shared", value="masked").table
        theirs = published(paper, "table8", str(label)) if method == "fedfac-dynamic" else {}
        heading = f"{label}, {METHODS.get(str(method), method)}"
        blocks[heading] = pd.DataFrame(
            line(r, "accuracy", "none") | {"paper": number(theirs.get(r["method"]))}
            for r in found.table.to_dict("records")
        ).rename(columns={"method": "masked"})
        values.append(found.table.assign(**here, paper=found.table["method"].map(theirs)))
        between: dict[Any, Any] = both.set_index("method").loc["personal"].to_dict()
        worse = interval(between["difference"], between["conf_low"], between["conf_high"])
        notes.append(f"{heading}: personal masked − shared masked: {worse}, p = {p_text(between['p_value'])}")
        notes += [f"{heading}: {note}" for note in found.notes]
    said = (
        f"masked: that part of the split layers replaced by random values, mean over draws; {SE}",
        "difference: from none, paired over seeds, 95 % for all rows of a block together (Bonferroni); p: Holm",
    )  # fmt: skip
    values = [table[["label", "of", *table.columns.drop(["label", "of"])]] for table in values]
    title = "Table 8 A. Accuracy with one part of the split layers masked"
    return Table(title, pd.concat(values, ignore_index=True), blocks, (*said, *notes, *source(grid, paper)))


def random_split(grid: Grid, paper: Paper, args: Namespace) -> Table:
    """Table 8 B: the split by factor analysis against random ones, in every setting and over all of them."""
    wanted = ("random", "random-redrawn", "fedfac-static", "fedfac-dynamic")
    rows = grid.table[grid.table["method"].isin(wanted)]
    if "random" not in set(rows["method"]):
        raise ValueError("no run has a random split, so there is nothing to compare with: run the algorithm 'random'")
    grid = grid._replace(table=rows)
    values, notes = compared(rows, grid, args.rule, "random")
    values, notes = with_pooled(values, notes, rows, args.rule, "random")
    values["paper"] = [published(paper, "table8", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            line(r, args.rule, "random") | {"pairs": str(r["n"]), "paper": number(r["paper"])}
            for r in part.to_dict("records")
        )
        for label, part in values.groupby("label", sort=False)
    }
    said = (
        f"random: units drawn once, as many shared; redrawn: anew in every round; {SE}",
        *together(grid, "random"), POOLED,
    )  # fmt: skip
    title = "Table 8 B. Factor analysis against random splits"
    return Table(title, values, blocks, (*said, *notes, *source(grid, paper)))


def _stage(rows: pd.DataFrame, name: str) -> tuple[pd.DataFrame, str]:
    """Runs of one stage of tuning, and what they have in common, in words."""
    fixed: dict[str, Any] = {"tau": TAU, "kappa": KAPPA}
    if name != "table4":
        before, _ = _stage(rows, "table4")
        fixed = {"layers": _chosen(before, "layers"), "kappa": KAPPA}
    if name == "table6":
        before, _ = _stage(rows, "table5")
        fixed = {"layers": fixed["layers"], "tau": _chosen(before, "tau")}
    for key, value in fixed.items():
        rows = rows[rows[key] == value]
    symbols = {"layers": "Λ", "tau": "τ", "kappa": "κ"}
    return rows, ", ".join(f"{symbols[k]} = {v if v is not None else 'none'}" for k, v in fixed.items())


def _chosen(rows: pd.DataFrame, varied: str) -> Any:
    """Value with the best mean validation accuracy, None if there is no run."""
    if not len(rows):
        return None
    if rows["validation"].isna().all():
        raise ValueError(
            f"{varied} is chosen on validation data, but these runs have none. Run with validation > 0; test data are "
            "not tuned on."
        )
    return rows.groupby(varied)["validation"].mean().idxmax()


def _tuned(rows: pd.DataFrame, varied: str) -> pd.DataFrame:
    """Comparison of the values of one setting with the chosen one; numbers in order, layers as they came."""
    rows = rows.sort_values([varied, "seed"]) if varied != "layers" else rows.sort_values(["layers", "seed"])
    chosen = _chosen(rows, varied)
    names = rows.assign(value=rows[varied].map(str))
    table = compare.paired(names, reference=str(chosen), value="validated", method="value").table
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
            "difference [95 %]": "chosen" if r["chosen"] else interval(r["difference"], r["all_low"], r["all_high"]),
            "best10": number(r["best10_mean"]),
            "paper": number(r["paper"]),
        }
        for r in table.to_dict("records")
    )


def _references(grid: Grid, paper: Paper, name: str, symbol: str) -> Mapping[str, pd.DataFrame]:
    """The paper's own settings, where none of them was run: as a reference, not as results."""
    if any(published(paper, name, label) for label in labels(grid)):
        return {}
    settings = pd.DataFrame(paper.get(name, {}))
    shown = settings.map(number).reset_index(names=symbol)
    return {"The paper's values, as a reference (CIFAR-100, VGG-16; not run here)": shown} if len(settings) else {}
