"""Command lines of tables: runs and published values -> tables, written and printed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedstat import _cli
from fedstat.study import collect, reference, summary
from fedstat.study.accuracy import accuracy, of_study
from fedstat.study.collect import Grid
from fedstat.study.reference import Reference
from fedstat.study.summary import Table, make, require_writable


class Asked(NamedTuple):
    """What a table needs besides its runs: published values and, optionally, a rule and a reference method."""

    paper: Reference
    rule: str | None = None
    reference: str | None = None


Build = Callable[[Grid, Asked], Table]


def command(
    file: str,
    description: str | None,
    builds: Mapping[str, Build],
    *,
    runs: str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Exit status of a command that builds tables.

    Parameters
    ----------
    file : str
        The script. Its folder holds the published values, ``reference.toml``, and names the grid.
    description : str
        Its first line is shown.
    builds : mapping from suffix to callable (Grid, Asked) -> Table
        The suffix is added to the names of a table's files.
    runs : str, optional
        Default of ``--runs``; the quick grid named as the folder.
    argv : sequence of str, optional
    """
    here = Path(file).parent
    runs = runs or str(Path("runs", f"{here.name}-quick"))
    cli = _cli.Parser(description=(description or "").partition("\n")[0])
    cli.add_argument("--runs", type=Path, default=Path(runs), help=f"folder of the grid's stores (default {runs})")
    cli.add_argument("--out", type=Path, help="name without extension: writes NAME.csv and NAME.md")
    cli.add_argument(
        "--paper", type=Path, default=here / "reference.toml", help="the paper's values (default: its own)"
    )
    add_rule(cli)
    cli.add_argument("--reference", help="method that the others are compared with")
    cli.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="only runs with this, such as tau=0.5",
    )
    return _cli.run(cli, lambda args: _work(args, builds), argv)


def study_of(file: str, description: str, *, reference: str, argv: Sequence[str] | None = None) -> int:
    """Exit status of a command that tabulates the accuracies of one study.

    Parameters
    ----------
    file : str
        The script, named as the study: ``analysis/NAME/tableN.py`` is of the study ``tableN`` of the grid
        ``simulations/NAME.toml``.
    description : str
        Its first line is "<paper> <title>: ...", and heads the table.
    reference : str
        Method or variant that the others are compared with.
    argv : sequence of str, optional
    """
    script = Path(file).resolve()
    grid_file = script.parents[2] / "simulations" / f"{script.parent.name}.toml"
    title = description.partition("\n")[0]

    def build(grid: Grid, asked: Asked) -> Table:
        found, against = of_study(grid, grid_file, script.stem), asked.reference or reference
        return accuracy(found, asked.paper, name=script.stem, title=title, reference=against, rule=asked.rule)

    return command(file, description, {"": build}, argv=argv)


def add_rule(cli: argparse.ArgumentParser) -> None:
    """Add the option ``--rule``, for :func:`fedstat.study.summary.choose`, to a command that compares accuracies."""
    cli.add_argument(
        "--rule", choices=summary.RULES, help="rounds to judge by (default best10; final if a run has fewer than 10)"
    )


def _work(args: argparse.Namespace, builds: Mapping[str, Build]) -> None:
    for suffix in builds if args.out is not None else ():
        require_writable(Path(f"{args.out}{suffix}"))
    asked = Asked(reference.read(args.paper), args.rule, args.reference)
    grid = collect.select(collect.collect(args.runs), args.select)
    print(make({suffix: partial(build, grid, asked) for suffix, build in builds.items()}, args.out))
