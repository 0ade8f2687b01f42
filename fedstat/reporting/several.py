"""Report of several runs, and the report of stores of any kind, written as one page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedstat import store
from fedstat.fl.training import COMMAND as TRAINING
from fedstat.plot import accuracy_curves, loss_curves
from fedstat.plot import clients as draw_clients
from fedstat.plot._figure import literal
from fedstat.reporting import document, prose, split, stored, studies, training
from fedstat.reporting import stored as stores
from fedstat.reporting.document import (
    PARAGRAPH,
    Block,
    Part,
    Report,
    Section,
    Table,
    Text,
    listed,
    require_ours,
    shown,
)
from fedstat.reporting.stored import Run, Stored, damage_of, versions
from fedstat.results.base import Caution
from fedstat.results.ranks import difference
from fedstat.results.tables import megabytes, number, plus_minus
from fedstat.sim.experiment import COMMAND as SIMULATION
from fedstat.stats.compare import LEAST_PAIRS
from fedstat.study import collect, compare, experiment, summary
from fedstat.study.collect import Grid, ordered, title_of
from fedstat.study.grid import variants

_REFERENCES = ("fedavg", "local")
_FEW_SEEDS = 5
_MOST_LABELS = 12  # settings that get figures of their own


def part(runs: Sequence[Stored]) -> Part:
    """Report of several runs: what was run, and methods compared within seeds for every setting."""
    whole = [one for one in runs if _usable(one)]
    for one in whole:
        if one.tree is not None:
            one.tree["metrics"].load()  # once: what follows reads them many times
    cautions = _grouped(runs)
    methods, cites = prose.of_training(runs)
    title = f"{len(runs)} runs: {listed(dict.fromkeys(str(one.config.get('label') or '') for one in whole), most=3)}"
    sections: list[Section] = []
    said: list[str] = []
    if whole:
        grid = _grid(whole)
        rule = summary.choose(grid.table)
        cautions += _of_seeds(grid.table)
        sections.append(_costs(grid))
        try:
            collect.same_scale([dict(one.config) for one in whole], list(grid.table["label"]))
        except ValueError as error:
            cautions.append(Caution("Not compared", str(error), grave=True))
        else:
            reference = _reference(grid.table)
            values, notes = compare.compared(grid.table, grid, rule, reference)
            values, notes = compare.with_all_settings(values, notes, grid.table, rule, reference)
            said = _findings(values, reference)
            sections = [
                *_by_label(whole, grid, values, rule, reference),
                _meaning(grid, rule, reference, notes),
                *sections,
            ]
    tables = [Table.pairs("Settings common to all runs", _common(runs)), *_versions(runs)]
    return Part(shown(title), _ran(runs), cautions, "\n".join(said), sections, shown(methods, PARAGRAPH), cites, tables)


def _usable(one: Stored) -> bool:
    """Whether a run can stand in a comparison: finished, sound, and of the trainer."""
    return one.tree is not None and one.finished and not one.damaged and "metrics" in one.tree.children


def _grid(runs: Sequence[Stored]) -> Grid:
    """Rows of the runs, with variants of a method told apart by their settings."""
    table = pd.DataFrame([summary.row(one.tree) | {"path": one.name} for one in runs if one.tree is not None])
    with contextlib.suppress(ValueError, TypeError):  # settings of another fedstat, or of a user's method
        noted = [experiment.noted(one.attrs) for one in runs]
        if all("algorithm" in one for one in noted):
            table["method"] = variants([experiment.Settings(**one) for one in noted])
    if table.duplicated(["label", "method", "seed"]).any():
        again = table.groupby("path").cumcount()
        table["method"] += ", " + table["path"] + again.map(lambda n: f" ({n + 1})" if n else "")
    firsts = table.drop_duplicates("label")
    configs = {label: dict(runs[i].config) for i, label in zip(firsts.index, firsts["label"], strict=True)}
    return Grid(table, (), configs)


def _reference(table: pd.DataFrame) -> str:
    """FedAvg, else local training, else the first method in the order of tables."""
    names = ordered(table["method"])
    return next((name for name in _REFERENCES if name in names), names[0])


def _ran(runs: Sequence[Stored]) -> Table:
    """Runs by setting and method: seeds, and how many are finished."""
    rows: dict[tuple[str, str], list[Stored]] = {}
    for one in runs:
        label = one.config.get("label") or one.config.get("data") or "run"
        rows.setdefault((str(label), str(one.config.get("algorithm", "not known"))), []).append(one)
    places = ordered(method for _, method in rows)
    in_order = sorted(rows.items(), key=lambda item: (item[0][0], places.index(item[0][1])))
    lines = [
        [shown(label), shown(title_of(method)), listed(sorted({str(o.config.get("seed")) for o in own}), most=12),
         str(len(own)), str(sum(map(_usable, own)))]
        for (label, method), own in in_order
    ]  # fmt: skip
    return Table("", ["setting", "method", "seeds", "runs", "finished and sound"], lines)


def _grouped(runs: Sequence[Stored]) -> list[Caution]:
    """Warnings of all runs: each once, with the runs that it is about."""
    found: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    for one in runs:
        check = partial(training.of_run, one, training.rounds_done(one))
        checked, lost = one.attempt({"the other warnings": check})
        own = [*damage_of(one), *lost, *checked.get("the other warnings", []), *stores.cautions(one)]
        for caution in own:
            found.setdefault((caution.title, caution.grave), []).append((one.name, caution.text))
    made = []
    for (title, grave), lines in found.items():
        names = list(dict.fromkeys(name for name, _ in lines))
        text = f"in {len(names)} of {len(runs)} runs: {listed(names, most=4)}. For example {lines[0][0]}: {lines[0][1]}"
        out = " Unfinished and damaged runs are left out of all that follows." if title in _LEFT_OUT else ""
        made.append(Caution(title, f"{text}.{out}", grave))
    return made


_LEFT_OUT = ("Not finished", "Damaged files")


def _of_seeds(table: pd.DataFrame) -> list[Caution]:
    n = table.groupby("label")["seed"].nunique()
    if n.max() == 1:
        text = "every method was run with one seed: differences between methods have no interval, and may be chance"
        return [Caution("One seed", text)]
    if n.min() < _FEW_SEEDS:
        text = (
            f"{n.min()} in the setting with fewest: intervals rest on few degrees of freedom, and on the normal "
            "distribution of differences"
        )
        return [Caution("Few seeds", text)]
    return []


def _findings(values: pd.DataFrame, reference: str) -> list[str]:
    """For every setting, which methods are told apart from the reference."""
    said = []
    for label, rows in values.groupby("label", sort=False):
        others = rows[rows["method"] != reference]
        known = others.dropna(subset="sim_conf_low")
        name = shown(title_of(reference))
        if not len(others):
            continue
        if not len(known):
            if others["difference"].notna().any():
                best = others.iloc[int(np.nanargmax(others["difference"].to_numpy()))]
                few = not (others["n"] >= LEAST_PAIRS).any()
                why = "too few seeds to tell methods apart" if few else "differences are equal in all seeds"
                said.append(
                    f"{shown(label)}: {why}. Largest difference from {name}: "
                    f"{shown(title_of(str(best['method'])))}, {best['difference']:+.4f}, without an interval."
                )
            continue
        groups = {
            "above": known[known["sim_conf_low"] > 0],
            "below": known[known["sim_conf_high"] < 0],
            "not told apart from": known[(known["sim_conf_low"] <= 0) & (known["sim_conf_high"] >= 0)],
        }
        text = "; ".join(
            f"{word} {name}: {listed((_claim(row, bare='not' in word) for row in own.to_dict('records')), most=8)}"
            for word, own in groups.items()
            if len(own)
        )
        said.append(f"{shown(label)}: {text} (simultaneous 95 % intervals, {_pairs(rows, label)}).")
    return said


def _pairs(rows: pd.DataFrame, label: object) -> str:
    return f"{int(rows['n_values'].max())} {'settings and seeds' if label == 'all settings' else 'seeds'}"


def _claim(row: Mapping[Any, Any], *, bare: bool) -> str:
    """A method with its difference; those that are not told apart have theirs in the table."""
    title = title_of(str(row["method"]))
    return title if bare else f"{title} {difference(row)}"


def _by_label(runs: Sequence[Stored], grid: Grid, values: pd.DataFrame, rule: str, reference: str) -> list[Section]:
    made = []
    labels = [str(label) for label in values["label"].unique()]
    for number_, label in enumerate(labels):
        rows = values[values["label"] == label]
        columns = [compare.table_line(row, rule, reference) for row in rows.to_dict("records")]
        blocks: list[Block] = [Table.of(f"Test accuracy ({summary.words(rule, grid.table)})", pd.DataFrame(columns))]
        if label != "all settings" and number_ < _MOST_LABELS:
            blocks += _figures(
                [runs[i] for i in grid.table.index[grid.table["label"] == label]], grid, rows, label, reference
            )
        made.append(Section(shown(label), blocks))
    return made


def _figures(runs: Sequence[Stored], grid: Grid, rows: pd.DataFrame, label: str, reference: str) -> list[Block]:
    """Learning curves, differences and clients of one setting."""
    table = grid.table[grid.table["label"] == label]
    methods = ordered(table["method"])
    seeds = int(table.groupby("method")["seed"].nunique().min())
    band = (
        "Thick lines: means over seeds; thin ones: the seeds; bands: 95 % intervals of the means (Student's t)."
        if seeds >= document.FEW else "One line for each seed: too few for an interval."
    )  # fmt: skip
    blocks: list[Block] = []
    for name, axis, draw_curves in (
        ("accuracy", "test accuracy", accuracy_curves),
        ("train_loss", "training loss", loss_curves),
    ):
        parts = [
            summary.curve(one.tree, name).assign(method=method, seed=seed)
            for one, method, seed in zip(runs, table["method"], table["seed"], strict=True)
            if one.tree is not None and name in one.tree["metrics"]
        ]
        if parts and len(curves := pd.concat(parts)):
            draw = partial(document.over_seeds, draw_curves, curves)
            caption = f"{axis.capitalize()} over rounds, mean over clients weighted by their samples. {band}"
            blocks.append(document.figure(draw, caption, size=(5.2, 3.6 + 0.1 * len(methods))))
    found = rows[(rows["method"] != reference) & rows["sim_conf_low"].notna()]
    if len(found):
        data = found.rename(columns={"sim_conf_low": "low", "sim_conf_high": "high"})
        data = data[["method", "difference", "low", "high"]].iloc[::-1]
        blocks.append(
            document.figure(
                partial(document.forest, data, f"difference of test accuracy from {literal(title_of(reference))}"),
                f"Differences from {shown(title_of(reference))} within seeds, with simultaneous 95 % intervals "
                f"(Bonferroni).",
                size=(5.2, 1.3 + 0.28 * len(data)),
            )
        )
    every = [
        summary.clients(one.tree).assign(method=shown(method))
        for one, method in zip(runs, table["method"], strict=True)
        if one.tree is not None
    ]
    last = f"mean over the last {summary.WINDOW} rounds" if table["rounds"].min() >= summary.WINDOW else "last round"
    blocks.append(
        document.figure(
            partial(draw_clients, pd.concat(every)),
            f"Test accuracy of single clients, all seeds together ({last}). Boxes: quartiles; "
            "whiskers: to 1.5 times their distance; white: mean. This is spread over clients, not "
            "certainty.",
        )
    )
    return blocks


def _meaning(grid: Grid, rule: str, reference: str, notes: Sequence[str]) -> Section:
    """What the columns mean."""
    said = [f"{rule}: {summary.words(rule, grid.table)}", compare.SE, *compare.together(grid, reference)[:1]]
    said += [compare.OVERALL] if grid.table["label"].nunique() > 1 else []
    return Section("What the tables mean", [Text(f"{shown(text)}.") for text in [*said, *notes]])


def _costs(grid: Grid) -> Section:
    """Accuracy of clients and communication, mean over seeds."""
    rows = []
    for (label, method), own in grid.table.groupby(["label", "method"], sort=False):
        rows.append(
            [shown(label), shown(title_of(str(method))), plus_minus(*own["final"].agg(["mean", "sem"])),
             number(own["spread"].mean(), 3), number(own["q10"].mean(), 3), number(own["before"].mean(), 4),
             megabytes(own["bytes_up"].mean()), megabytes(own["bytes_down"].mean()), number(own["seconds"].mean(), 2)]
        )  # fmt: skip
    columns = ["setting", "method", "last evaluated round ± se", "spread over clients", "10 % of clients below",
               "before aggregation", "up", "down", "s a round"]  # fmt: skip
    caption = (
        "Means over seeds; se: standard error over seeds. Spread: standard deviation over clients. Before aggregation: "
        "active clients' models as they leave local training. Up, down: bytes of all clients over all rounds."
    )
    return Section("Clients and communication", [Table(caption, columns, rows)])


def _common(runs: Sequence[Stored]) -> dict[str, str]:
    """Settings that all runs share, and the values of those that differ."""
    names = dict.fromkeys(name for one in runs for name in one.config)
    hidden = ("shapes", "data_digest", "algorithm_settings", "label")
    found = {}
    for name in names:
        values = list(dict.fromkeys(json.dumps(one.config.get(name)) for one in runs if one.config))
        if name in hidden or values == ["null"]:
            continue
        texts = [value.strip('"') for value in values if value != "null"]
        found[shown(name)] = texts[0] if len(values) == 1 else f"differs: {listed(texts, most=12)}"
    return {name: shown(value) for name, value in found.items()}


def _versions(runs: Sequence[Stored]) -> list[Table]:
    """Versions behind the runs, each once."""
    seen: dict[str, set[str]] = {}
    for one in runs:
        made = {k: v for k, v in stores.made(one).items() if k != "time (UTC)"} | versions(one)
        for name, value in made.items():
            seen.setdefault(name, set()).add(value)
    return [Table.pairs("Versions", {name: listed(sorted(values), most=8) for name, values in seen.items()})]


_PARTS: dict[str, Callable[[Stored], Part]] = {
    SIMULATION: studies.part,
    "fedstat.decompose": split.part,
    **studies.PARTS,
}


def report(run: Run | Iterable[Run], out: str | Path | None = None) -> Report:
    """What was run, what was found and how sure that is, on one page that needs nothing else.

    Parameters
    ----------
    run : path, DataTree, or several
        A store that a fedstat command or function wrote, finished or not, sound or damaged; a folder of such stores, as
        a grid makes it; what :func:`fedstat.open_run` or :func:`fedstat.fl.train` returned; or a list of these. Several
        runs of the trainer are compared within seeds.
    out : path, optional
        Write the page to this HTML file, whole or not at all; a report that is there is replaced.

    Returns
    -------
    Report
        Jupyter shows it; ``.html`` is the page, ``.save(path)`` writes it.

    Raises
    ------
    FileNotFoundError
        If there is no run at a path.
    ValueError
        If there is no run at all, ``out`` cannot be written, or it is not a report of fedstat.

    Notes
    -----
    Warnings stand first: rounds not done, damaged files, clients that diverged, factor analyses that have not
    converged, Heywood cases, dead units, few seeds. Statements come with their numbers; intervals say whether they are
    over seeds, clients or test samples. The page has no script and loads nothing; names and attributes of a store are
    shown as text.

    Examples
    --------
    >>> import fedstat
    >>> small = {"clients": 4, "d": 8, "m": 10, "n_train": 20, "rounds": 2, "threads": 1}
    >>> run = fedstat.sim.study(p=0.5, methods=["true", "fedavg"], **small)
    >>> made = report(run)
    >>> made.title, "<script" in made.html
    ('Simulation study on model (8)', False)
    """
    if out is not None:
        require_ours("out", Path(out))
    found = stored.read(run)
    trained = [one for one in found if one.command == TRAINING]
    parts = [part(trained)] if len(trained) > 1 else [training.part(one) for one in trained]
    parts += [_PARTS.get(one.command, studies.unknown)(one) for one in found if one.command != TRAINING]
    made = Report(_title(parts), parts, store.now())
    if out is not None:
        made.save(out)
    return made


def _title(parts: Sequence[Part]) -> str:
    return parts[0].title if len(parts) == 1 else f"{parts[0].title} and {len(parts) - 1} more"
