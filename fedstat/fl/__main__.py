"""Command line: ``python -m fedstat.fl --data mnist --net cnn --algorithm fedfac-dynamic``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from pathlib import Path
from typing import Any

from fedstat import _cli, store
from fedstat._utils.check import in_bytes
from fedstat._utils.parallel import shown
from fedstat._utils.settings import add_arguments, given
from fedstat.fl import algorithms, custom, ranks
from fedstat.fl.training import COMMAND
from fedstat.study import experiment, federation, grid, report
from fedstat.study.compare import compare_runs
from fedstat.study.experiment import Settings, named
from fedstat.study.tuning import check, first_runs, takes_of, tune, value_of

_TAKEN = (
    *Settings.__dataclass_fields__, "config", "scale", "study", "tune", "tuned", "repeat", "data_dir", "device",
    "client_chunk", "threads", "memory", "dask", "out", "resume", "quiet", "help",
)  # fmt: skip
"""Names of options that no setting of a method may have; a user's that does is given by --options."""


def parser(more: Iterable[str] = ()) -> _cli.Parser:
    """Arguments of the command; those of a run are :func:`fedstat.study.experiment.names`, also of ``more`` methods."""
    cli = _cli.Parser(
        prog="python -m fedstat.fl",
        description="Train a federated network on a data set whose files are at hand or, with --config, all runs of a "
        "grid; print accuracy over clients, communication, and the split.",
        usage="%(prog)s [--data NAME] [--algorithm NAME] [other options, listed by --help]",
    )
    groups = add_arguments(cli, Settings)
    _cli.add_data_dir(groups["data"])
    of_methods = cli.add_argument_group("settings of single algorithms")
    for name, (said, several) in flags(more).items():
        option, nargs = f"--{name.replace('_', '-')}", "+" if several else None
        of_methods.add_argument(option, dest=name, nargs=nargs, metavar="VALUE", help=said)
    add = cli.add_argument_group("many runs").add_argument
    add("--config", type=Path, metavar="FILE.toml", help="a grid of runs, such as simulations/fedfac.toml")
    add("--scale", metavar="NAME", help="table of --config under [scale]")
    add("--study", metavar="NAME", help="only the runs of this study of --config")
    add(
        "--tune",
        action="store_true",
        help="with --config: choose what its [tune] lists, one setting after the other, on validation samples",
    )
    add("--tuned", action="store_true", help="with --config: as --tune, and then make its runs with what was chosen")
    add("--repeat", action="store_true", help="with --config: repeat runs of other code, or other content of own.npz")
    where = _cli.add_compute(cli)
    where.add_argument(
        "--memory",
        metavar="SIZE",
        help="most memory to take, such as 2GiB: beyond it, rows of clients are kept on disk, in the store",
    )
    _cli.add_dask(where, "run of --config")
    _cli.add_output(
        cli,
        "store to write, or folder for a grid (default runs/fl-<time>.zarr)",
        resume="continue the run at --out, if there is one, with its settings or more --rounds; grids always do",
    )
    return cli


def flags(more: Iterable[str] = ()) -> dict[str, tuple[str, bool]]:
    """Settings of single methods: a help text that names the methods, and whether several values may be given."""
    takers: dict[str, dict[str, list[str]]] = {}
    several = {}
    for method in (*named(), *more):
        for name, one in algorithms.settings_of(method).items():
            if one.of_method and name not in _TAKEN:
                said = one.help + (f" (default {one.default})" if one.default is not None else "")
                takers.setdefault(name, {}).setdefault(said, []).append(custom.short(method))
                several[name] = one.several
    lines = {n: "; ".join(f"{', '.join(who)}: {said}" for said, who in every.items()) for n, every in takers.items()}
    return {name: (line.replace("%", "%%"), several[name]) for name, line in lines.items()}


