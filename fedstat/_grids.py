"""Parts of the commands that make the runs of a grid: options, training with lines, tuning, comparison."""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedstat import _cli, store
from fedstat._utils import check
from fedstat._utils.check import in_bytes
from fedstat._utils.loops import say
from fedstat.fl import custom, logs
from fedstat.results.base import wrapped
from fedstat.study import estimate, experiment, grid, outcomes, report, run_metrics, selection
from fedstat.study.candidates import shown
from fedstat.study.collect import list_seeds
from fedstat.study.compare import compare_runs
from fedstat.study.outcomes import FailedRunsError, Outcome, OutdatedRunError
from fedstat.study.run_settings import Settings
from fedstat.study.step import Step
from fedstat.study.tuning import first_runs, tunable_runs, tune, tuning_groups, with_selected


def add_compute(cli: argparse.ArgumentParser) -> None:
    """Add the compute options of runs, and ``--jobs`` and ``--dask``; :func:`compute_options` reads them."""
    compute = _cli.add_compute(cli)
    compute.add_argument(
        "--memory-budget",
        metavar="SIZE",
        help="memory budget, such as 2GiB: beyond it, client rows are kept on disk, in the store",
    )
    _cli.add_jobs(compute, "run of --config")


def compute_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked options of :func:`add_compute`, the folder of the data, and the logs."""
    if args.memory_budget is not None:
        in_bytes("--memory-budget", args.memory_budget)
    return {
        "data_dir": args.data_dir,
        "memory_budget": args.memory_budget,
        "log": logs.names_of(getattr(args, "log", None)),
        **_cli.compute(args),
    }


def add_choices(add: Any, prefix: str = "") -> None:
    """Add the options on outdated and failed runs; ``prefix`` begins their help texts."""
    outdated = f"{prefix}repeat outdated runs: finished by other code, or with another content of a data file"
    add("--repeat", action="store_true", help=outdated)
    add("--accept", action="store_true", help=f"{prefix}compare outdated runs as they are, and record this")
    add("--retry", action="store_true", help=f"{prefix}try failed runs again, also with the same code and files")


def folder(args: argparse.Namespace) -> Path:
    """Return the folder of a grid's runs if the user names none."""
    return Path("runs") / (args.config.stem + (f"-{args.scale}" if args.scale else ""))


def _choices(args: argparse.Namespace) -> dict[str, Any]:
    if args.repeat and args.accept:
        raise ValueError("--repeat and --accept exclude each other: remove one of them.")
    return {name: getattr(args, name) for name in ("repeat", "accept", "retry")}


def _train(args: argparse.Namespace, runs: Sequence[Settings], options: Mapping[str, Any]) -> Iterator[Outcome]:
    """Yield the outcomes of runs, and print a line for each run that was trained or failed; failures are no error."""
    start_time = time.monotonic()
    try:
        for number, outcome in enumerate(grid.run_all(runs, args.out, **_choices(args), **options), 1):
            if outcome.failure is not None and outcome.repeated:
                say(f"[{number}/{len(runs)}] {outcome.name}: {outcome.failure}")
            elif outcome.made and not args.quiet:
                minutes = (time.monotonic() - start_time) / 60
                line = report.line(store.open_run(outcome.path))
                say(f"[{number}/{len(runs)}, {minutes:.1f} min] {outcome.name}: {line}")
            yield outcome
    except FailedRunsError:  # the outcomes say it
        return


class GridOutcome(NamedTuple):
    """Outcome of a grid.

    Attributes
    ----------
    runs : list of Settings or None
        Each run of the grid, with its tuned values; None if runs of all its candidates failed.
    outcomes : list of Outcome
        Of the final runs; [] if only candidates were made.
    status : int
        Exit status: 1 if a run is not compared.
    at_edge : list of str
        Methods, and scenarios in brackets, whose selected value lies at an edge of its candidates.
    """

    runs: Sequence[Settings | None]
    outcomes: list[Outcome]
    status: int
    at_edge: Sequence[str] = ()


