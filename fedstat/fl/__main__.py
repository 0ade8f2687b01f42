"""Command line: ``python -m fedstat.fl --data mnist --net cnn --algorithm fedfac-dynamic``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedstat import _cli, store
from fedstat._utils.check import distinct, in_bytes
from fedstat._utils.lazy import xr
from fedstat._utils.loops import say
from fedstat._utils.settings import add_arguments, read_arguments
from fedstat.fl import algorithms, custom, ranks
from fedstat.fl.training import COMMAND
from fedstat.results.tables import count
from fedstat.study import experiment, federation, grid, report, run_metrics
from fedstat.study.collect import list_seeds
from fedstat.study.compare import compare_runs
from fedstat.study.run_settings import Settings, named, require_free_names
from fedstat.study.tuning import first_runs, tunable_runs, tune, tuning_groups, with_selected


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
        help="with --config: tune the settings in its table [tune] on validation samples, one setting after the other",
    )
    add(
        "--tuned",
        action="store_true",
        help="with --config: as --tune, then make the runs of the grid with the tuned values",
    )
    add(
        "--repeat",
        action="store_true",
        help="with --config: repeat runs made by other code, or with another content of the data file",
    )
    add_compute(cli)
    _cli.add_output(
        cli,
        "store to write, or folder for a grid (default runs/fl-<time>.zarr)",
        resume="continue the run at --out, if there is one, with its settings or more --rounds; grids always continue",
    )
    return cli


def add_compute(cli: argparse.ArgumentParser) -> None:
    """Add the compute options of runs, and ``--dask``, to a command that makes the runs of a grid."""
    compute = _cli.add_compute(cli)
    compute.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="memory budget, such as 2GiB: beyond it, client rows are kept on disk, in the store",
    )
    _cli.add_dask(compute, "run of --config")


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


def _work(args: argparse.Namespace) -> None:
    with ranks.launched(args.device) as (rank, args.device, threads), ExitStack() as stack:
        args.threads = threads if args.threads is None else args.threads
        if rank:  # rank 0 prints for all
            args.quiet = True
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            (_run_grid if args.config else _run_single)(args)
        except (ValueError, OSError) as error:
            if rank and not isinstance(error, ConnectionError):
                raise SystemExit(2) from None
            raise


def _resume_hint(args: argparse.Namespace) -> str:
    if args.config:
        return f"Finished runs are in {args.out}: repeat the command to continue."
    return _cli.resume_hint(args)


def compute_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked options of :func:`add_compute`, and the folder of the data."""
    if args.memory_budget is not None:
        in_bytes("--memory-budget", args.memory_budget)
    return {"data_dir": args.data_dir, "memory_budget": args.memory_budget} | _cli.compute(args)


def _run_single(args: argparse.Namespace) -> None:
    for option in ("scale", "study", "tune", "tuned", "repeat", "dask"):
        if getattr(args, option) not in (None, False):
            raise ValueError(f"--{option} needs --config, the file of a grid. Add --config, or remove --{option}.")
    options = compute_options(args)
    _cli.fill_out(args, "fl")
    args.out = ranks.same(args.out)  # the default names the time, which differs between ranks
    _cli.require_available(args, COMMAND)
    stored = experiment.settings_of(args.out) if args.resume and args.out.exists() else {}
    if stored:
        passed = read_arguments(args, Settings)
        experiment.require_files(args.out, stored | passed)
        if not read_settings(args) and grid.is_finished(args.out):  # nothing to do, and no file to execute
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


def _run_grid(args: argparse.Namespace) -> None:
    if names := sorted(read_settings(args)):
        option = names[0].replace("_", "-")
        raise ValueError(f"--{option} belongs in {args.config}: a grid takes its settings from the file")
    args.out = args.out or grid_folder(args)
    runs = grid.cells(args.config, scale=args.scale, study=args.study)
    if args.tune or args.tuned:
        _tune(args, runs)
        return
    options = compute_options(args)
    with _cli.executor(args) as executor:
        _make_runs(args, runs, {"progress": not args.quiet, "executor": executor, **options})


def grid_folder(args: argparse.Namespace) -> Path:
    """Return the folder of a grid's runs if the user names none."""
    return Path("runs") / (args.config.stem + (f"-{args.scale}" if args.scale else ""))


