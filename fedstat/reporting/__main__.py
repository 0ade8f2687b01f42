"""Command line: ``python -m fedstat.reporting RUN… --out report.html``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedstat import _cli


def parser() -> _cli.Parser:
    """Return the parser of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat.reporting",
        description="Write a report of runs or studies: one HTML file with warnings, results, their uncertainty, and a "
        "methods paragraph with citations. It needs no network, and can be printed.",
    )
    cli.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a store of any fedstat command, or a folder of stores: runs of fedstat.fl (of a tuned folder, its final "
        "runs) are compared within seeds",
    )
    _cli.add_output(
        cli,
        "file to write (default report.html)",
        metavar="FILE.html",
        default=Path("report.html"),
        overwrite=True,
        quiet=False,
    )
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> None:
    from fedstat.reporting import report  # torch and seaborn take seconds to import
    from fedstat.reporting.document import require_ours

    if args.out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out must end in .html, but got {args.out}")
    require_ours("--out", args.out)
    if args.out.exists() and not args.overwrite:
        raise ValueError(f"--out {args.out} exists. Add --overwrite or choose another name.")
    page = report(args.runs)
    page.save(args.out)
    print(repr(page).removesuffix("\n  .save(path) writes the page"))
    print(f"\nSaved: {args.out}")


if __name__ == "__main__":
    sys.exit(main())
