"""Command line: ``python -m fedstat.fl --data mnist --net cnn --algorithm fedfac-dynamic``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from fedstat import _cli, _grids, store
from fedstat._utils.check import distinct
from fedstat._utils.lazy import xr
from fedstat._utils.settings import add_arguments, read_arguments
from fedstat.fl import algorithms, custom, logs, ranks
from fedstat.fl.ending import COMMAND
from fedstat.study import experiment, federation, grid, outcomes, report
from fedstat.study.run_settings import Settings, named, require_free_names


def parser(more: Iterable[str] = ()) -> _cli.Parser:
    """Return the command-line parser, with the settings of all algorithms and of the users' algorithms in ``more``."""
    cli = _cli.Parser(
        prog="python -m fedstat.fl",
        description="Train a federated network on a data set or, with --config, make all runs of a grid. Print test "
        "accuracy (or RMSE) over clients, communication, and the split of units.",
        usage="%(prog)s [--data NAME] [--algorithm NAME] [other options, listed by --help]",
    )
    groups = add_arguments(cli, Settings)
    _cli.add_data_dir(groups["data"])
    algorithm_options = cli.add_argument_group("settings of single algorithms")
    for name, (text, is_many) in flags(more).items():
        option, nargs = f"--{name.replace('_', '-')}", "+" if is_many else None
        algorithm_options.add_argument(option, dest=name, nargs=nargs, metavar="VALUE", help=text)
    add = cli.add_argument_group("many runs").add_argument
    add("--config", type=Path, metavar="FILE.toml", help="file of a grid of runs, such as simulations/fedfac.toml")
    add("--scale", metavar="NAME", help="with --config: use the settings in its table [scale.NAME]")
    add("--study", metavar="NAME", help="with --config: make only the runs of this study")
    add(
        "--tune",
        action="store_true",
        help="with --config: tune the settings in its table [tune] on validation samples, one setting after the other, "
        "or together by a search",
    )
    add(
        "--tuned",
        action="store_true",
        help="with --config: as --tune, then make the runs of the grid with the tuned values and compare them",
    )
    add(
        "--dry-run",
        action="store_true",
        help="with --config: train nothing; count the runs to make, and estimate their time, memory and disk from a "
        "short trial of each kind",
    )
    add("--seconds", type=float, metavar="S", help="with --dry-run: longest time of a trial (default 30)")
    _grids.add_choices(add, "with --config: ")
    _grids.add_compute(cli)
    _cli.add_output(
        cli,
        "store to write, or folder for a grid (default runs/fl-<time>.zarr)",
        resume="continue the run at --out, if there is one, with its settings or more --rounds; grids always continue",
    )
    cli.add_argument_group("logs").add_argument(
        "--log",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"log the metrics of every round, beside the store: {', '.join(logs.LOGS)} (all but csv need a package: "
        "pip install 'fedstat[NAME]')",
    )
    return cli


def flags(more: Iterable[str] = ()) -> dict[str, tuple[str, bool]]:
    """Return the settings of single algorithms: a help text that names the algorithms, and True for several values."""
    algorithms_by_text: dict[str, dict[str, list[str]]] = {}
    is_many = {}
    for algorithm in (*named(), *more):
        for name, declared in algorithms.settings_of(algorithm).items():
            if declared.of_method:
                text = declared.help + (f" (default {declared.default})" if declared.default is not None else "")
                by_text = algorithms_by_text.setdefault(name, {})
                by_text.setdefault(text, []).append(custom.short(algorithm))
                is_many[name] = declared.several
    texts = {
        name: "; ".join(f"{', '.join(takers)}: {text}" for text, takers in by_text.items())
        for name, by_text in algorithms_by_text.items()
    }
    return {name: (text.replace("%", "%%"), is_many[name]) for name, text in texts.items()}


def read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the run and of its algorithm that the user passed on the command line."""
    names = flags([args.algorithm] if custom.is_in_file(args.algorithm) else [])
    settings = {name: getattr(args, name, None) for name in names}
    for name, value in settings.items():
        if isinstance(value, list):
            distinct(name, value)
    return read_arguments(args, Settings) | {name: value for name, value in settings.items() if value is not None}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    try:
        users_algorithms = _find_own_algorithms(sys.argv[1:] if argv is None else argv)
    except ValueError as error:  # before its options, which the parser does not know
        return _cli.run(parser(), partial(_refuse, error), [])
    return _cli.run(parser(users_algorithms), _work, argv, hint=_resume_hint)


def _refuse(error: ValueError, _: argparse.Namespace) -> None:
    raise error


def _find_own_algorithms(argv: Sequence[str]) -> list[str]:
    """Return the user's algorithm in the arguments, whose settings become options; [] if there is none."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--algorithm", nargs="?")
    name = early.parse_known_args(argv)[0].algorithm
    if not custom.is_in_file(name):
        return []
    require_free_names(name)
    return [name]


def _work(args: argparse.Namespace) -> int | None:
    with ranks.launched(args.device) as (rank, args.device, threads), ExitStack() as stack:
        args.threads = threads if args.threads is None else args.threads
        if rank:  # rank 0 prints for all
            args.quiet = True
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            return (_run_grid if args.config else _run_single)(args)
        except (ValueError, OSError) as error:
            if rank and not isinstance(error, ConnectionError):
                raise SystemExit(2) from None
            raise


def _resume_hint(args: argparse.Namespace) -> str:
    if args.config:
        return f"Finished runs are in {args.out}: repeat the command to continue."
    return _cli.resume_hint(args)


_OF_GRIDS = ("scale", "study", "tune", "tuned", "repeat", "accept", "retry", "jobs", "dask", "dry_run", "seconds")


def _run_single(args: argparse.Namespace) -> None:
    for option in _OF_GRIDS:
        if getattr(args, option) not in (None, False):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} needs --config, the file of a grid. Add --config, or remove {name}.")
    options = _grids.compute_options(args)
    _cli.fill_out(args, "fl")
    args.out = ranks.same(args.out)  # the default names the time, which differs between ranks
    _cli.require_available(args, COMMAND)
    stored = experiment.settings_of(args.out) if args.resume and args.out.exists() else {}
    if stored:
        passed = read_arguments(args, Settings)
        experiment.require_files(args.out, stored | passed)
        if not read_settings(args) and outcomes.is_finished(args.out):  # nothing to do, and no file to execute
            _print_run(store.open_run(args.out), args.out)
            return
    settings = Settings(**stored).but(**read_settings(args))
    experiment.federated(settings, args.data_dir)  # cached for the run
    federation.forget_files()
    run = experiment.run(settings, out=args.out, resume=args.resume, progress=not args.quiet, **options)
    _print_run(run, args.out)


def _print_run(run: xr.DataTree, path: Path) -> None:
    print(report.report(run))
    print(f"Saved: fedstat.open_run({str(path)!r})")


def _run_grid(args: argparse.Namespace) -> int | None:
    if names := sorted(read_settings(args)):
        option = names[0].replace("_", "-")
        raise ValueError(f"--{option} belongs in {args.config}: a grid takes its settings from the file")
    if args.seconds is not None and not args.dry_run:
        raise ValueError("--seconds needs --dry-run, whose trials it limits. Add --dry-run, or remove --seconds.")
    args.out = args.out or _grids.folder(args)
    runs = grid.cells(args.config, scale=args.scale, study=args.study)
    if args.dry_run:
        return _grids.estimate_costs(args, runs)
    if args.tune or args.tuned:
        return _grids.tune_runs(args, runs).status
    return _grids.make_runs(args, runs).status


if __name__ == "__main__":
    sys.exit(main())
