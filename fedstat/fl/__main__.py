"""Command line: ``python -m fedstat.fl --data mnist --net cnn --algorithm fedfac-dynamic``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from fedstat import _cli, store
from fedstat._utils import check
from fedstat._utils.check import distinct, in_bytes
from fedstat._utils.lazy import xr
from fedstat._utils.loops import say
from fedstat._utils.settings import add_arguments, read_arguments
from fedstat.fl import algorithms, custom, logs, ranks
from fedstat.fl.training import COMMAND
from fedstat.results.tables import count
from fedstat.study import estimate, experiment, federation, grid, outcomes, report, run_metrics
from fedstat.study.collect import list_seeds
from fedstat.study.compare import compare_runs
from fedstat.study.outcomes import FailedRunsError, Outcome
from fedstat.study.run_settings import Settings, named
from fedstat.study.tuning import first_runs, tunable_runs, tune, tuning_groups, with_selected

_RESERVED = (
    *Settings.__dataclass_fields__, "config", "scale", "study", "tune", "tuned", "repeat", "accept", "retry",
    "dry_run", "seconds", "data_dir", "device", "client_chunk", "threads", "memory_budget", "jobs", "dask", "out",
    "resume", "quiet", "log", "help",
)  # fmt: skip
"""Names of the command's options; a user's algorithm sets its settings of these names by --options."""


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
        help="with --config: repeat outdated runs: finished by other code, or with another content of the data file",
    )
    add(
        "--dry-run",
        action="store_true",
        help="with --config: train nothing; count the runs to make, and estimate their time, memory and disk from a "
        "short trial of each kind",
    )
    add("--seconds", type=float, metavar="S", help="with --dry-run: longest time of a trial (default 30)")
    add("--accept", action="store_true", help="with --config: compare outdated runs as they are, and record this")
    add("--retry", action="store_true", help="with --config: try failed runs again, also with the same code and files")
    compute = _cli.add_compute(cli)
    compute.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="memory budget, such as 2GiB: beyond it, client rows are kept on disk, in the store",
    )
    _cli.add_jobs(compute, "run of --config")
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
            if declared.of_method and name not in _RESERVED:
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
    own_algorithms = _find_own_algorithms(sys.argv[1:] if argv is None else argv)
    return _cli.run(parser(own_algorithms), _work, argv, hint=_resume_hint)


def _find_own_algorithms(argv: Sequence[str]) -> list[str]:
    """Return the user's algorithm in the arguments, whose settings become options; [] if there is none or it fails."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    early.add_argument("--algorithm", nargs="?")
    name = early.parse_known_args(argv)[0].algorithm
    try:
        return [name] if custom.is_in_file(name) and algorithms.settings_of(name) else []
    except ValueError:  # Settings raises it again, as an error of the command
        return []


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


def _compute_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.memory_budget is not None:
        in_bytes("--memory-budget", args.memory_budget)
    options = {"data_dir": args.data_dir, "memory_budget": args.memory_budget, "log": logs.names_of(args.log)}
    return options | _cli.compute(args)


def _run_single(args: argparse.Namespace) -> None:
    for option in (
        "scale",
        "study",
        "tune",
        "tuned",
        "repeat",
        "accept",
        "retry",
        "jobs",
        "dask",
        "dry_run",
        "seconds",
    ):
        if getattr(args, option) not in (None, False):
            name = f"--{option.replace('_', '-')}"
            raise ValueError(f"{name} needs --config, the file of a grid. Add --config, or remove {name}.")
    options = _compute_options(args)
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
    if args.repeat and args.accept:
        raise ValueError("--repeat and --accept exclude each other: remove one of them.")
    if args.seconds is not None and not args.dry_run:
        raise ValueError("--seconds needs --dry-run, whose trials it limits. Add --dry-run, or remove --seconds.")
    args.out = args.out or Path("runs") / (args.config.stem + (f"-{args.scale}" if args.scale else ""))
    runs = grid.cells(args.config, scale=args.scale, study=args.study)
    if args.tune or args.tuned:
        _tune(args, runs)
        return None
    options = _compute_options(args)
    if args.dry_run:
        return _estimate(args, runs, options)
    with _cli.executor(args) as executor:
        return _make_runs(args, runs, {"progress": not args.quiet, "executor": executor, **options})


