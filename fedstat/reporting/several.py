"""Report of several runs, and the report of stores of any kind, written as one page."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import xarray as xr

from fedstat import store
from fedstat._utils.check import named_options
from fedstat._utils.loops import track
from fedstat.fl.ending import COMMAND as TRAINING
from fedstat.fl.metrics import TITLES
from fedstat.plot import client_boxplot, loss_curves, score_curves
from fedstat.reporting import document, prose, stored, studies, training
from fedstat.reporting import stored as stores
from fedstat.reporting.document import (
    PARAGRAPH,
    PRINTED,
    Block,
    Part,
    Report,
    Section,
    Table,
    listed,
    require_ours,
    shown,
)
from fedstat.reporting.stored import Run, Stored, damage_of, versions
from fedstat.results import ComparisonResult
from fedstat.results.base import Caution, wrapped
from fedstat.results.tables import megabytes, number, plus_minus
from fedstat.sim.experiment import COMMAND as SIMULATION
from fedstat.stats.ranking import LEAST_PAIRS
from fedstat.study import collect, compare_runs, experiment, outcomes, run_metrics, run_table, selection
from fedstat.study.collect import list_seeds, ordered, title_of
from fedstat.study.grid import variants

_REFERENCES = ("fedavg", "local")
_MOST_LABELS = 12  # settings that get figures of their own


def part(
    runs: Sequence[Stored],
    progress: bool | None = False,
    *,
    failed: Sequence[str] = (),
    tuned: Collection[str] = (),
) -> Part:
    """Report of several runs: what was run, and methods compared within seeds for every setting.

    ``failed`` names the failed and diverged runs of a grid, which may have no store. ``tuned`` names settings whose
    values do not tell methods apart, because each scenario has the value selected there.
    """
    usable = [run for run in runs if _usable(run)]
    for run in usable:
        if run.tree is not None:
            run.tree["metrics"].load()  # once: what follows reads them many times
    cautions = [Caution("Failed runs", "; ".join(failed), severe=True)] if failed else []
    cautions += _grouped(runs, progress)
    methods, cites = prose.of_training(runs)
    title = (
        f"{len(runs)} runs: {listed(dict.fromkeys(str(run.config.get('scenario') or '') for run in usable), most=3)}"
    )
    sections: list[Section] = []
    compared = None
    if usable:
        table = _table(usable, tuned)
        try:
            collect.same_scale([dict(run.config) for run in usable], list(table["scenario"]))
            compared = compare_runs(_by_method(usable, table), reference=_reference(table))
        except ValueError as error:
            cautions.append(Caution("Not compared", str(error), severe=True))
        else:
            cautions += compared.cautions()
            scenarios = list(compared.scenarios.items())[:_MOST_LABELS]
            with track(scenarios, "scenario", progress) as tracked:
                for scenario, comparison in tracked:
                    rows = table[table["scenario"] == scenario]
                    figures = _figures([usable[i] for i in rows.index], rows, comparison)
                    sections.append(Section(shown(scenario), figures))
        sections.append(_costs(table))
    return Part(
        shown(title), _ran(runs), cautions, shown("" if compared is None else compared.summary(), PRINTED), sections,
        shown(methods, PARAGRAPH), cites, [Table.pairs("Settings common to all runs", _common(runs)), *_versions(runs)],
    )  # fmt: skip


def _usable(run: Stored) -> bool:
    """Return True if a run can be compared: finished, undamaged, and of the trainer."""
    return run.tree is not None and run.finished and not run.damaged and "metrics" in run.tree.children


def _table(runs: Sequence[Stored], tuned: Collection[str] = ()) -> pd.DataFrame:
    """Return one row per run; variants of a method are named by their settings that were not tuned."""
    table = pd.DataFrame([run_table.row(run.tree) | {"path": run.name} for run in runs if run.tree is not None])
    with contextlib.suppress(TypeError):  # settings of another fedstat
        noted = [experiment.noted(run.attrs) for run in runs]
        if all("algorithm" in settings for settings in noted):
            named = variants([_variant(settings, tuned) for settings in noted])
            table["method"] = [run_table.well_formed(name) for name in named]
    if table.duplicated(["scenario", "method", "seed"]).any():
        again = table.groupby("path").cumcount()
        table["method"] += ", " + table["path"] + again.map(lambda n: f" ({n + 1})" if n else "")
    return table


def _variant(settings: dict[str, Any], tuned: Collection[str]) -> SimpleNamespace:
    """Return the algorithm of a run and its options that were not tuned."""
    options = tuple(option for option in settings.get("options", ()) if option.partition("=")[0] not in tuned)
    return SimpleNamespace(**settings | {"options": options})


def _by_method(runs: Sequence[Stored], table: pd.DataFrame) -> dict[str, list[xr.DataTree]]:
    """Group runs by the names of methods and their variants, in the order of tables."""
    of_method = {name: table.index[table["method"] == name] for name in ordered(table["method"])}
    return {name: [tree for i in rows if (tree := runs[i].tree) is not None] for name, rows in of_method.items()}


def _reference(table: pd.DataFrame) -> str:
    """Return FedAvg, else local training, else the first method in the order of tables."""
    names = ordered(table["method"])
    return next((name for name in _REFERENCES if name in names), names[0])


def _ran(runs: Sequence[Stored]) -> Table:
    """Tabulate runs by setting and method: seeds, and number of finished runs."""
    rows: dict[tuple[str, str], list[Stored]] = {}
    for run in runs:
        scenario = run.config.get("scenario") or run.config.get("data") or "run"
        rows.setdefault((str(scenario), str(run.config.get("algorithm", "not known"))), []).append(run)
    places = ordered(method for _, method in rows)
    in_order = sorted(rows.items(), key=lambda item: (item[0][0], places.index(item[0][1])))
    lines = [
        [shown(scenario), shown(title_of(method)), str(len(group)), str(sum(map(_usable, group))),
         shown(list_seeds(sorted({str(o.config.get("seed")) for o in group})))]
        for (scenario, method), group in in_order
    ]  # fmt: skip
    return Table("", ["setting", "method", "runs", "finished, undamaged", "seeds"], lines)


def _grouped(runs: Sequence[Stored], progress: bool | None) -> list[Caution]:
    """Warnings of all runs: each once, with the runs that it is about."""
    lines_by_title: dict[tuple[str, bool], list[tuple[str, str]]] = {}
    with track(runs, "run", progress) as tracked:
        for run in tracked:
            check = partial(training.of_run, run, training.rounds_done(run))
            checked, lost = run.attempt({"the other warnings": check})
            run_cautions = [*damage_of(run), *lost, *checked.get("the other warnings", []), *stores.cautions(run)]
            for caution in run_cautions:
                lines_by_title.setdefault((caution.title, caution.severe), []).append((run.name, caution.text))
    cautions = []
    for (title, severe), lines in lines_by_title.items():
        names = list(dict.fromkeys(name for name, _ in lines))
        example = Caution(title, f"{lines[0][0]}: {lines[0][1]}").sentence
        where = f"in {len(names)} of {len(runs)} runs: {listed(names, most=4)}. For example " if len(names) > 1 else ""
        out = " The rest of the report is without unfinished and damaged runs." if title in _LEFT_OUT else ""
        cautions.append(Caution(title, f"{where}{example}{out}", severe))
    return cautions


_LEFT_OUT = ("Not finished", "Damaged files")


def _figures(runs: Sequence[Stored], table: pd.DataFrame, comparison: ComparisonResult) -> list[Block]:
    """Learning curves, differences and clients of one setting."""
    methods = ordered(table["method"])
    trees = [(run.tree, row) for run, row in zip(runs, table.to_dict("records"), strict=True) if run.tree is not None]
    band = (
        "Thick lines: means over seeds. Thin lines: seeds. Bands: 95% t intervals of the means."
        if table.groupby("method")["seed"].nunique().min() >= LEAST_PAIRS
        else f"Lines: seeds. An interval needs at least {LEAST_PAIRS} seeds."
    )
    blocks: list[Block] = []
    score = run_metrics.score_of(trees[0][0])
    for name, axis, draw_curves in (
        (score.name, score.long_name, score_curves),
        ("train_loss", "training loss", loss_curves),
    ):
        parts = [
            run_table.curve(tree, name).assign(method=row["method"], seed=row["seed"])
            for tree, row in trees
            if name in tree["metrics"]
        ]
        if parts and len(curves := pd.concat(parts)):
            draw = partial(document.over_seeds, draw_curves, curves)
            caption = f"{axis[0].upper()}{axis[1:]} over rounds, mean over clients weighted by their samples. {band}"
            blocks.append(document.figure(draw, caption, size=(5.2, 3.6 + 0.1 * len(methods))))
    contrasts = comparison.tidy()
    if contrasts["sim_conf_low"].notna().any():
        differences = (
            f"Differences from {shown(title_of(comparison.reference))} within seeds, with simultaneous 95% CIs"
        )
        size = (5.2, 1.3 + 0.28 * len(contrasts))
        blocks.append(document.figure(comparison.plot, f"{differences} (Bonferroni).", size=size))
        columns = ["term", "n", "estimate", "sim_conf_low", "sim_conf_high", "p_holm"]
        blocks.append(Table.ends(f"{differences}, and Holm's p values", contrasts[columns], None))
    every = [run_table.clients(tree).assign(method=shown(row["method"])) for tree, row in trees]
    last = (
        f"mean over the last {run_table.WINDOW} rounds" if table["rounds"].min() >= run_table.WINDOW else "last round"
    )
    blocks.append(
        document.figure(
            partial(client_boxplot, pd.concat(every)),
            f"Test {score.title} of single clients, all seeds together ({last}). Boxes: quartiles; "
            "whiskers: to 1.5 times their distance; white: mean. They show the spread over clients, not an interval.",
        )
    )
    return blocks


def _costs(table: pd.DataFrame) -> Section:
    """Scores of clients, communication and metrics, mean over seeds."""
    scores = " or ".join(
        dict.fromkeys(run_metrics.title_of(str(name)).removeprefix("test ") for name in table["measure"])
    )
    metrics, rows = {name: title for name, title in TITLES.items() if name in table}, []
    for (scenario, method), group in table.groupby(["scenario", "method"], sort=False):
        rows.append(
            [shown(scenario), shown(title_of(str(method))), plus_minus(*group["final"].agg(["mean", "sem"])),
             number(group["spread"].mean(), 3), number(group["q10"].mean(), 3), number(group["before"].mean(), 4),
             megabytes(group["bytes_up"].mean()), megabytes(group["bytes_down"].mean()),
             number(group["seconds"].mean(), 2), *(number(group[name].mean(), 4) for name in metrics)]
        )  # fmt: skip
    tail = "90%" if scores == "RMSE" else "10%" if scores == "accuracy" else "10% (RMSE: 90%)"
    columns = ["setting", "method", "last evaluated round ± SE", "SD over clients", f"{tail} quantile of clients",
               "before aggregation", "up", "down", "s per round", *metrics.values()]  # fmt: skip
    caption = (
        f"{scores[0].upper()}{scores[1:]} and costs, means over seeds. SE: standard error over seeds. Before "
        "aggregation: models of selected clients after local training. Up, down: bytes uploaded and downloaded by all "
        "clients in all rounds."
    )
    return Section("Clients and communication", [Table(caption, columns, rows)])


def _common(runs: Sequence[Stored]) -> dict[str, str]:
    """Return the settings that all runs share, and the values of settings that differ."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    hidden = ("shapes", "data_digest", "algorithm_settings", "scenario")
    common = {}
    for name in names:
        values = list(dict.fromkeys(json.dumps(run.config.get(name)) for run in runs if run.config))
        if name in hidden or values == ["null"]:
            continue
        texts = [value.strip('"') for value in values if value != "null"]
        common[shown(name)] = texts[0] if len(values) == 1 else f"differs: {listed(texts, most=12)}"
    return {name: shown(value) for name, value in common.items()}


