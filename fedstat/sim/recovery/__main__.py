"""Command line: ``python -m fedstat.sim.recovery --p 0.2 0.5 0.8 --alpha 0.4``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fedstat import _cli, store
from fedstat._utils.lazy import xr
from fedstat.sim.model8 import SOURCE
from fedstat.sim.recovery import accuracy as recovery
from fedstat.sim.recovery.accuracy import DEFAULT, KAPPA, recover, report, spectrum

COMMAND = "fedstat.sim.recovery"


def parser() -> _cli.Parser:
    """Return the command-line parser."""
    cli = _cli.Parser(
        prog="python -m fedstat.sim.recovery",
        description="Measure how well factor analysis of the true weights of model (8) recovers shared and personal "
        "units, as a function of kappa: area under the ROC curve (AUC) of the communality, by method, and of the "
        "agreement of clients (icc).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = cli.add_argument_group("data").add_argument
    add("--p", type=float, nargs="+", default=[0.2, 0.5, 0.8], metavar="P", help="fractions of units that are shared")
    add("--alpha", type=float, nargs="+", default=[0.4], metavar="A", help="fractions of covariates that are shared")
    add("--clients", type=int, default=100, metavar="C", help="number of clients")
    add("--d", type=int, default=100, metavar="D", help="number of covariates")
    add("--m", type=int, default=200, metavar="M", help="number of hidden units")
    add("--replicates", type=int, default=4, metavar="R", help="number of draws of the weights")
    add("--seed", type=int, default=0, metavar="S", help="seed of the first draw")
    add = cli.add_argument_group("method").add_argument
    add("--kappa", type=float, nargs="+", default=list(KAPPA), metavar="K",
        help="proportions of the eigenvalue sum that the factors must reach")  # fmt: skip
    add("--methods", nargs="+", default=list(DEFAULT), metavar="NAME",
        help=f"methods: {', '.join(recovery.ESTIMATORS)}; icc is the agreement of clients and needs no "
        "kappa")  # fmt: skip
    output = _cli.add_output(cli, "store to write (default: none)", overwrite=True, plot="AUC against kappa")
    output.add_argument("--spectrum", type=Path, metavar="FILE.png",
        help="draw the first draw's eigenvectors of R by the units that they load on, the cuts by kappa, and the "
        "resulting communalities (png, pdf or svg)")  # fmt: skip
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    _cli.require_figure("--spectrum", args.spectrum)
    if args.plot is not None and args.plot == args.spectrum:
        raise ValueError(f"--plot and --spectrum must be different files, but both are {args.plot}. Rename one.")
    if args.out is not None:
        _cli.require_available(args, COMMAND)
    names = ("p", "alpha", "kappa", "methods", "clients", "d", "m", "replicates", "seed")
    result = recover(**{name: getattr(args, name) for name in names}, progress=not args.quiet)
    if args.out is not None:
        attrs = store.provenance(result.attrs["title"], json.loads(result.attrs["config"]),
                                 command=COMMAND, references=SOURCE)  # fmt: skip
        store.save(args.out, xr.DataTree(result), result.attrs | attrs, overwrite=args.overwrite)
    if args.plot is not None:
        from fedstat.plot.simulation import recovery_grid

        _cli.save_figure(recovery_grid(result), args.plot, dpi=150, bbox_inches="tight")
    if args.spectrum is not None:
        from fedstat.plot.simulation import spectrum_grid

        first_draw = spectrum(**{name: getattr(args, name) for name in ("p", "alpha", "clients", "d", "m", "seed")})
        _cli.save_figure(spectrum_grid(first_draw), args.spectrum, dpi=150, bbox_inches="tight")
    print(report(result))
    if args.out is not None:
        print(f"\nSaved: fedstat.open_run({str(args.out)!r})")


if __name__ == "__main__":
    sys.exit(main())
