"""FedFac Table 8: (A) ablation of shared and personal parts, (B) the split by factor analysis against random splits."""

from __future__ import annotations

import pandas as pd
from _tables import Asked

from fedstat.labelled import compare
from fedstat.results.ranks import difference
from fedstat.results.tables import number, p_value
from fedstat.store import open_run
from fedstat.study import collect, run_table
from fedstat.study.collect import Grid
from fedstat.study.compare import against_zero
from fedstat.study.printed_tables import Table
from fedstat.study.within_seeds import (
    OVERALL,
    SE,
    TOGETHER,
    add_overall,
    compare_settings,
    difference_notes,
    table_line,
)


def ablation(grid: Grid, asked: Asked) -> Table:
    """Table 8 A: accuracy when the shared or the personal units are replaced by random values."""
    rows, named = [], collect.varying(grid.table)
    for run in collect.in_order(grid).to_dict("records"):
        tree = open_run(run["path"])
        split = run_table.states(tree).query("0 < shared < units")
        if "ablation" not in tree.children or not len(split):  # without a split layer nothing was replaced
            continue
        here = {name: run[name] for name in ("scenario", "seed", *collect.SETTINGS)} | {"of": run["method"]}
        here["heading"] = f"{run['scenario']}, {collect.design(run, named)}"
        mean, shared, units = run_table.ablated(tree).mean("draw"), split["shared"].sum(), split["units"].sum()
        for part in map(str, mean["part"].values):
            replaced = 0 if part == "none" else shared if part.startswith("shared") else units - shared
            rows.append(here | {"method": part, "units": replaced, "masked": float(mean.sel(part=part))})
    if not rows:
        raise ValueError("no run with a split layer has an ablation: run with ablation > 0")
    table = pd.DataFrame(rows)
    blocks, values, notes = {}, [], []
    for heading, own in table.groupby("heading", sort=False):
        found = compare(own, reference="none", value="masked")
        block, first = found.table, own.iloc[0]
        of_split = [name for name in own.columns if name not in found.table and name not in ("seed", "masked")]
        block[of_split] = first[of_split].to_list()
        theirs = asked.paper.of("table8", first["scenario"]) if first["of"] == "fedfac-dynamic" else {}
        block["paper"] = block["method"].map(theirs)
        block["units"] = block["method"].map(own.groupby("method")["units"].mean())
        values.append(block)
        blocks[str(heading)] = pd.DataFrame(
            {"masked": r["method"], "units": f"{r['units']:g}"}
            | {k: v for k, v in table_line(r, "accuracy", "none").items() if k != "method"}
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
            "difference [95 %]": difference(r),
            "p": p_value(r["p_holm"]),
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
    return Table(title, pd.concat([*values, between]), blocks, (*said, *notes, *asked.paper.notes(grid)))


def _personal_less_shared(table: pd.DataFrame) -> pd.DataFrame:
    """Accuracy without the personal units minus that without the shared ones, adjusted over all splits."""
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


def random_split(grid: Grid, asked: Asked) -> Table:
    """Table 8 B: the split by factor analysis against random ones, in every setting and over all of them."""
    wanted = ("random", "random-redrawn", "fedfac-static", "fedfac-dynamic")
    rows = grid.table[grid.table["method"].isin(wanted)]
    if named := collect.varying(rows):
        raise ValueError(
            "several splits of one method in a setting (they differ in "
            f"{', '.join(collect.SETTINGS[n] for n in named)}); "
            "analysis/fedfac/decomposition.py compares each with the random split of the same Λ and τ"
        )
    if "random" not in set(rows["method"]):
        raise ValueError("no run has a random split, so there is nothing to compare with: run the algorithm 'random'")
    grid = grid._replace(table=rows)
    rule = run_table.choose(rows, asked.rule)
    values, notes = compare_settings(rows, grid, rule, "random")
    values, notes = add_overall(values, notes, rows, rule, "random")
    values["paper"] = [asked.paper.of("table8", r["scenario"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(scenario): pd.DataFrame(
            table_line(r, rule, "random") | {"pairs": str(r["n"]), "paper": number(r["paper"])}
            for r in part.to_dict("records")
        )
        for scenario, part in values.groupby("scenario", sort=False)
    }
    said = (
        f"{rule}: {run_table.words(rule, rows)}",
        f"random: units drawn once, as many shared; redrawn: anew in every round; {SE}",
        *difference_notes(grid, "random"), OVERALL,
    )  # fmt: skip
    title = "Table 8 B. Factor analysis against random splits"
    return Table(title, values, blocks, (*said, *notes, *asked.paper.notes(grid)))
