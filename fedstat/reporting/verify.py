"""Compare runs with their checksums: ``python -m fedstat verify RUN ...``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedstat import _cli, store


def parser() -> _cli.Parser:
    """Return the parser of the command."""
    cli = _cli.Parser(
        prog="python -m fedstat verify",
        description="Compare every file of runs with the checksums stored when it was written.",
    )
    cli.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a store, or a folder of stores")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`; 1 if a run is damaged."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> int:
    is_sound = True
    for path in store.distinct_stores(args.runs):
        try:
            damages = store.damage(path, checksums=True, require=True)
            text = f"DAMAGED ({store.describe(damages, most=None)})" if damages else "OK (all checksums match)"
            is_sound = is_sound and not damages
        except (ValueError, FileNotFoundError) as error:
            text, is_sound = str(error), False
        print(f"{path}: {text}")
    return 0 if is_sound else 1
