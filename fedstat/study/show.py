"""How a table of runs is shown, written, and told where it comes from."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fedstat import _check, _cli
from fedstat._settings import read_toml
from fedstat.fl import algorithms
from fedstat.fl.algorithm import About
from fedstat.study import rules, summary
from fedstat.study.summary import Grid

WIDTH = 100

METHODS = {name: algorithms.about(name).title for name in algorithms.ALGORITHMS}
"""Names of the methods as tables and figures show them, in their order."""

SETTINGS = {"layers": "Λ", "kappa": "κ", "tau": "τ", "estimator": "estimator"}
"""Settings of the methods that split layers, as tables show them, in their order."""


class Table(NamedTuple):
    """A table of runs.

    Attributes
    ----------
    title : str
    values : DataFrame
        All numbers, one row per line of the table.
    blocks : mapping from heading to DataFrame of str
        What is shown.
    notes : tuple of str
        What the columns mean, what was not run, where the numbers come from.
    """

    title: str
    values: pd.DataFrame
    blocks: Mapping[str, pd.DataFrame]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Table for a terminal."""
        parts = [self.title]
        parts += [f"{heading}\n{_aligned(block)}" for heading, block in self.blocks.items()]
        notes = [textwrap.fill(note, WIDTH, subsequent_indent="  ") for note in self.notes]
        return "\n\n".join([*parts, "\n".join(notes)])

    def write(self, name: Path) -> None:
        """Write ``name.csv``, all numbers, and ``name.md``, what is shown."""
        require_writable(name)
        name.parent.mkdir(parents=True, exist_ok=True)
        with _cli.whole(Path(f"{name}.csv")) as csv, _cli.whole(Path(f"{name}.md")) as markdown:
            self.values.to_csv(csv, index=False, float_format="%.6g")
            markdown.write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """Table as Markdown."""
        parts = [f"## {self.title}"]
        parts += [f"### {heading}\n\n{_pipes(block)}" for heading, block in self.blocks.items()]
        return "\n\n".join([*parts, "\n".join(f"- {note}" for note in self.notes)]) + "\n"


def require_writable(name: Path) -> None:
    """ValueError, before any work, if a table of that name could not be written; its folder may be absent."""
    for file in (Path(f"{name}.csv"), Path(f"{name}.md")):
        if not file.parent.exists():
            file = next(parent for parent in file.absolute().parents if parent.parent.exists())
        _cli.require_file("--out", file)


Build = Callable[[Grid, dict[str, Any], argparse.Namespace], Table]


def command(
    description: str | None,
    builds: Mapping[str, Build],
    *,
    runs: str = "runs/fedfac-quick",
    argv: Sequence[str] | None = None,
) -> int:
    """Command line of tables: reads a grid, builds them, writes them if asked, prints them, and returns its status.

    Parameters
    ----------
    description : str
    builds : mapping from suffix to callable (Grid, paper's values, arguments) -> Table
        The suffix is added to the name of the files. A table whose runs are not there is said to be missing; the
        command fails if all are.
    runs : str
        Default folder.
    argv : sequence of str, optional
        Arguments, those of the process by default.
    """
    cli = _cli.Parser(description=(description or "").partition("\n")[0])
    cli.add_argument("--runs", type=Path, default=Path(runs), help=f"folder of the grid's stores (default {runs})")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME.csv and NAME.md")
    cli.add_argument("--paper", type=Path, default=Path("analysis/paper_fedfac.toml"), help="the paper's values")
    add_rule(cli)
    cli.add_argument("--reference", help="method that the others are compared with")
    cli.add_argument(
        "--select", action="append", default=[], metavar="KEY=VALUE", help="only runs with this, such as tau=0.5"
    )
    return _cli.run(cli, lambda args: _work(args, builds), argv)


def add_rule(cli: argparse.ArgumentParser) -> None:
    """Give a command that compares accuracies the option on which rounds count; :func:`rules.choose` reads it."""
    cli.add_argument(
        "--rule", choices=rules.RULES, help="rounds to judge by (default best10; final if a run has fewer than 10)"
    )


def _work(args: argparse.Namespace, builds: Mapping[str, Build]) -> None:
    for suffix in builds if args.out is not None else ():
        require_writable(Path(f"{args.out}{suffix}"))
    paper = read_toml(args.paper)
    grid = select(summary.collect(args.runs), args.select)
    made, missing = {}, []
    for suffix, build in builds.items():
        try:
            made[suffix] = build(grid, paper, args)
        except ValueError as error:
            missing.append(f"not made: {error}")
    if not made:
        raise ValueError("; ".join(missing))
    for suffix, table in made.items() if args.out is not None else ():
        table.write(Path(f"{args.out}{suffix}"))
    print("\n\n\n".join([*(table.text() for table in made.values()), *missing]))  # noqa: T201


