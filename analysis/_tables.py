"""Tables of papers: runs beside published values, compared within seeds, and the command that makes them.

Published values stand in TOML, see :func:`read_reference`: ``source``, in words; for every setting of every published
table a table ``[NAME."SETTING"]`` from method to value, or to a list of value and standard deviation; ``percent`` lists
the tables that are in percent.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _output import make

from fedstat import _cli
from fedstat._utils.lazy import pd
from fedstat._utils.settings import read_toml, table
from fedstat.attack.experiment import leakage
from fedstat.results.leakage import MARGIN, LeakageResult
from fedstat.results.tables import interval, number, p_value
from fedstat.stats.ranking import LEAST_PAIRS
from fedstat.study import collect, run_table
from fedstat.study.collect import METHODS, Grid, ordered, origin, scenarios, title_of
from fedstat.study.grid import of_study
from fedstat.study.printed_tables import Table, require_writable
from fedstat.study.within_seeds import (
    OVERALL,
    SE,
    TOGETHER,
    add_overall,
    compare_settings,
    difference_notes,
    table_line,
)


class Reference(NamedTuple):
    """Published values.

    Attributes
    ----------
    tables : mapping from table to setting to method to float
        Means; those in percent are divided by 100.
    source : str
        Who published them, and where.
    """

    tables: Mapping[str, Mapping[str, Mapping[str, float]]] = {}
    source: str = ""

    def of(self, table: str, scenario: str) -> dict[str, float]:
        """Values of a setting, {} if there are none; scenarios match regardless of spaces, hyphens, commas and case.

        Examples
        --------
        >>> Reference({"table1": {"CIFAR-10, π = 0.1": {"fedavg": 0.25}}}).of("table1", "cifar10 π=0.1")
        {'fedavg': 0.25}
        """
        found = {plain(name): values for name, values in self.tables.get(table, {}).items()}
        return dict(found.get(plain(scenario), {}))

    def notes(self, grid: Grid) -> list[str]:
        """Where the published values and the runs come from."""
        return [f"paper: reference values at the paper's own scale, {self.source}", *origin(grid)]

    def not_run(self, grid: Grid, table: str) -> list[str]:
        """Methods and settings of a published table that were not run."""
        notes, theirs = [], self.tables.get(table, {})
        wanted = ordered(m for values in theirs.values() for m in values)
        for scenario in scenarios(grid):
            run = set(grid.table.loc[grid.table["scenario"] == scenario, "method"])
            if missing := [METHODS.get(m, m) for m in wanted if m not in run]:
                notes.append(f"{scenario}: not run: {', '.join(missing)}")
        ours = {plain(scenario) for scenario in scenarios(grid)}
        if absent := [scenario for scenario in theirs if plain(scenario) not in ours]:
            notes.append(f"the paper's settings that were not run: {'; '.join(absent)}")
        return notes


def read_reference(path: str | Path) -> Reference:
    """Read published values from a file.

    Raises
    ------
    ValueError
        If it cannot be read, or a value is not a number.
    """
    found = read_toml(Path(path))
    source, percent = str(found.pop("source", "")), found.pop("percent", [])
    tables: dict[str, dict[str, dict[str, float]]] = {}
    for name in found:
        settings, size = table(found, name, path), 100 if name in percent else 1
        tables[name] = {}
        for scenario in settings:
            where = f"{path}, [{name}], {scenario!r:.200}"
            values = table(settings, scenario, f"{path}, [{name}]")
            tables[name][scenario] = {method: _mean(x, f"{where}, {method}") / size for method, x in values.items()}
    return Reference(tables, source)


def _mean(value: Any, where: str) -> float:
    mean = value[0] if isinstance(value, list) and value else value
    if isinstance(mean, bool) or not isinstance(mean, int | float):
        raise ValueError(f"{where} must be a number or a list of mean and standard deviation, but got {value!r:.200}")
    return mean


def plain(scenario: str) -> str:
    """Label in lower case, without spaces, hyphens, underscores and commas."""
    return re.sub(r"[\s\-_,]", "", scenario).lower()


def accuracy(
    grid: Grid,
    paper: Reference,
    *,
    name: str,
    title: str,
    reference: str,
    rule: str | None = None,
    said: Iterable[str] = (),
) -> Table:
    """Test accuracy of all methods, compared by one rule, with the other rules beside it.

    Parameters
    ----------
    grid : Grid
        Of runs, or of the variants in a study (:func:`of_study`).
    paper : Reference
    name : str
        The published table.
    title : str
    reference : str
        Method, or variant, that the others are compared with.
    rule : str, optional
        See :func:`fedstat.study.run_table.choose`.
    said : iterable of str
        Further notes.
    """
    rule = run_table.choose(grid.table, rule)
    values, notes = compare_settings(grid.table, grid, rule, reference)
    values, notes = add_overall(values, notes, grid.table, rule, reference)
    others = grid.table.groupby(["scenario", "method"])[[*run_table.RULES, "optimism", "before"]].mean()
    values = values.join(others, on=["scenario", "method"])
    values["paper"] = [paper.of(name, r["scenario"]).get(r["method"]) for r in values.to_dict("records")]
    beside = [other for other in run_table.RULES if other not in (rule, "final")]  # final is in the CSV
    blocks = {
        str(scenario): pd.DataFrame(
            table_line(r, rule, reference)
            | {more: number(r[more]) for more in (*beside, "optimism", "before", "paper")}
            for r in rows.to_dict("records")
        )
        for scenario, rows in values.groupby("scenario", sort=False)
    }
    meaning = (
        f"{rule}: {run_table.words(rule, grid.table)}; {SE}", *difference_notes(grid, reference), OVERALL,
        *(f"{other}: {run_table.words(other, grid.table)}" for other in beside),
        "optimism: best10 less the test accuracy of the 10 rounds that are best on validation data",
        "before: active clients' models as they leave local training, last 10 rounds",
    )  # fmt: skip
    return Table(title, values, blocks, (*meaning, *notes, *said, *paper.not_run(grid, name), *paper.notes(grid)))


def timing(grid: Grid, paper: Reference, *, name: str, title: str, reference: str, said: Iterable[str] = ()) -> Table:
    """Seconds of a round relative to the reference method: geometric means of the ratios within seeds.

    Parameters are those of :func:`accuracy`.
    """
    values, notes = compare_settings(grid.table.assign(log=np.log(grid.table["seconds"])), grid, "log", reference)
    values["ratio"], values["ratio_low"], values["ratio_high"] = (
        np.exp(values[column]) for column in ("difference", "sim_conf_low", "sim_conf_high")
    )
    values["seconds"] = np.exp(values["mean"])
    values["paper"] = [paper.of(name, r["scenario"]).get(r["method"]) for r in values.to_dict("records")]
    blocks = {
        str(scenario): pd.DataFrame(
            {
                "method": title_of(r["method"]),
                "seconds": number(r["seconds"], 3),
                "ratio [95 %]": "1" if r["method"] == reference else _ratio(r),
                "p": p_value(r["p_holm"]),
                "n": str(int(r["n"]) or ""),
                "paper": number(r["paper"]),
            }
            for r in rows.to_dict("records")
        )
        for scenario, rows in values.groupby("scenario")
    }
    meaning = (
        "seconds: median of a run's rounds, without evaluation; geometric mean over seeds", *said,
        f"ratio: to {title_of(reference)} of the same seed; {TOGETHER}",
        "runs that shared a busy machine make these ratios noisy",
    )  # fmt: skip
    return Table(title, values, blocks, (*meaning, *notes, *paper.notes(grid)))


def _ratio(r: Mapping[Any, Any]) -> str:
    if np.isfinite(r["ratio"]) and r["n"] < LEAST_PAIRS:
        return f"{number(r['ratio'], 3)} (too few seeds)"
    around = f" [{r['ratio_low']:.3f}, {r['ratio_high']:.3f}]" if np.isfinite(r["ratio_low"]) else ""
    return number(r["ratio"], 3) + around


def leakage_table(result: LeakageResult, paper: Reference, *, name: str, title: str) -> Table:
    """PSNR of the images recovered from each method, over all rounds.

    Parameters
    ----------
    result : LeakageResult
        Of one run per method.
    paper : Reference
    name : str
        The published table.
    title : str
    """
    values = result.augment()
    places = ordered(values["run"])
    values = values.assign(method=values["run"]).sort_values(
        ["labels", "run"], key=lambda x: x.map(places.index) if x.name == "run" else x, ignore_index=True
    )
    published = next(iter(paper.tables.get(name, {}).values()), {})
    values["paper"] = values["method"].map(published)
    rounds = ", ".join(map(str, result.data["round"].values))
    equal = "clients" if result.data.sizes["client"] > 1 else ""
    many = f"{result.data.sizes['client']} clients × {result.data.sizes['image']} images, by rounds done: {rounds}"
    blocks = {
        f"labels {mode}; {many}": pd.DataFrame(
            {
                "method": title_of(str(x["method"])),
                "PSNR, dB [95 %]": interval(x["estimate"], x["conf_low"], x["conf_high"], 2, sign=False, equal=equal),
                "max": number(x["maximum"], 2),
                "class mean": number(x["class_mean_psnr"], 2),
                "vs class mean [95 %]": interval(x["gain"], x["gain_low"], x["gain_high"], 2, equal=equal),
                "better": f"{100 * x['share_better']:.0f} %",
                "conclusion": x["conclusion"],
                "by the paper's definition": number(x["estimate_paper"], 2),
                "paper": number(x["paper"], 2),
            }
            for x in rows.to_dict("records")
        )
        for mode, rows in values.groupby("labels", sort=False)
    }
    said = (
        "PSNR: of images on [0, 1], squared errors averaged over channels too; by the paper's definition added up",
        "[95 %]: Student's, over clients' means, the clients of one run (one seed)",
        "class mean: PSNR of the class-mean image, which needs no gradients but the class, known or inferred",
        "better: proportion of images nearer than the class-mean image",
        "recovered: intervals of both differences, from the class mean and from other clients' images, lie above 0",
        f"partial: only the second does; class only: it lies below {MARGIN:g} dB; else inconclusive",
        f"paper: reference values at the paper's own scale, {paper.source}",
    )
    return Table(title, values, blocks, said)


class Asked(NamedTuple):
    """What a table needs besides its runs: published values and, optionally, a rule and a reference method."""

    paper: Reference
    rule: str | None = None
    reference: str | None = None


Build = Callable[[Grid, Asked], Table]
SIMULATIONS = Path(__file__).resolve().parents[1] / "simulations"


class Row(NamedTuple):
    """A table of a paper, as one command makes it.

    Attributes
    ----------
    title : str
    builds : mapping from suffix to callable (Grid, Asked) -> Table
        The suffix is added to the names of the table's files.
    runs : str
        Name of the grid in ``simulations/``, whose quick runs are the default; that of the paper if empty.
    """

    title: str
    builds: Mapping[str, Build]
    runs: str = ""


def of_accuracy(paper: str, study: str, title: str, *, reference: str) -> Row:
    """Row that tabulates the accuracies of one study of the grid ``simulations/PAPER.toml``.

    Parameters
    ----------
    paper, study : str
    title : str
    reference : str
        Method or variant that the others are compared with.
    """

    def build(grid: Grid, asked: Asked) -> Table:
        found = of_study(grid, SIMULATIONS / f"{paper}.toml", study)
        against = asked.reference or reference
        return accuracy(found, asked.paper, name=study, title=title, reference=against, rule=asked.rule)

    return Row(title, {"": build})


def of_leakage(paper: str, study: str, title: str) -> Row:
    """Row that attacks the runs of one study, those of the first seed.

    Runs are trained again, from the data in the folder FEDSTAT_DATA.
    """

    def build(grid: Grid, asked: Asked) -> Table:
        found = of_study(grid, SIMULATIONS / f"{paper}.toml", study).table
        result = leakage(found.loc[found["seed"] == found["seed"].min(), "path"].tolist())
        return leakage_table(result, asked.paper, name=study, title=title)

    return Row(title, {"": build})


def of_timing(title: str, *, name: str, reference: str, said: Iterable[str] = ()) -> Row:
    """Row that tabulates seconds of a round, see :func:`timing`; the papers' are minutes of their own machines."""

    def build(grid: Grid, asked: Asked) -> Table:
        against = asked.reference or reference
        return timing(grid, asked.paper, name=name, title=title, reference=against, said=said)

    return Row(title, {"": build})


