"""Rank algorithms over data sets: ``python -m fedstat leaderboard --config own.toml --add own.py:mine``."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from fedstat import _cli, _grids
from fedstat._grids import GridOutcome
from fedstat._utils import check
from fedstat._utils.settings import read_toml
from fedstat.fl import custom
from fedstat.fl.job import device_named
from fedstat.results.base import TERMINAL
from fedstat.study import collect, federation, grid, leaderboard, leaderboard_tables
from fedstat.study.candidates import takes_of
from fedstat.study.leaderboard_tables import REFERENCES, Board
from fedstat.study.printed_tables import Table, require_writable
from fedstat.study.run_metrics import score_in
from fedstat.study.run_settings import Settings

_TABLES = ("ranks", "settings", "pairs")

_EXAMPLE = """
a small own.toml:
  clients = 10
  rounds = 10
  validation_fraction = 0.2   # selects learning rates, and the round of each run
  seeds = [0, 1, 2]
  [tune]
  lr = [0.03, 0.1, 0.3]
  [[dataset]]
  partition = "dirichlet:0.1"
  [[dataset]]
  partition = "iid"
  [[method]]
  sweep = { algorithm = ["fedavg", "fedavg+", "ditto"] }
"""


def parser() -> _cli.Parser:
    """Return the parser of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat leaderboard",
        usage="%(prog)s --config FILE.toml [--add FILE.py:NAME] [options]",
        description="Train the runs of a grid that are missing, all algorithms tuned alike, and print\n"
        "their ranks over data sets, accuracies, costs and paired differences.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLE.strip("\n"),
    )
    data = cli.add_argument_group("data")
    add = data.add_argument
    add("--config", type=Path, metavar="FILE.toml", help="file of a grid: data sets, methods, seeds, [tune]")
    add("--scale", metavar="NAME", help="use the settings in its table [scale.NAME]")
    add("--study", metavar="NAME", help="take only the runs of this study")
    _cli.add_data_dir(data)
    add = cli.add_argument_group("method").add_argument
    add("--add", action="append", default=[], metavar="FILE.py:NAME", help="algorithm to add; repeat it for several")
    add(
        "--reference",
        action="append",
        default=[],
        metavar="NAME",
        help=f"method to compare with (default {' and '.join(REFERENCES)}, else the grid's first); repeat it",
    )
    _grids.add_choices(add)
    _grids.add_compute(cli)
    output = _cli.add_output(
        cli,
        "folder of the runs (default runs/FILE or runs/FILE-SCALE)",
        metavar="FOLDER",
        plot="mean ranks with critical differences",
    )
    endings = ", ".join(f"NAME-{name}.csv and .md" for name in _TABLES)
    output.add_argument("--tables", type=Path, metavar="NAME", help=f"write {endings}")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv, hint=_resume_hint)


def _resume_hint(args: argparse.Namespace) -> str:
    return f"Finished runs are in {args.out}: repeat the command to continue." if args.out else "Nothing is written."


def _work(args: argparse.Namespace) -> int:
    if args.config is None:
        raise ValueError(
            "--config is missing, the file of a grid: its data sets, methods and seeds. --help shows a small one."
        )
    for name in _TABLES if args.tables is not None else ():
        require_writable(Path(f"{args.tables}-{name}"), "--tables")
    _grids.compute_options(args)
    device_named(args.device)
    args.out = args.out or _grids.folder(args)
    runs = grid.cells(args.config, scale=args.scale, study=args.study, add=args.add)
    names = name_methods(runs)
    _require_comparable(runs, args, names)
    references = _choose_references(args.reference, runs, names)
    tuning = grid.tuning(args.config, scale=args.scale) if read_toml(args.config).get("tune") else None
    args.tuned = tuning is not None
    trained = (_grids.make_runs if tuning is None else _grids.tune_runs)(args, runs, compare=False)
    finished, missing = _gather(trained, runs, names)
    scores, courses = leaderboard.measure(finished)
    how_tuned = _describe_tuning(tuning, runs, names)
    if trained.at_edge:
        how_tuned += (
            f". Larger or smaller values than the candidates may suit these better: {', '.join(trained.at_edge)}"
        )
    board = Board(finished, scores, courses, references, how_tuned, missing)
    tables = leaderboard_tables.tables(board)
    for name, table in tables.items() if args.tables is not None else ():
        table.write(Path(f"{args.tables}-{name}"))
    print("\n" + "\n\n\n".join(_without_repetition(tables.values())))
    if args.plot is not None:
        _draw(board, args.plot)
    return trained.status


def _without_repetition(tables: Iterable[Table]) -> Iterator[str]:
    """Yield the texts of tables, each note with the first table that has it."""
    notes: set[str] = set()
    for table in tables:
        yield table._replace(notes=tuple(note for note in table.notes if note not in notes)).text(TERMINAL)
        notes |= {*table.notes}


def _describe_tuning(tuning: grid.Tuning | None, runs: Sequence[Settings], names: Sequence[str]) -> str:
    tuned = set() if tuning is None else set(tuning.candidates)
    untuned = [name for run, name in zip(runs, names, strict=True) if tuned - {*takes_of(run.algorithm)}]
    return leaderboard_tables.describe_tuning(tuning, list(dict.fromkeys(untuned)))


