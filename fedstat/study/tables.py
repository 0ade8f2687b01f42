"""Tables 2–8 of the FedFac paper from a grid of runs, as statements about seeds: means, errors, paired differences."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from fedstat.stats import compare, pooled
from fedstat.store import open_run
from fedstat.study import rules, show, summary
from fedstat.study.show import METHODS, Table, interval, labels, number, ordered, plus_minus, published
from fedstat.study.summary import Grid

Paper = Mapping[str, Any]

SE = "±: standard error over seeds"
TOGETHER = "[95 %] and p: for all rows of a block together (Dunnett), with one residual variance of all within seeds"
POOLED = "all settings: means without ±, for settings differ; pairs are settings and seeds, taken as independent"


def accuracy(grid: Grid, paper: Paper, args: Namespace) -> Table:
    """Table 2: test accuracy of all methods, with the other rules beside the one that is compared."""
    rule, reference = rules.choose(grid.table, args.rule), args.reference or "fedfac-dynamic"
    values, notes = compared(grid.table, grid, rule, reference)
    values, notes = with_pooled(values, notes, grid.table, rule, reference)
    others = grid.table.groupby(["label", "method"])[[*rules.RULES, "optimism", "before"]].mean()
    values = values.join(others, on=["label", "method"])
    values["paper"] = [published(paper, "table2", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    beside = [name for name in rules.RULES if name not in (rule, "final")]  # which is in the CSV
    blocks = {
        str(label): pd.DataFrame(
            line(r, rule, reference) | {name: number(r[name]) for name in (*beside, "optimism", "before", "paper")}
            for r in rows.to_dict("records")
        )
        for label, rows in values.groupby("label", sort=False)
    }
    said = [
        f"{rule}: {rules.words(rule, grid.table)}; {SE}", *together(grid, reference), POOLED,
        *(f"{name}: {rules.words(name, grid.table)}" for name in beside),
        "optimism: best10 less the test accuracy of the 10 rounds that are best on validation data",
        "before: active clients' models as they leave local training, last 10 rounds",
    ]  # fmt: skip
    return Table(
        f"Table 2. Test accuracy, compared with {METHODS.get(reference, reference)}",
        values, blocks, (*said, *notes, *_settings(grid), *_not_run(grid, paper, "table2"), *source(grid, paper)),
    )  # fmt: skip


def interaction(grid: Grid, _: Paper, args: Namespace) -> Table:
    """Mixed model accuracy ~ method * heterogeneity + (1 | seed), for each data set with two or more settings."""
    blocks, values, notes = {}, [], []
    rule = rules.choose(grid.table, args.rule)
    datasets = {label: str(grid.configs[label]["data"]) for label in labels(grid)}
    for name in dict.fromkeys(datasets.values()):
        rows = grid.table[grid.table["label"].map(datasets) == name]
        rows = rows.assign(place=rows["method"].map(ordered(rows["method"]).index)).sort_values(["label", "place"])
        if rows["label"].nunique() < 2:
            notes.append(f"{name}: one setting only, so no model of heterogeneity")
            continue
        try:
            fit = compare.mixed(
                rows, reference=args.reference or "fedavg", value=rule, heterogeneity="label", group="seed"
            )
        except ValueError as error:
            notes.append(f"{name}: no mixed model: {error}")
            continue
        sd = f"standard deviations: seeds {fit.group_variance**0.5:.4f}, residual {fit.residual_variance**0.5:.4f}"
        values.append(fit.table.assign(data=name, group_variance=fit.group_variance, singular=fit.singular))
        blocks[f"{name} ({fit.n} runs, {fit.groups} seeds; {sd})"] = pd.DataFrame(
            {
                "term": [t.replace("heterogeneity[", "setting[") for t in fit.table["term"]],
                "estimate [95 %]": [interval(*r) for r in fit.table[["estimate", "conf_low", "conf_high"]].to_numpy()],
                "p": [p_text(p) for p in fit.table["p_value"]],
            }
        )
        notes += [f"{name}: {fit.note}"] if fit.note else []
    notes.append(f"{rule}: {rules.words(rule, grid.table)}")
    notes.append("t tests with N − seeds − (terms − 1) degrees of freedom; p not adjusted")
    table = pd.concat(values) if values else pd.DataFrame()
    title = f"Mixed model {rule} ~ method * setting + (1 | seed)"
    return Table(title, table, blocks, (*notes, *show.origin(grid)))


def newcomers(grid: Grid, paper: Paper, args: Namespace) -> Table:
    """Table 3: accuracy of clients that took no part in training."""
    rows = []
    for run in grid.table.to_dict("records"):
        tree = open_run(run["path"])
        if "new" in tree.children:
            mean = summary.new_clients(tree)
            ways = show.about(run["method"]).new_clients
            for rule in ways:
                name = run["method"] if len(ways) == 1 else f"{run['method']}, {rule}"
                rows.append(
                    {"label": run["label"], "seed": run["seed"], "method": name, "new": float(mean.sel(rule=rule))}
                )
    if not rows:
        raise ValueError("no run held clients out, so nothing is known of new clients: run with new_share > 0")
    table, reference = pd.DataFrame(rows), args.reference or "fedfac-dynamic, ensemble"
    values, notes = compared(table, grid, "new", reference)
    values["paper"] = [published(paper, "table3", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            line(r, "new clients", reference) | {"paper": number(r["paper"])} for r in part.to_dict("records")
        )
        for label, part in values.groupby("label")
    }
    said = (
        f"new clients: accuracy on their test samples, after the last round; {SE}", *together(grid, reference),
        *_ways(grid),
    )  # fmt: skip
    return Table("Table 3. Test accuracy of new clients", values, blocks, (*said, *notes, *source(grid, paper)))


def _ways(grid: Grid) -> list[str]:
    """How new clients of the methods predict that have one way for them."""
    found: dict[str, list[str]] = {}
    for method in ordered(grid.table["method"]):
        row = show.about(method)
        if len(row.new_clients) == 1:
            found.setdefault(row.new_clients[0], []).append(row.title)
    return [f"{', '.join(titles)}: {rule}" for rule, titles in found.items()]


def time(grid: Grid, paper: Paper, args: Namespace) -> Table:
    """Table 7: seconds per round relative to FedAvg: geometric means of the ratios within seeds."""
    reference = args.reference or "fedavg"
    values, notes = compared(grid.table.assign(log=np.log(grid.table["seconds"])), grid, "log", reference)
    values["ratio"], values["ratio_low"], values["ratio_high"] = (
        np.exp(values[name]) for name in ("pooled_difference", "pooled_low", "pooled_high")
    )
    values["seconds"] = np.exp(values["mean"])
    values["paper"] = [published(paper, "table7", r["label"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(label): pd.DataFrame(
            {
                "method": METHODS.get(r["method"], r["method"]),
                "seconds": number(r["seconds"], 3),
                "ratio [95 %]": "1" if r["method"] == reference else _ratio(r),
                "p": p_text(r["pooled_p"]),
                "paper": number(r["paper"]),
            }
            for r in rows.to_dict("records")
        )
        for label, rows in values.groupby("label")
    }
    name = METHODS.get(reference, reference)
    said = (
        "seconds: median of a run's rounds with all that belongs to them but evaluation, geometric mean over seeds",
        "FedFac static trains and analyses once before round 1, which is in no round and not counted",
        f"ratio: to {name} of the same seed; {TOGETHER}",
        "runs that shared a busy machine make these ratios noisy",
    )
    return Table(f"Table 7. Time relative to {name}", values, blocks, (*said, *notes, *source(grid, paper)))


def together(grid: Grid, reference: str) -> list[str]:
    """What differences, intervals and p-values mean, and what so few seeds can say at all."""
    name, _, way = reference.partition(", ")
    n = int(grid.table.groupby("label")["seed"].nunique().max())
    compared_with = METHODS.get(name, name) + (f", {way}" if way else "")
    return [
        f"difference: from {compared_with}, within seeds; {TOGETHER}",
        "in the CSV: paired t tests of each method on its own, p_holm adjusted, all_low and all_high Bonferroni's",
        *([f"the exact sign-flip p (in the CSV) cannot fall below {2.0 ** (1 - n):g} with {n} seeds"] if n > 1 else []),
    ]


def against_zero(data: pd.DataFrame, name: str, value: str) -> pd.DataFrame:
    """Mean of each name's values over labels and seeds against 0; adjusted over all names.

    Parameters
    ----------
    data : DataFrame
        Differences within seeds: ``label``, ``seed``, and the columns of their names and of their values.
    name, value : str
        Those columns.

    Returns
    -------
    DataFrame
        The name, and ``n``, ``difference`` and the rest of :func:`fedstat.stats.compare.paired`, one row per name.
    """
    zero = data[["label", "seed"]].drop_duplicates()
    zero[name], zero[value] = "zero", 0.0
    found = compare.paired(
        pd.concat([zero, data]), reference="zero", value=value, method=name, block=["label", "seed"]
    ).table.iloc[1:]
    # Zero does not vary, so that it has no variance in common with the differences.
    others = [c for c in found.columns if c.startswith("pooled")]
    return found.drop(columns=["mean", "std_error_mean", "n_values", *others]).rename(columns={"method": name})


def compared(table: pd.DataFrame, grid: Grid, value: str, reference: str) -> tuple[pd.DataFrame, list[str]]:
    """Comparison with the reference within seeds, for every setting; what could not be compared is said."""
    parts, notes = [], []
    for label in labels(grid):
        here = table[table["label"] == label]
        here = here.assign(place=here["method"].map({m: i for i, m in enumerate(_ordered(here["method"]))}))
        if not len(here):
            notes.append(f"{label}: nothing to show")
            continue
        found, said = _paired(here.sort_values(["place", "seed"]), value, reference)
        parts.append(found.assign(label=label))
        notes += [f"{label}: {note}" for note in said]
    values = pd.concat(parts, ignore_index=True)
    return values[["label", *values.columns.drop("label")]], notes


def with_pooled(
    values: pd.DataFrame, notes: list[str], rows: pd.DataFrame, value: str, reference: str
) -> tuple[pd.DataFrame, list[str]]:
    """Add the comparison over all settings, where there are several: a pair is then a setting and a seed."""
    if rows["label"].nunique() < 2 or reference not in set(rows["method"]):
        return values, notes
    place = rows["method"].map({m: i for i, m in enumerate(ordered(rows["method"]))})
    found = compare.paired(
        rows.assign(place=place).sort_values(["place", "label", "seed"]), reference=reference, value=value,
        block=["label", "seed"],
    )  # fmt: skip
    pooled = found.table.assign(label="all settings", std_error_mean=np.nan)  # settings differ more than seeds do
    return pd.concat([values, pooled], ignore_index=True), [*notes, *(f"all settings: {n}" for n in found.notes)]


def _paired(rows: pd.DataFrame, value: str, reference: str) -> tuple[pd.DataFrame, tuple[str, ...]]:
    if reference in set(rows["method"]):
        found = compare.paired(rows, reference=reference, value=value)
        return found.table, found.notes
    alone = compare.paired(rows, reference=str(rows["method"].iloc[0]), value=value).table
    alone[[c for c in alone.columns if c not in ("method", "n_values", "mean", "std_error_mean")]] = np.nan
    return alone, (f"{reference} was not run, so nothing is compared with it",)


def _ordered(names: pd.Series) -> list[str]:
    """Methods in the order of tables; a way to treat new clients stands with its method."""
    first = ordered(name.split(", ")[0] for name in names)
    return sorted(dict.fromkeys(names), key=lambda n: (first.index(n.split(", ")[0]), n))


def line(row: Mapping[Any, Any], heading: str, reference: str) -> dict[str, str]:
    """Shown line of a comparison: name, mean ± standard error, difference from the reference, p."""
    method, _, way = str(row["method"]).partition(", ")
    return {
        "method": METHODS.get(method, method) + (f", {way}" if way else ""),
        heading: plus_minus(row["mean"], row["std_error_mean"]),
        "difference [95 %]": "reference" if row["method"] == reference else from_all(row),
        "p": p_text(row["pooled_p"]),
    }


def from_all(row: Mapping[Any, Any]) -> str:
    """Difference of a comparison with the interval that holds for all of its table."""
    return claim(row["pooled_difference"], row["pooled_low"], row["pooled_high"], row["pooled_df"])


def claim(difference: float, low: float, high: float, df: float) -> str:
    """Difference with its interval, or in place of that the word that so few seeds allow none.

    Examples
    --------
    >>> claim(0.01, -0.02, 0.04, 6), claim(0.01, -6.1, 6.2, 1)
    ('+0.0100 [-0.0200, +0.0400]', '+0.0100 (too few seeds)')
    """
    if np.isfinite(difference) and df < pooled.LEAST_DF:
        return f"{interval(difference, np.nan, np.nan)} (too few seeds)"
    return interval(difference, low, high)


def _ratio(r: Mapping[Any, Any]) -> str:
    if np.isfinite(r["ratio"]) and r["pooled_df"] < pooled.LEAST_DF:
        return f"{number(r['ratio'], 3)} (too few seeds)"
    around = f" [{r['ratio_low']:.3f}, {r['ratio_high']:.3f}]" if np.isfinite(r["ratio_low"]) else ""
    return number(r["ratio"], 3) + around


def p_text(p: float) -> str:
    """Print a p-value."""
    return "–" if not np.isfinite(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def _settings(grid: Grid) -> list[str]:
    """What FedFac was run with, and where."""
    found: dict[str, list[str]] = {}
    for run in show.in_order(grid).to_dict("records"):
        if run["method"].startswith("fedfac"):
            found.setdefault(show.design(run, show.SETTINGS).partition(", ")[2], []).append(run["label"])
    return [f"FedFac with {what}: {'; '.join(dict.fromkeys(where))}" for what, where in found.items()]


def _not_run(grid: Grid, paper: Paper, name: str) -> list[str]:
    """Methods of the paper's table that a setting lacks, and settings of the paper that the grid lacks."""
    notes, theirs = [], paper.get(name, {})
    wanted = ordered(m for values in theirs.values() for m in values)
    for label in labels(grid):
        run = set(grid.table.loc[grid.table["label"] == label, "method"])
        if missing := [METHODS.get(m, m) for m in wanted if m not in run]:
            notes.append(f"{label}: not run: {', '.join(missing)}")
    ours = {show.plain(label) for label in labels(grid)}
    if absent := [label for label in theirs if show.plain(label) not in ours]:
        notes.append(f"the paper's settings that were not run: {'; '.join(absent)}")
    return notes


def source(grid: Grid, paper: Paper) -> list[str]:
    """Where the paper's values and the runs come from."""
    return [f"paper: reference values at the paper's own scale, {paper.get('source', '')}", *show.origin(grid)]