def select(grid: Grid, conditions: Iterable[str]) -> Grid:
    """Keep the runs of a grid that fulfil conditions such as "tau=0.5"; runs that lack the setting stay.

    Raises
    ------
    ValueError
        If there is no such column, or no finished run is left.
    """
    table = grid.table
    for condition in conditions if len(table) else ():
        key, _, value = condition.partition("=")
        column = table[_check.choice("the key of a selection", key, [str(c) for c in table.columns])]
        empty = column.isna() | (column.astype(str) == "")
        table = table[empty | column.map(lambda x, value=value: _same(x, value))]
    if not len(table):
        raise ValueError(
            f"no finished run is left, but got {len(grid.table)} finished ({len(grid.unfinished)} unfinished) before "
            f"{list(conditions)} were asked for"
        )
    return grid._replace(table=table.reset_index(drop=True))


def ordered(names: Iterable[str]) -> list[str]:
    """Methods in the order of ``METHODS``, others after them.

    Examples
    --------
    >>> ordered(["mine", "fedper", "fedavg"])
    ['fedavg', 'fedper', 'mine']
    """
    places = list(METHODS)
    return sorted(dict.fromkeys(names), key=lambda n: (places.index(n) if n in places else len(places), n))


def in_order(grid: Grid) -> pd.DataFrame:
    """Runs of a grid in the order of tables: by label, method, ``SETTINGS`` and seed."""
    methods = ordered(grid.table["method"])

    def key(run: Mapping[Any, Any]) -> tuple[Any, ...]:
        config = grid.configs.get(run["label"], {})
        settings = [summary.place(name, run[name], config) for name in SETTINGS]
        return run["label"], methods.index(run["method"]), *settings, run["seed"]

    keys = [key(run) for run in grid.table.to_dict("records")]
    return grid.table.iloc[sorted(range(len(keys)), key=keys.__getitem__)]


def varying(table: pd.DataFrame) -> list[str]:
    """Those of ``SETTINGS`` that a method was run with several values of, under one label."""
    several = table.groupby(["label", "method"])[list(SETTINGS)].nunique(dropna=False).max() > 1
    return [name for name in SETTINGS if several[name]]