def make_runs(args: argparse.Namespace, runs: Sequence[Settings], *, compare: bool = True) -> GridOutcome:
    """Make the runs of a grid, print what became of them and, if ``compare`` is True, their comparison."""
    options = compute_options(args)
    with _cli.executor(args) as executor:
        finished = [*_train(args, runs, {"progress": not args.quiet, "executor": executor, **options})]
    finished = [*map(grid.judge_again, finished)]
    print("\n".join(outcomes.summarize(finished, args.out)))
    if compare:
        _print_comparison(args, finished)
    return GridOutcome(runs, finished, int(not all(outcome.is_compared for outcome in finished)))


def _print_comparison(args: argparse.Namespace, finished: Sequence[Outcome]) -> None:
    try:
        print(f"\n{compare_runs([outcome.path for outcome in finished if outcome.state != 'outdated'])}")
        print(f"\nIn Python: fedstat.study.compare_runs({str(args.out)!r}, reference=..., rule=...)")
    except ValueError as error:
        print(f"\nNo comparison: {error}")


def tune_runs(args: argparse.Namespace, runs: Sequence[Settings], *, compare: bool = True) -> GridOutcome:
    """Tune the runs of a grid and print the steps; with ``args.tuned``, make the final runs as :func:`make_runs`."""
    tuning = grid.tuning(args.config, scale=args.scale)
    tunable = tunable_runs(runs, tuning.candidates, **tuning.procedure)
    groups = tuning_groups(tunable, together=tuning.together)
    seeds = tuning.seeds or list(dict.fromkeys(run.seed for run in tunable))
    compute = compute_options(args)
    if args.tuned:
        selection.read(args.out)  # a damaged file is an error before any run
    selected: dict[tuple[str, str], Settings | None] = {}
    candidates: dict[tuple[str, str], list[Settings]] = {}
    scores, at_edge, status, final = [], list[str](), 0, list[Outcome]()
    with _cli.executor(args) as executor:
        options = {"progress": not args.quiet, "executor": executor, **compute}
        if executor is not None and "search" not in tuning.procedure:
            deque(_train(args, first_runs(groups.values(), tuning.candidates, seeds), options), maxlen=0)
        for (scenario, algorithm), initial in groups.items():
            keys, method = [(run.name, run.algorithm) for run in initial], custom.short(algorithm)
            how = {**tuning.procedure, **_choices(args), **options}
            steps: list[Step] = []
            try:
                for step in tune(initial, tuning.candidates, args.out, seeds=seeds, **how):
                    heading = f"{scenario}, {method}: {step.name}, {list_seeds(seeds)}"
                    print(f"{heading}\n{step.summary()}\n", flush=True)
                    steps.append(step)
            except FailedRunsError as error:
                print(f"{scenario}, {method}: skipped, runs of all candidates failed\n{error}\n", flush=True)
                status = 1
            except OutdatedRunError as error:
                print(wrapped(f"{scenario}, {method}: skipped. {error}") + "\n", flush=True)
                status, steps = 1, []
            scores += [run_metrics.score_in(step.table) for step in steps]
            at_edge += [f"{method} ({scenario})"] * any(step.edge for step in steps)
            selected |= zip(keys, steps[-1].settings if steps else [None] * len(keys), strict=True)
            tried = [run for step in steps for run in step.runs] or _first_runs(initial, tuning, seeds)
            candidates |= {key: [run for run in tried if (run.name, run.algorithm) == key] for key in keys}
        for score in scores[-1:]:
            print(
                f"validation, std_error: mean validation {score.title} over seeds, which decides, and\n"
                f"its SE; {score.name}: mean {score.long_name} in the round chosen on validation samples"
            )
        if args.tuned:
            tuned = with_selected(runs, selected, tuning.candidates)
            entries = _list_selected(runs, tuned, selected, candidates, list(tuning.candidates))
            selection.write(args.out, entries)
            final = [grid.judge_again(outcome) for outcome in [*_train(args, tuned, options)]]
            print("\n".join(["", "With the tuned settings:", *outcomes.summarize(final, args.out)]))
            print(wrapped(f"Selected on validation samples: {selection.words(entries)}."))
            if compare:
                _print_comparison(args, final)
    status |= not all(outcome.is_compared for outcome in final)
    tuned_runs = [next(iter(with_selected([run], selected, tuning.candidates)), None) for run in runs]
    return GridOutcome(tuned_runs, final, status, at_edge)


