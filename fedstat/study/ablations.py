"""Tables 4–6 and 8 of the FedFac paper: tuning Λ, τ and κ on validation data; masked parts; random splits."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedstat.stats import compare
from fedstat.store import open_run
from fedstat.study import rules, show, summary
from fedstat.study.show import METHODS, Table, labels, number, plus_minus, published
from fedstat.study.summary import Grid
from fedstat.study.tables import (
    POOLED,
    SE,
    TOGETHER,
    Paper,
    against_zero,
    claim,
    compared,
    from_all,
    line,
    p_text,
    source,
    together,
    with_pooled,
)

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
    runs = show.in_order(grid)
    for label in labels(grid):
        rows = runs[(runs["label"] == label) & (runs["method"] == method)]
        rows, fixed = _stage(rows, name, grid.configs[label])
        if not len(rows):
            notes.append(f"{label}: not run at {fixed}")
            continue
        table = _tuned(rows, varied, summary.chosen(rows, varied, grid.configs[label]))
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
        f"best10: {rules.words('best10', runs)}",
        f"difference: test, from the chosen, within seeds; {TOGETHER}",
    )  # fmt: skip
    title = f"Table {name[-1]}. Tuning {symbol} on validation data, {METHODS.get(method, method)}"
    return Table(title, pd.concat(values, ignore_index=True), blocks, (*said, *notes, *source(grid, paper)))


def masking(grid: Grid, paper: Paper, _: Namespace) -> Table:
    """Table 8 A: accuracy when the shared or the personal units are replaced by random values."""
    rows, named = [], show.varying(grid.table)
    for run in show.in_order(grid).to_dict("records"):
        tree = open_run(run["path"])
        split = summary.states(tree).query("0 < shared < units")
        if "masking" not in tree.children or not len(split):  # with no split layer nothing was masked
            continue
        here = {name: run[name] for name in ("label", "seed", *show.SETTINGS)} | {"of": run["method"]}
        here["heading"] = f"{run['label']}, {show.design(run, named)}"
        mean, shared, units = summary.masked(tree).mean("draw"), split["shared"].sum(), split["units"].sum()
        for part in map(str, mean["part"].values):
            replaced = 0 if part == "none" else shared if part.startswith("shared") else units - shared
            rows.append(here | {"method": part, "units": replaced, "masked": float(mean.sel(part=part))})
    if not rows:
        raise ValueError("no run with a split layer was evaluated with masked parts: run with masking asked for")
    table = pd.DataFrame(rows)
    blocks, values, notes = {}, [], []
    for heading, own in table.groupby("heading", sort=False):
        found = compare.paired(own, reference="none", value="masked")
        block, first = found.table, own.iloc[0]
        of_split = [name for name in own.columns if name not in found.table and name not in ("seed", "masked")]
        block[of_split] = first[of_split].to_list()
        theirs = published(paper, "table8", first["label"]) if first["of"] == "fedfac-dynamic" else {}
        block["paper"] = block["method"].map(theirs)
        block["units"] = block["method"].map(own.groupby("method")["units"].mean())
        values.append(block)
        blocks[str(heading)] = pd.DataFrame(
            {"masked": r["method"], "units": f"{r['units']:g}"}
            | {k: v for k, v in line(r, "accuracy", "none").items() if k != "method"}
            | {"paper": number(r["paper"])}
            for r in block.to_dict("records")
        )
        notes += [f"{heading}: {note}" for note in found.notes]
    between = _personal_less_shared(table)
    blocks["Personal masked − shared masked"] = pd.DataFrame(
        {
            "split": r["heading"],
            "personal": f"{r['personal_units']:g}",
            "shared": f"{r['shared_units']:g}",
            "difference [95 %]": claim(r["difference"], r["all_low"], r["all_high"], r["n"] - 1),
            "p": p_text(r["p_holm"]),
        }
        for r in between.to_dict("records")
    )
    said = (
        (
            "masked: that part of the split layers replaced by normal values, of the layer's own standard deviation or "
            f"N(0, 1) as in the published code, mean over draws; units: how many are replaced; {SE}"
        ),
        f"difference: from none, within seeds; {TOGETHER}",
        "the last block: paired over seeds, 95 % for all its rows together (Bonferroni); p: Holm over its own rows",
        (
            "the paper (§5.5) takes τ = 50 %, so that both parts are equally large, and masks when local models are "
            "updated; here units are masked once, after training; a larger part is also harder to do without"
        ),
    )
    title = "Table 8 A. Accuracy with one part of the split layers masked"
    return Table(title, pd.concat([*values, between]), blocks, (*said, *notes, *source(grid, paper)))


def _personal_less_shared(table: pd.DataFrame) -> pd.DataFrame:
    """Accuracy with the personal units masked less that with the shared ones masked, adjusted over all splits."""
    shared, personal = (
        table[table["method"] == part].set_index(["heading", "seed"]) for part in ("shared", "personal")
    )
    found = against_zero(personal.assign(x=personal["masked"] - shared["masked"]).reset_index(), "heading", "x")
    of_split = table.drop(columns=["seed", "method", "units", "masked"]).drop_duplicates("heading")
    sizes = {
        f"{name}_units": part.groupby("heading")["units"].mean()
        for name, part in {"shared": shared, "personal": personal}.items()
    }
    return found.merge(of_split).join(pd.DataFrame(sizes), on="heading").assign(method="personal − shared")


def random_split(grid: Grid, paper: Paper, args: Namespace) -> Table:
    """Table 8 B: the split by factor analysis against random ones, in every setting and over all of them."""
    wanted = ("random", "random-redrawn", "fedfac-static", "fedfac-dynamic")
    rows = grid.table[grid.table["method"].isin(wanted)]
    if named := show.varying(rows):
        raise ValueError(
            f"several splits of one method in a setting (they differ in {', '.join(show.SETTINGS[n] for n in named)}); "
            "analysis/decomposition.py compares each with the random split of the same Λ and τ"
        )
    if "random" not in set(rows["method"]):
        raise ValueError("no run has a random split, so there is nothing to compare with: run the algorithm 'random'")
    grid = grid._replace(table=rows)
    rule = rules.choose(rows, args.rule)
    values, notes = compared(rows, grid, rule, "random")
    values, notes = with_pooled(values, notes, rows, rule, "random")
    values["paper"] = [published(paper, "table8", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            line(r, rule, "random") | {"pairs": str(r["n"]), "paper": number(r["paper"])}
            for r in part.to_dict("records")
        )
        for label, part in values.groupby("label", sort=False)
    }
    said = (
        f"{rule}: {rules.words(rule, rows)}",
        f"random: units drawn once, as many shared; redrawn: anew in every round; {SE}",
        *together(grid, "random"), POOLED,
    )  # fmt: skip
    title = "Table 8 B. Factor analysis against random splits"
    return Table(title, values, blocks, (*said, *notes, *source(grid, paper)))


def _stage(rows: pd.DataFrame, name: str, config: Mapping[str, Any]) -> tuple[pd.DataFrame, str]:
    """Runs of one stage of tuning, and what they have in common, in words."""
    fixed: dict[str, Any] = {"tau": TAU, "kappa": KAPPA}
    if name != "table4":
        fixed = {"layers": _best_of(rows, "table4", config), "kappa": KAPPA}
    if name == "table6":
        fixed = {"layers": fixed["layers"], "tau": _best_of(rows, "table5", config)}
    for key, value in fixed.items():
        rows = rows[rows[key] == value]
    return rows, ", ".join(f"{show.SETTINGS[k]} = {v if v is not None else 'none'}" for k, v in fixed.items())


def _best_of(rows: pd.DataFrame, name: str, config: Mapping[str, Any]) -> Any:
    """What a stage of tuning chose, None if nothing of it was run."""
    rows, _ = _stage(rows, name, config)
    return summary.chosen(rows, STAGES[name][0], config) if len(rows) else None


def _tuned(rows: pd.DataFrame, varied: str, chosen: Any) -> pd.DataFrame:
    """Comparison of the values of one setting, in the order of the rows, with the chosen one."""
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
            "difference [95 %]": "chosen" if r["chosen"] else from_all(r),
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
