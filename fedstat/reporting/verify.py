"""Compare runs with their checksums: ``python -m fedstat verify RUN ...``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedstat import _cli, store


def parser() -> _cli.Parser:
    """Arguments of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat verify",
        description="Compare every file of runs with the checksums noted when it was written.",
    )
    cli.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a store, or a folder of stores")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`; 1 if a run is damaged."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> int:
    sound = True
    for path in (one for run in args.runs for one in store.stores(run)):
        try:
            found = store.damage(path, checksums=True, require=True)
            said = f"damaged: {store.describe(found, most=None)}" if found else "as it was written"
            sound = sound and not found
        except (ValueError, FileNotFoundError) as error:
            said, sound = str(error), False
        print(f"{path}: {said}")
    return 0 if sound else 1