def _train_runs(args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]) -> Iterator[Outcome]:
    """Yield the outcomes of the runs of a grid, and print a line for each run that was trained or failed."""
    start_time = time.monotonic()
    for number, outcome in enumerate(grid.run_all(runs, args.out, **_choices(args), **options), 1):
        if outcome.failure is not None and outcome.repeated:
            say(f"[{number}/{len(runs)}] {outcome.name}: {outcome.failure}")
        elif outcome.made and not args.quiet:
            minutes = (time.monotonic() - start_time) / 60
            line = report.line(store.open_run(outcome.path))
            say(f"[{number}/{len(runs)}, {minutes:.1f} min] {outcome.name}: {line}")
        yield outcome


def _choices(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("repeat", "accept", "retry")}


def _estimate(args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]) -> int:
    """Print the runs to make and what they will cost; return the exit status."""
    if args.dask is not None:
        raise ValueError("--dry-run measures this machine, not the workers of --dask. Use --jobs, or remove --dry-run.")
    seconds = 30.0 if args.seconds is None else check.real("--seconds", args.seconds, low=0, open_low=True)
    jobs = args.jobs or 1
    experiment.read_data(runs, args.data_dir)  # raises before the trials if files are missing
    planned = grid.plan(runs, args.out, **_choices(args))
    print("\n".join(outcomes.summarize(planned, args.out, new="to make")), end="\n\n", flush=True)
    tried = list(estimate.kinds(outcome.settings for outcome in planned if outcome.made))
    trials = estimate.measure(tried, seconds=seconds, jobs=jobs, progress=not args.quiet, **options)
    print("\n".join(estimate.summarize(trials, planned, jobs=jobs, folder=args.out)))
    return int(any(trial.failure for trial in trials))


def _make_runs(args: argparse.Namespace, runs: list[Settings], options: dict[str, Any]) -> int:
    """Make the runs of a grid, and print what became of them and their comparison; return the exit status."""
    finished: list[Outcome] = []
    with suppress(FailedRunsError):  # the outcomes say it
        finished.extend(_train_runs(args, runs, options))
    print("\n".join(outcomes.summarize(finished, args.out)))
    paths = [outcome.path for outcome in finished if outcome.state != "outdated"]
    try:
        print(f"\n{compare_runs(paths)}")
        print(f"\nIn Python: fedstat.study.compare_runs({str(args.out)!r}, reference=..., rule=...)")
    except ValueError as error:
        print(f"\nNo comparison: {error}")
    return int(any(outcome.failure for outcome in finished))


def _tune(args: argparse.Namespace, runs: list[Settings]) -> None:
    candidates, seeds, together = grid.tuning(args.config, scale=args.scale)
    tunable = tunable_runs(runs, candidates)
    groups = tuning_groups(tunable, together=together)
    seeds = seeds or list(dict.fromkeys(run.seed for run in tunable))
    compute = _compute_options(args)
    selected: dict[tuple[str, str], Settings | None] = {}
    scores = []
    with _cli.executor(args) as executor:
        options = {"progress": not args.quiet, "executor": executor, **compute}
        if executor is not None:
            with suppress(FailedRunsError):  # a candidate that fails is not selected
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
            except FailedRunsError as error:
                print(f"{scenario}, {algorithm}: skipped, all candidates failed\n{error}\n", flush=True)
                selected |= dict.fromkeys((run.name, run.algorithm) for run in initial)
        for score in scores[-1:]:
            print(
                f"validation, std_error: mean validation {score.title} over seeds, which decides, and\n"
                f"its SE; {score.name}: mean {score.long_name} in the round chosen on validation samples"
            )
        if args.tuned:
            _make_tuned_runs(args, with_selected(runs, selected, candidates), options)


def _make_tuned_runs(args: argparse.Namespace, tuned: list[Settings], options: dict[str, Any]) -> None:
    """Run the tuned settings; report and skip runs that fail."""
    n_new = 0
    try:
        for outcome in _train_runs(args, tuned, options):
            n_new += outcome.made
    except FailedRunsError as error:
        print(f"Skipped, failed:\n{error}")
    print(f"{count(len(tuned), 'run')} with the tuned settings in {args.out}, {n_new} new")


if __name__ == "__main__":
    sys.exit(main())