def chosen(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of a run and its algorithm that were given on the command line."""
    mine = [args.algorithm] if custom.is_own(args.algorithm) else []
    return given(args, Settings) | {n: getattr(args, n) for n in flags(mine) if getattr(args, n, None) is not None}


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(_own(sys.argv[1:] if argv is None else argv)), _work, argv, hint=_kept)


def _own(argv: Sequence[str]) -> list[str]:
    """The user's algorithm that the arguments name, whose settings are options too; none if it cannot be made."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--algorithm", nargs="?")
    name = first.parse_known_args(argv)[0].algorithm
    try:
        return [name] if custom.is_own(name) and algorithms.settings_of(name) else []
    except ValueError:  # said when the settings are made
        return []


def _work(args: argparse.Namespace) -> None:
    with ranks.launched(args.device) as (rank, args.device, threads), ExitStack() as stack:
        args.threads = threads if args.threads is None else args.threads
        if rank:  # the first process speaks for all
            args.quiet = True
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            (_grid if args.config else _one)(args)
        except (ValueError, OSError) as error:
            if rank and not isinstance(error, ConnectionError):
                raise SystemExit(2) from None
            raise


def _kept(args: argparse.Namespace) -> str:
    return f"Finished runs are in {args.out}: the same command continues." if args.config else _cli.resume_hint(args)


def _where(args: argparse.Namespace) -> dict[str, Any]:
    if args.memory is not None:
        in_bytes("--memory", args.memory)
    return {"data_dir": args.data_dir, "memory": args.memory} | _cli.compute(args)


def _one(args: argparse.Namespace) -> None:
    for option in ("scale", "study", "tune", "tuned", "repeat", "dask"):
        if getattr(args, option) not in (None, False):
            raise ValueError(f"--{option} needs --config, the file of a grid")
    where = _where(args)
    _cli.fill_out(args, "fl")
    args.out = ranks.same(args.out)  # named by the time
    _cli.claim(args, COMMAND)
    begun = experiment.settings_of(args.out) if args.resume and args.out.exists() else {}
    settings = Settings(**begun).but(**chosen(args))
    experiment.federated(settings, args.data_dir)  # cached for the run
    federation.forget_files()
    with shown(settings.rounds, "round", show=not args.quiet) as bar:
        run = experiment.run(settings, out=args.out, resume=args.resume, progress=bar.update, **where)
    print(report.report(run))
    print(f"\nStored: fedstat.open_run({str(args.out)!r})")


def _grid(args: argparse.Namespace) -> None:
    if fixed := sorted(chosen(args)):
        option = fixed[0].replace("_", "-")
        raise ValueError(f"--{option} belongs in {args.config}: a grid takes its settings from the file")
    args.out = args.out or Path("runs") / (args.config.stem + (f"-{args.scale}" if args.scale else ""))
    runs = grid.cells(args.config, scale=args.scale, study=args.study)
    bars = None if args.quiet else _bars
    if args.tune or args.tuned:
        _tune(args, runs, bars)
        return
    where = _where(args)
    with _cli.executor(args) as executor:
        _run(args, runs, {"progress": bars, "executor": executor, **where})


def _made(args: argparse.Namespace, runs: list[Settings], how: dict[str, Any]) -> Iterator[tuple[Settings, Path, bool]]:
    """Runs of a grid with a line for each that is new."""
    begun = time.monotonic()
    for number, (settings, path, new) in enumerate(grid.run_all(runs, args.out, repeat=args.repeat, **how), 1):
        if new and not args.quiet:
            spent = time.monotonic() - begun
            print(f"[{number}/{len(runs)}, {spent / 60:.1f} min] {settings.name}, {custom.short(settings.algorithm)}, "
                  f"seed {settings.seed}: {report.line(store.open_run(path))}", flush=True)  # fmt: skip
        yield settings, path, new


def _run(args: argparse.Namespace, runs: list[Settings], how: dict[str, Any]) -> None:
    made, others, paths = 0, 0, []
    for settings, path, new in _made(args, runs, how):
        made += new
        paths.append(path)
        others += not (new or grid.by_this_code(settings, path))
    print(f"{len(runs)} runs in {args.out}, {made} of them new")
    if others:
        print(f"{others} were finished by other code (fedstat's or an algorithm's) and stay: --repeat runs them again")
    try:
        print(f"\n{compare_runs(paths)}")
        print(f"\nIn Python: fedstat.study.compare_runs({str(args.out)!r}, reference=..., rule=...)")
    except ValueError as error:
        print(f"\nThe runs are not compared: {error}")


def _tune(args: argparse.Namespace, runs: list[Settings], bars: Any) -> None:
    candidates, seeds, together = grid.tuning(args.config, scale=args.scale)
    fitting = [one for one in runs if all(step in takes_of(one.algorithm) for step in candidates)]
    if not fitting:
        raise ValueError(f"no method of {args.config} takes {', '.join(candidates)}: tune fedfac-dynamic, for example")
    for one in fitting:
        check(one, candidates)
    seeds = seeds or list(dict.fromkeys(one.seed for one in fitting))
    firsts = {(one.name, one.algorithm): one for one in reversed(fitting)}
    asked: dict[tuple[str, str], list[Settings]] = {}
    for (label, method), one in reversed(firsts.items()):
        asked.setdefault(("all data sets" if together else label, method), []).append(one)
    where = _where(args)
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    lost: set[tuple[str, str]] = set()
    with _cli.executor(args) as executor:
        how = {"progress": bars, "executor": executor, **where}
        if executor is not None:
            with suppress(FloatingPointError):  # a candidate that diverges is not chosen
                deque(_made(args, first_runs(asked.values(), candidates, seeds), how), maxlen=0)
        for (label, method), here in asked.items():
            try:
                for step in tune(here, candidates, args.out, seeds=seeds, **how):
                    heading = f"{label}, {method}: {step.name}, seeds {', '.join(map(str, seeds))}"
                    print(f"{heading}\n{step.table.round(4).to_string(index=False)}\n", flush=True)
                    for one in step.settings:
                        chosen[one.name, one.algorithm] = {name: value_of(name, one) for name in candidates}
            except FloatingPointError as error:
                if not args.tuned:
                    raise
                print(f"{label}, {method}: left out, for every candidate diverged\n{error}\n", flush=True)
                lost |= {(one.name, one.algorithm) for one in here}
        print(
            "validation: mean validation accuracy, which decides, and its standard error over seeds; accuracy: on test "
            "data"
        )
        if args.tuned:
            tuned = [one.but(**chosen.get((one.name, one.algorithm), {})) for one in runs
                     if (one.name, one.algorithm) not in lost]  # fmt: skip
            _last(args, tuned, how)


def _last(args: argparse.Namespace, tuned: list[Settings], how: dict[str, Any]) -> None:
    """Runs with what was chosen; those that diverge are said and left out."""
    new = 0
    try:
        for _, _, made in _made(args, tuned, how):
            new += made
    except FloatingPointError as error:
        print(f"diverged, and left out:\n{error}")
    print(f"{len(tuned)} runs with what was chosen in {args.out}, {new} of them new")


def _bars(settings: Settings, number: int, of: int) -> Callable[[int], object]:
    label = f"{number + 1}/{of} {settings.name} {custom.short(settings.algorithm)}"
    return shown(settings.rounds, "round", label=label, leave=False).update


if __name__ == "__main__":
    sys.exit(main())