def _first_runs(initial: list[Settings], tuning: grid.Tuning, seeds: list[int]) -> list[Settings]:
    """Return the first candidates of a method; none of a search, which draws them."""
    return [] if "search" in tuning.procedure else first_runs([initial], tuning.candidates, seeds)


def _list_selected(
    runs: Sequence[Settings],
    tuned: Sequence[Settings],
    selected: Mapping[tuple[str, str], Settings | None],
    candidates: Mapping[tuple[str, str], Sequence[Settings]],
    names: Sequence[str],
) -> list[selection.Selected]:
    """Return the entries of the file of a tuned folder: one for each method and scenario of the grid."""
    entries = []
    for key in dict.fromkeys((run.name, run.algorithm) for run in runs):
        settings = selected.get(key)
        values = {} if settings is None else {name: shown(name, settings) for name in names}
        final = [_store_name(run) for run in tuned if (run.name, run.algorithm) == key]
        tried = [name for name in map(_store_name, candidates.get(key, ())) if name not in final]
        is_failed = key in selected and settings is None
        entries.append(selection.Selected(*key, None if is_failed else values, tuple(final), tuple(tried)))
    return entries


def _store_name(run: Settings) -> str:
    return f"{grid.name_of(run)}.zarr"


def estimate_costs(args: argparse.Namespace, runs: Sequence[Settings]) -> int:
    """Print the runs to make, with tuning those of all candidates, and what they will cost; return the exit status."""
    if args.dask is not None:
        raise ValueError("--dry-run measures this machine, not the workers of --dask. Use --jobs, or remove --dry-run.")
    seconds = 30.0 if args.seconds is None else check.real("--seconds", args.seconds, low=0, open_low=True)
    jobs, options = args.jobs or 1, compute_options(args)
    if args.tune or args.tuned:
        runs = _all_candidates(args, runs)
    experiment.read_data(runs, args.data_dir)  # raises before the trials if files are missing
    planned = grid.plan(runs, args.out, **_choices(args))
    print("\n".join(outcomes.summarize(planned, args.out, new="to make")), end="\n\n", flush=True)
    tried = list(estimate.kinds(outcome.settings for outcome in planned if outcome.made))
    trials = estimate.measure(tried, seconds=seconds, jobs=jobs, progress=not args.quiet, **options | {"log": ()})
    print("\n".join(estimate.summarize(trials, planned, jobs=jobs, folder=args.out)))
    return int(any(trial.failure for trial in trials))


def _all_candidates(args: argparse.Namespace, runs: Sequence[Settings]) -> list[Settings]:
    """Return the runs of every step of tuning, with other settings at their initial values, and the final runs."""
    tuning = grid.tuning(args.config, scale=args.scale)
    if "search" in tuning.procedure:
        raise ValueError(
            "--dry-run does not know the trials of a search. Remove --tune or --tuned to estimate the grid."
        )
    tunable = tunable_runs(runs, tuning.candidates, **tuning.procedure)
    seeds = tuning.seeds or list(dict.fromkeys(run.seed for run in tunable))
    groups = tuning_groups(tunable, together=tuning.together).values()
    steps = [first_runs(groups, {name: values}, seeds) for name, values in tuning.candidates.items()]
    return list(dict.fromkeys([run for step in steps for run in step] + ([*runs] if args.tuned else [])))