def train_final(args: argparse.Namespace, runs: list[Settings]) -> list[Settings | None]:
    """Train the runs of a grid that are missing, with ``args.tuned`` after tuning; skip runs that diverge.

    Returns
    -------
    list of Settings or None
        Each run with its tuned values; None if all candidates of its algorithm diverged.
    """
    if args.tuned:
        return _tune(args, runs)
    options = compute_options(args)
    with _cli.executor(args) as executor:
        _make_final_runs(args, runs, {"progress": not args.quiet, "executor": executor, **options})
    return [*runs]


def _train_runs(
    args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]
) -> Iterator[tuple[Settings, Path, bool]]:
    """Train the runs of a grid, print a line for each new run, and yield all as :func:`grid.run_all`."""
    start_time = time.monotonic()
    for number, (settings, path, is_new) in enumerate(grid.run_all(runs, args.out, repeat=args.repeat, **options), 1):
        if is_new and not args.quiet:
            minutes = (time.monotonic() - start_time) / 60
            say(f"[{number}/{len(runs)}, {minutes:.1f} min] {settings.name}, {custom.short(settings.algorithm)}, "
                f"seed {settings.seed}: {report.line(store.open_run(path))}")  # fmt: skip
        yield settings, path, is_new


def _make_runs(args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]) -> None:
    n_new, n_outdated, paths = 0, 0, []
    for settings, path, is_new in _train_runs(args, runs, options):
        n_new += is_new
        paths.append(path)
        n_outdated += not (is_new or grid.by_this_code(settings, path))
    print(f"{count(len(runs), 'run')} in {args.out}, {n_new} new")
    if n_outdated:
        runs_made = f"{count(n_outdated, 'run')} made by other code"
        print(f"{runs_made} (of fedstat, of an algorithm or of a network): --repeat repeats them")
    try:
        print(f"\n{compare_runs(paths)}")
        print(f"\nIn Python: fedstat.study.compare_runs({str(args.out)!r}, reference=..., rule=...)")
    except ValueError as error:
        print(f"\nNo comparison: {error}")


def _tune(args: argparse.Namespace, runs: list[Settings]) -> list[Settings | None]:
    """Tune, print the steps, and make the final runs with ``args.tuned``; return as :func:`train_final`."""
    candidates, seeds, together = grid.tuning(args.config, scale=args.scale)
    tunable = tunable_runs(runs, candidates)
    groups = tuning_groups(tunable, together=together)
    seeds = seeds or list(dict.fromkeys(run.seed for run in tunable))
    compute = compute_options(args)
    selected: dict[tuple[str, str], Settings | None] = {}
    scores = []
    with _cli.executor(args) as executor:
        options = {"progress": not args.quiet, "executor": executor, **compute}
        if executor is not None:
            with suppress(FloatingPointError):  # a candidate that diverges is not selected
                deque(_train_runs(args, first_runs(groups.values(), candidates, seeds), options), maxlen=0)
        for (scenario, algorithm), initial in groups.items():
            try:
                for step in tune(initial, candidates, args.out, seeds=seeds, **options):
                    heading = f"{scenario}, {algorithm}: {step.name}, {list_seeds(seeds)}"
                    is_error = run_metrics.score_in(step.table).is_error
                    shown = step.table if is_error else step.table.round(4)
                    text = shown.to_string(index=False, float_format="{:.4g}".format if is_error else None)
                    print(f"{heading}\n{text}\n", flush=True)
                    selected |= {(run.name, run.algorithm): run for run in step.settings}
                    scores.append(run_metrics.score_in(step.table))
            except FloatingPointError as error:
                if not args.tuned:
                    raise
                print(f"{scenario}, {algorithm}: skipped, all candidates diverged\n{error}\n", flush=True)
                selected |= dict.fromkeys((run.name, run.algorithm) for run in initial)
        for score in scores[-1:]:
            print(
                f"validation, std_error: mean validation {score.title} over seeds, which decides, and\n"
                f"its SE; {score.name}: mean {score.long_name} in the round chosen on validation samples"
            )
        if args.tuned:
            _make_final_runs(args, with_selected(runs, selected, candidates), options)
    return [next(iter(with_selected([run], selected, candidates)), None) for run in runs]


def _make_final_runs(args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]) -> None:
    """Make the runs with the final settings; report and skip runs that diverge."""
    n_new = 0
    try:
        for _, _, is_new in _train_runs(args, runs, options):
            n_new += is_new
    except FloatingPointError as error:
        print(f"Skipped, diverged:\n{error}")
    print(f"{count(len(runs), 'run')}{' with the tuned settings' if args.tuned else ''} in {args.out}, {n_new} new")


if __name__ == "__main__":
    sys.exit(main())