def name_methods(runs: Sequence[Settings]) -> list[str]:
    """Name the method of every run as :func:`fedstat.study.grid.variants` does, a user's by its title, if it has one.

    Runs of one method and seed in a scenario are told apart by the settings in which they differ.
    """
    titles = _read_titles(runs)
    names = [
        titles[run.algorithm] + name.removeprefix(run.algorithm).removeprefix(custom.short(run.algorithm))
        if run.algorithm in titles
        else name
        for run, name in zip(runs, grid.variants(runs), strict=True)
    ]
    cells: dict[tuple[str, int, str], list[Settings]] = {}
    for run, name in zip(runs, names, strict=True):
        cells.setdefault((run.name, run.seed, name), []).append(run)
    differing: dict[str, list[str]] = {name: [] for name in names}
    for (_, _, name), alike in cells.items():
        differing[name] += [key for key in vars(alike[0]) if len({getattr(run, key) for run in alike}) > 1]
    return [
        ", ".join([name, *(f"{key}={getattr(run, key)}" for key in dict.fromkeys(differing[name]))])
        for run, name in zip(runs, names, strict=True)
    ]


def _read_titles(runs: Sequence[Settings]) -> dict[str, str]:
    """Return the titles of users' algorithms that have one which no other method of the runs or the package has."""
    by_algorithm = {run.algorithm: run for run in runs}
    titles = {
        name: run.make_algorithm().about.title if custom.is_in_file(name) else collect.title_of(name)
        for name, run in by_algorithm.items()
    }
    return {
        name: title
        for name, title in titles.items()
        if custom.is_in_file(name)
        and title
        and [*titles.values()].count(title) == 1
        and collect.about(title).title == title
        and title not in collect.METHODS.values()
    }


def _require_comparable(runs: Sequence[Settings], args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ValueError, before any training, if the runs cannot stand in the tables or the figure."""
    collect.same_scale(list(map(asdict, runs)), [run.name for run in runs], differ=collect.OF_METHOD)
    for run in runs:
        if not run.validation_fraction and not federation.has_validation(run):
            raise ValueError(
                f"{args.config} must set validation_fraction, because validation samples select the round of each run, "
                f"but {run.name} has no such samples. Set validation_fraction = 0.2, for example."
            )
    n, k = len({run.name for run in runs}), len(set(names))
    if args.plot is not None and (n < 2 or k < 3):
        raise ValueError(
            f"--plot draws mean ranks of at least 3 methods over 2 scenarios, but {args.config} has {k} and {n}. "
            "Add methods or data sets, or remove --plot."
        )


def _choose_references(references: Sequence[str], runs: Sequence[Settings], names: Sequence[str]) -> list[str]:
    """Return the names, in the tables, of the methods to compare with."""
    by_text = dict(zip(grid.variants(runs), names, strict=True)) | {name: name for name in names}
    if references:
        short = [custom.short(reference) for reference in references]
        return list(dict.fromkeys(by_text[check.choice("--reference", name, by_text)] for name in short))
    return [name for name in REFERENCES if name in names] or [names[0]]


def _gather(trained: GridOutcome, runs: Sequence[Settings], names: Sequence[str]) -> tuple[collect.Grid, list[str]]:
    """Return the finished runs, and a text on each run that is not compared."""
    outcomes = {outcome.settings: outcome for outcome in trained.outcomes}
    names_by_path: dict[str, str] = {}
    seeds: dict[str, list[int]] = {}
    for run, settings, name in zip(runs, trained.runs, names, strict=True):
        outcome = None if settings is None else outcomes[settings]
        if outcome is not None and outcome.is_compared:
            names_by_path[str(outcome.path)] = name
        else:
            reason = "all candidates failed" if outcome is None else outcome.state
            seeds.setdefault(f"{collect.title_of(name)} {reason} in {run.name}", []).append(run.seed)
    missing = [f"{text}, {collect.list_seeds(numbers)}" for text, numbers in seeds.items()]
    if not names_by_path:
        raise ValueError(f"no run of the grid can be compared: {'; '.join(missing)}. Lines above say why.")
    finished = collect.collect(names_by_path, differ=collect.OF_METHOD)
    return finished._replace(table=finished.table.assign(method=finished.table["path"].map(names_by_path))), missing


def _draw(board: Board, path: Path) -> None:
    """Draw mean ranks with critical differences."""
    import matplotlib.pyplot as plt

    from fedstat import plot
    from fedstat.plot._figure import caption

    wide, _, _ = leaderboard.ranked(board.scores)
    plot.critical_difference(wide, value=score_in(board.scores).title)
    figure = plt.gcf()
    bar = "a bar on the right spans methods without evidence of a difference (Nemenyi, all pairs at 95%)"
    caption(figure, f"large: mean rank; small: rank in each scenario; {bar}", *board.origin)
    _cli.save_figure(figure, path, dpi=110)
    plt.close(figure)