def design(run: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Method of a run, with its values of the settings that are named.

    Examples
    --------
    >>> run = {"method": "random", "layers": "fc1", "kappa": math.nan, "tau": 0.5}
    >>> design(run, ["layers", "kappa", "tau"])
    'random split, Λ = fc1, τ = 0.5'
    """
    values = {SETTINGS[name]: setting(run[name]) for name in names}
    return ", ".join([about(run["method"]).title, *(f"{k} = {v}" for k, v in values.items() if v != "–")])


def about(method: str) -> About:
    """Row of a method; of one that is not known here, its name.

    Examples
    --------
    >>> about("fedper+").title, about("mine").title
    ('FedPer+', 'mine')
    """
    try:
        return algorithms.about(method)
    except ValueError:
        return About(method)


def setting(value: Any) -> str:
    """Print one of ``SETTINGS``; a dash where the method has none, or its own default."""
    return "–" if value == "" or pd.isna(value) else f"{value:g}" if isinstance(value, float) else str(value)


def labels(grid: Grid) -> list[str]:
    """Settings of a grid, sorted."""
    return sorted(dict.fromkeys(grid.table["label"]))


def published(paper: Mapping[str, Any], table: str, label: str) -> dict[str, float]:
    """The paper's values for a setting, {} if it has none; spaces, hyphens and case of the label do not matter.

    Examples
    --------
    >>> published({"table2": {"CIFAR-10, π = 0.1": {"fedavg": 0.8033}}}, "table2", "cifar10 π=0.1")
    {'fedavg': 0.8033}
    """
    found = {plain(name): values for name, values in paper.get(table, {}).items()}
    return dict(found.get(plain(label), {}))


def origin(grid: Grid) -> list[str]:
    """Scale of each setting, seeds, commits, and what has not ended: notes for a table or a caption."""
    notes = []
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        notes.append(f"{label}: {scale(grid.configs[label])}; seeds {', '.join(map(str, seeds))}")
    # A run that other code went on with names both.
    made = grid.table.assign(**{name: grid.table[name].str.split(", ") for name in ("code", "revision")})
    made = made.explode("code")
    of_package = made.assign(code=made["code"].str.partition("+")[0]).groupby("label")["code"].nunique()
    of_method = made.groupby(["label", "method"])["code"].nunique().groupby("label").max()  # with a user's own code
    versions = of_package.where(of_package >= of_method, of_method)
    if (versions > 1).any():
        mixed = "; ".join(f"{label} by {n}" for label, n in versions[versions > 1].items())
        notes.append(f"runs of one setting were made by several versions of the code: {mixed}")
    if few := rules.few(grid.table):
        notes.append(
            f"fewer than {rules.WINDOW} rounds, so that all that averages the last {rules.WINDOW} is of the last one, "
            f"and best10, last10 and optimism are left out: {few}"
        )
    commits = sorted({r for names in made["revision"] for r in names if r})
    notes.append(f"commit {', '.join(commits)}" if commits else "commit not known")
    if grid.unfinished:
        notes.append(f"not finished and left out: {', '.join(Path(p).name for p in grid.unfinished)}")
    return notes


def caption(grid: Grid, width: int = 150) -> list[str]:
    """Lines of :func:`origin`, settings of one scale in one line, to be set under a figure."""
    names: dict[str, list[str]] = {}
    for label in labels(grid):
        seeds = sorted(grid.table.loc[grid.table["label"] == label, "seed"].unique().tolist())
        what = scale({k: v for k, v in grid.configs[label].items() if k != "partition"})
        names.setdefault(f"{what}; seeds {', '.join(map(str, seeds))}", []).append(label)
    lines = [f"{' | '.join(own)}: {what}" for what, own in names.items()]
    return [part for line in (*lines, *origin(grid)[len(labels(grid)) :]) for part in textwrap.wrap(line, width)]


def scale(config: Mapping[str, Any]) -> str:
    """Size of a run in a line.

    Examples
    --------
    >>> scale({"clients": 20, "net": "lenet", "width": 0.5, "rounds": 30, "evaluate_every": 5, "local_epochs": 1})
    '20 clients, net lenet × 0.5, 30 rounds, evaluated every 5, local epochs 1'
    """
    width = f" × {config['width']:g}" if config.get("width") not in (None, 1) else ""
    norm = f" with {config['norm']} norm" if config.get("norm") else ""
    every = f", evaluated every {config['evaluate_every']}" if config.get("evaluate_every", 1) > 1 else ""
    parts = {
        "partition": "{}", "clients": "{} clients", "samples": "at most {} samples each",
        "net": "net {}" + width + norm, "rounds": "{} rounds" + every, "participation": "participation {}",
        "local_epochs": "local epochs {}", "batch_size": "batch {}", "optimizer": "{}", "lr": "lr {}",
    }  # fmt: skip
    return ", ".join(form.format(config[key]) for key, form in parts.items() if config.get(key) is not None)


def plus_minus(mean: float, error: float, digits: int = 4) -> str:
    """Mean ± standard error; the mean alone where there is no error.

    Examples
    --------
    >>> plus_minus(0.5, 0.0123, 3), plus_minus(0.5, math.nan), plus_minus(math.nan, math.nan)
    ('0.500 ± 0.012', '0.5000', '–')
    """
    text = number(mean, digits)
    return f"{text} ± {error:.{digits}f}" if math.isfinite(error) and math.isfinite(mean) else text


def interval(middle: float, low: float, high: float, digits: int = 4) -> str:
    """Signed estimate with its interval.

    Examples
    --------
    >>> interval(0.01, -0.02, 0.04), interval(0.01, math.nan, math.nan)
    ('+0.0100 [-0.0200, +0.0400]', '+0.0100')
    """
    if not math.isfinite(middle):
        return "–"
    around = f" [{low:+.{digits}f}, {high:+.{digits}f}]" if math.isfinite(low) else ""
    return f"{middle:+.{digits}f}{around}"


def number(x: float | None, digits: int = 4) -> str:
    """Print a number, or a dash where there is none."""
    return "–" if x is None or not math.isfinite(x) else f"{x:.{digits}f}"


def _same(x: Any, value: str) -> bool:
    try:
        return float(x) == float(value)
    except (TypeError, ValueError):
        return str(x) == value


def plain(label: str) -> str:
    """Label without what is a matter of style."""
    return re.sub(r"[\s\-_,]", "", label).lower()


def _aligned(block: pd.DataFrame) -> str:
    """Columns as wide as their widest cell, the first one to the left."""
    cells = [list(map(str, block.columns)), *block.astype(str).to_numpy().tolist()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _pipes(block: pd.DataFrame) -> str:
    rule = ["---", *["---:"] * (block.shape[1] - 1)]
    cells = [list(map(str, block.columns)), rule, *block.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)