def command(paper: str, row: Row, argv: Sequence[str], prog: str) -> int:
    """Make a row's tables from the command line; return the exit status."""
    runs, published = Path("runs", f"{row.runs or paper}-quick"), Path(__file__).parent / paper / "reference.toml"
    cli = _cli.Parser(prog=prog, description=row.title)
    cli.add_argument("--runs", type=Path, default=runs, help=f"folder of the grid's stores (default {runs})")
    cli.add_argument("--out", type=Path, help="name without extension: writes NAME.csv and NAME.md")
    cli.add_argument("--paper", type=Path, default=published, help="the paper's values (default: its own)")
    add_rule(cli)
    cli.add_argument("--reference", help="method that the others are compared with")
    cli.add_argument(
        "--select", action="append", default=[], metavar="KEY=VALUE", help="only runs with this, such as tau=0.5"
    )
    return _cli.run(cli, lambda args: _work(args, row.builds), argv)


def add_rule(cli: argparse.ArgumentParser) -> None:
    """Add the option ``--rule``, for :func:`fedstat.study.run_table.choose`, to a command that compares accuracies."""
    cli.add_argument(
        "--rule", choices=run_table.RULES, help="rounds to judge by (default best10; final if a run has fewer than 10)"
    )


def _work(args: argparse.Namespace, builds: Mapping[str, Build]) -> None:
    for suffix in builds if args.out is not None else ():
        require_writable(Path(f"{args.out}{suffix}"))
    asked = Asked(read_reference(args.paper), args.rule, args.reference)
    grid = collect.select(collect.collect(args.runs), args.select)
    print(make({suffix: partial(build, grid, asked) for suffix, build in builds.items()}, args.out))