def _versions(runs: Sequence[Stored]) -> list[Table]:
    """Versions behind the runs, each once."""
    values_by_name: dict[str, set[str]] = {}
    for run in runs:
        origin = {k: v for k, v in stores.origin(run).items() if k != "time (UTC)"} | versions(run)
        for name, value in origin.items():
            values_by_name.setdefault(name, set()).add(value)
    return [Table.pairs("Versions", {name: listed(sorted(values), most=8) for name, values in values_by_name.items()})]


_PARTS: dict[str, Callable[[Stored], Part]] = {
    SIMULATION: studies.of_simulation,
    "fedstat.decompose": studies.of_decompose,
    **studies.PARTS,
}


@named_options()
def report(run: Run | Iterable[Run], out: str | Path | None = None, *, progress: bool | None = None) -> Report:
    """Report what was run, what it shows and with which uncertainty, on one self-contained page.

    Parameters
    ----------
    run : path, DataTree, or several
        A store that a fedstat command or function wrote, finished or not, sound or damaged; a folder of such stores, as
        a grid makes it (of a tuned one, its final runs alone); what :func:`fedstat.open_run` or
        :func:`fedstat.fl.train` returned; or a list of these. Several runs of the trainer are compared within seeds.
    out : path, optional
        Write the page to this HTML file, whole or not at all; a report that is there is replaced.
    progress : bool or None
        Show how many runs are read and reported; see :func:`fedstat.fl.train`.

    Returns
    -------
    Report
        Jupyter shows it; ``.html`` is the page, ``.save(path)`` writes it.

    Raises
    ------
    FileNotFoundError
        If there is no run at a path, or an opened run was deleted or moved since.
    ValueError
        If there is no run at all, ``out`` cannot be written, or it is not a report of fedstat.

    Notes
    -----
    Warnings stand first: rounds not done, damaged files, clients that diverged, factor analyses that have not
    converged, Heywood cases, constant units, few seeds. Statements come with their numbers; intervals say whether they
    are over seeds, clients or test samples. The page has no script and loads nothing; names and attributes of a store
    are shown as text.

    Examples
    --------
    >>> import fedstat
    >>> small = {"clients": 4, "d": 8, "m": 10, "n_train": 20, "rounds": 2, "threads": 1}
    >>> run = fedstat.sim.study(p=0.5, methods=["true", "fedavg"], **small)
    >>> page = report(run)
    >>> page.title, "<script" in page.html
    ('Simulation study on model (8)', False)
    """
    if out is not None:
        require_ours("out", Path(out))
    folders: list[selection.Final] = []
    stored_runs = stored.read_runs(run, progress, folders)
    trained = [stored_run for stored_run in stored_runs if stored_run.command == TRAINING]
    if len(trained) > 1:
        failed = outcomes.failed_runs(path for folder in folders for path in folder.paths)
        tuned = {name for folder in folders for name in folder.names}
        makes = [partial(part, trained, progress, failed=failed, tuned=tuned)]
    else:
        makes = [partial(training.part, stored_run) for stored_run in trained]
    makes += [
        partial(_PARTS.get(stored_run.command, studies.unknown), stored_run)
        for stored_run in stored_runs
        if stored_run.command != TRAINING
    ]
    with track(makes, "part", progress) as tracked:
        parts = [make() for make in tracked]
    parts[0] = _with_selection(parts[0], folders)
    page = Report(_title(parts), parts, store.now())
    if out is not None:
        page.save(out)
    return page


def _with_selection(first: Part, folders: Sequence[selection.Final]) -> Part:
    """Add to a part the selected settings of tuned folders, and what is left out of them."""
    selected = "\n".join(wrapped(sentence) for folder in folders for sentence in folder.words())
    cautions = [Caution("Left out", shown(sentence)) for folder in folders for sentence in folder.warnings()]
    summary = "\n\n".join(filter(None, [shown(selected, PRINTED), first.summary]))
    return replace(first, summary=summary, cautions=[*first.cautions, *cautions])


def _title(parts: Sequence[Part]) -> str:
    return parts[0].title if len(parts) == 1 else f"{parts[0].title} and {len(parts) - 1} more"
