"""Command line: ``python -m fedstat.sim --p 0.5 --alpha 0.4``."""

from __future__ import annotations

from fedstat._utils import lazy

if __name__ == "__main__":
    lazy.leave_while_loading()

import argparse
import sys
from pathlib import Path
from typing import Any

from fedstat import _cli
from fedstat._utils import check
from fedstat._utils.settings import add_arguments, read_arguments, read_toml, require_known, require_types
from fedstat.sim.experiment import COMMAND, Settings, report, study
from fedstat.store import config_of


def parser() -> _cli.Parser:
    """Arguments of the command; those of the study are the fields of :class:`fedstat.sim.Settings`."""
    cli = _cli.Parser(
        prog="python -m fedstat.sim",
        description="Simulation study on model (8) of FedFac: how well each way of splitting neurons into shared and "
        "personal ones works. The defaults are of the paper's size and take about two minutes on two cores; "
        "--replicates 10 --rounds 100 is the full setting.",
    )
    add_arguments(cli, Settings)
    add = cli.add_argument_group("settings from a file").add_argument
    add("--config", type=Path, metavar="FILE.toml", help="settings from a file; the command line overrides them")
    add("--scale", metavar="NAME", help="table of --config whose settings override those outside of tables")
    where = _cli.add_compute(cli)
    _cli.add_dask(where, "run, a method on a replicate,")
    _cli.add_output(
        cli,
        "store to write (default runs/sim-<time>.zarr)",
        resume="go on with the study at --out, if there is one, with its settings or more --replicates, --p, --alpha, "
        "--methods",
        plot="accuracies, stability and split",
    )
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv, hint=_cli.resume_hint)


def _work(args: argparse.Namespace) -> None:
    if args.scale is not None and args.config is None:
        raise ValueError("--scale needs --config, the file that has the scale")
    where = _cli.compute(args)
    _cli.fill_out(args, "sim")
    _cli.claim(args, COMMAND)
    settings = _settings(args)
    with _cli.executor(args) as executor:
        run = study(out=args.out, resume=args.resume, progress=not args.quiet, executor=executor, **where, **settings)
    if args.plot is not None:
        from fedstat.plot.study import study_grid  # seaborn takes a second to import

        _cli.save_figure(study_grid(run), args.plot, dpi=150, bbox_inches="tight")
    print(report(run))
    print(f"\nSaved: fedstat.open_run({str(args.out)!r})")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Settings of the file, overridden by those of the command line."""
    chosen: dict[str, Any] = {}
    if args.resume and args.out.exists():
        chosen = config_of(args.out)
    elif args.resume:
        print(f"there is no study at {args.out} yet: starting one", file=sys.stderr)
    if args.config is not None:
        read, where = read_toml(args.config), f"--config {args.config}"
        scales = {name: read.pop(name) for name, value in list(read.items()) if isinstance(value, dict)}
        for part in (read, *scales.values()):
            require_known(part, Settings, where)
            require_types(part, Settings, f" in {where}")
        chosen |= read
        if args.scale is not None:
            chosen |= scales[check.choice("--scale", args.scale, scales)]
    return chosen | read_arguments(args, Settings)


if __name__ == "__main__":
    sys.exit(main())
