"""Command line: ``python -m fedstat.sim --p 0.5 --alpha 0.4``."""

from __future__ import annotations

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
    """Return the command-line parser, with one option per field of :class:`fedstat.sim.Settings`."""
    cli = _cli.Parser(
        prog="python -m fedstat.sim",
        description="Run the simulation study on model (8) of FedFac: accuracy with different splits of the hidden "
        "units into shared and personal. The defaults have the paper's sizes and take about two minutes on two cores; "
        "--replicates 10 --rounds 100 runs the full study.",
    )
    add_arguments(cli, Settings)
    add = cli.add_argument_group("settings from a file").add_argument
    add("--config", type=Path, metavar="FILE.toml", help="file of settings; options on the command line override them")
    add("--scale", metavar="NAME", help="table of --config whose settings override the settings outside of tables")
    compute = _cli.add_compute(cli)
    _cli.add_jobs(compute, "run (one method on one replicate)")
    _cli.add_output(
        cli,
        "store to write (default runs/sim-<time>.zarr)",
        resume="continue the study at --out, if there is one, with its settings or more --replicates, --p, --alpha or "
        "--methods",
        plot="accuracy, stability and splits",
    )
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv, hint=_cli.resume_hint)


def _work(args: argparse.Namespace) -> None:
    if args.scale is not None and args.config is None:
        raise ValueError("--scale needs --config, the file with its table. Add --config, or remove --scale.")
    compute = _cli.compute(args)
    _cli.fill_out(args, "sim")
    _cli.require_available(args, COMMAND)
    settings = _read_settings(args)
    with _cli.executor(args) as executor:
        run = study(out=args.out, resume=args.resume, progress=not args.quiet, executor=executor, **compute, **settings)
    if args.plot is not None:
        from fedstat.plot.study import study_grid  # seaborn takes a second to import

        _cli.save_figure(study_grid(run), args.plot, dpi=150, bbox_inches="tight")
    print(report(run))
    print(f"\nSaved: fedstat.open_run({str(args.out)!r})")


def _read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Combine settings: the command line overrides the file, which overrides the stored study."""
    settings: dict[str, Any] = {}
    if args.resume and args.out.exists():
        settings = config_of(args.out)
    elif args.resume:
        print(f"there is no study at {args.out} yet: starting one", file=sys.stderr)
    if args.config is not None:
        content, file = read_toml(args.config), f"--config {args.config}"
        scales = {name: content.pop(name) for name, value in list(content.items()) if isinstance(value, dict)}
        for table in (content, *scales.values()):
            require_known(table, Settings, file)
            require_types(table, Settings, f" in {file}")
        settings |= content
        if args.scale is not None:
            settings |= scales[check.choice("--scale", args.scale, scales)]
    return settings | read_arguments(args, Settings)


if __name__ == "__main__":
    sys.exit(main())
