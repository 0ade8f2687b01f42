"""Command line: ``python -m fedstat.attack RUN [RUN ...]``."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedstat import _cli, store
from fedstat._utils.guard import replace_file
from fedstat._utils.lazy import xr
from fedstat._utils.settings import add_arguments, read_arguments
from fedstat.attack import leakage
from fedstat.attack.experiment import Attack, read_run, rounds_of
from fedstat.results import LeakageResult

COMMAND = "fedstat.attack"


def parser() -> _cli.Parser:
    """Return the command-line parser, with one option per field of :class:`fedstat.attack.experiment.Attack`."""
    cli = _cli.Parser(
        prog="python -m fedstat.attack",
        description="Gradient inversion (DLG, deep leakage from gradients): recover training images from what clients "
        "of finished runs send after one local step; compare their PSNR with that of the class-mean image.",
    )
    cli.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="store of python -m fedstat.fl; all runs use one data set"
    )
    _cli.add_data_dir(cli.add_argument_group("data"))
    groups = add_arguments(cli, Attack)
    groups["method"].add_argument("--rounds", type=int, nargs="+", metavar="T", help="rounds after which a local step "
        "is attacked; 0: initial parameters (default: rounds among 10 20 30 40 50 that all runs have, or the "
        "last)")  # fmt: skip
    _cli.add_compute(cli)
    _cli.add_output(
        cli,
        "store to write with PSNR and images, or .csv file to write with the table",
        overwrite=True,
        plot="recovered images and PSNR by round",
    )
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    is_table = args.out is not None and args.out.suffix.lower() == ".csv"
    if is_table:
        _cli.require_file("--out", args.out)
        if args.out.exists() and not args.overwrite:
            raise ValueError(f"--out {args.out} exists. Add --overwrite or choose another name.")
    elif args.out is not None:
        _cli.require_available(args, COMMAND)
    compute, start_time = _cli.compute(args), time.monotonic()
    attack = asdict(Attack(**read_arguments(args, Attack)))
    rounds = rounds_of(args.rounds, [(run.name, run.settings.rounds) for run in map(read_run, args.runs)])
    options = {"rounds": rounds, "data_dir": args.data_dir, "progress": not args.quiet}
    result = leakage(args.runs, **options, **attack, **compute)
    if is_table:
        with replace_file(args.out) as draft:
            result.tidy().to_csv(draft, index=False)
    elif args.out is not None:
        _save(args, attack, result)
    if args.plot is not None:
        from fedstat.plot.training import leakage_grid

        _cli.save_figure(leakage_grid(result), args.plot, dpi=150)
    print(result.summary())
    print(f"Time: {time.monotonic() - start_time:.0f} s, including repeated training")
    if args.out is not None:
        print(f"Saved: {args.out}" if is_table else f"Saved: fedstat.open_run({str(args.out)!r})")


def _save(args: argparse.Namespace, attack: dict[str, Any], result: LeakageResult) -> None:
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    config = options | {"runs": [*map(str, args.runs)]} | attack
    attrs = store.provenance("gradient inversion", config, command=COMMAND)
    store.save(args.out, xr.DataTree.from_dict({"/leakage": result.to_dataset()}), attrs, overwrite=args.overwrite)


if __name__ == "__main__":
    sys.exit(main())
