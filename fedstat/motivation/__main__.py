"""Command line: ``python -m fedstat.motivation --data mnist --data-dir ...``."""

from __future__ import annotations

import argparse
import sys

from fedstat import _cli
from fedstat._utils.settings import add_arguments, read_arguments
from fedstat.motivation.experiment import COMMAND, OUTPUTS, Settings, study
from fedstat.motivation.findings import report
from fedstat.store import config_of


def parser() -> _cli.Parser:
    """Return the command-line parser, with one option per field of :class:`fedstat.motivation.Settings`."""
    cli = _cli.Parser(
        prog="python -m fedstat.motivation",
        description="Run the motivating study of FedFac: train one MLP for each client, and measure how the outputs of "
        "its hidden units differ between clients. The default data come with scikit-learn and need no files.",
    )
    groups = add_arguments(cli, Settings)
    _cli.add_data_dir(groups["data"])
    add = groups["method"].add_argument
    add("--outputs", choices=OUTPUTS, default="own", help="samples for the outputs in the report: the client's "
        "training samples (own), or a common evaluation set; both outputs are stored (default own)")  # fmt: skip
    _cli.add_compute(cli)
    _cli.add_output(
        cli,
        "store to write (default runs/motivation-<time>.zarr)",
        resume="continue the study at --out, if there is one, with its settings",
        plot="heat maps, entropies and communalities",
    )
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv, hint=_cli.resume_hint)


def _work(args: argparse.Namespace) -> None:
    compute = _cli.compute(args)
    _cli.fill_out(args, "motivation")
    _cli.require_available(args, COMMAND)
    settings = config_of(args.out) if args.resume and args.out.exists() else {}
    settings |= read_arguments(args, Settings)
    options = {"data_dir": args.data_dir, "out": args.out, "resume": args.resume, "progress": not args.quiet}
    run = study(**options, **compute, **settings)
    if args.plot is not None:
        from fedstat.plot.fedfac import motivation_grid

        _cli.save_figure(motivation_grid(run, outputs=args.outputs), args.plot, dpi=150, bbox_inches="tight")
    print(report(run, outputs=args.outputs))
    print(f"\nSaved: fedstat.open_run({str(args.out)!r})")


if __name__ == "__main__":
    sys.exit(main())
