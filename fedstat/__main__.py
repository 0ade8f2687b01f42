"""``python -m fedstat`` lists the commands; ``python -m fedstat verify RUN`` checks runs against their checksums."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedstat import __version__, _cli, store

COMMANDS = {
    "fedstat.sim": "simulation study on model (8): ways to split neurons, side by side",
    "fedstat.sim.recovery": "for which κ factor analysis finds the true split",
    "fedstat.decompose": "weights of any origin -> shared and client-specific units",
    "fedstat.fl": "federated training on real data, one run or a grid",
    "fedstat.motivation": "neurons' outputs over clients: entropy, its peaks, its relation to the split",
    "fedstat.attack": "what methods leak: images recovered from what clients send",
    "fedstat.ntk": "FedFac's theorems against training",
    "fedstat verify": "check that runs are as they were written, by their checksums",
}


def parser() -> _cli.Parser:
    """Arguments of the command."""
    listed = "\n".join(f"  python -m {name:<22} {purpose}" for name, purpose in COMMANDS.items())
    cli = _cli.Parser(
        prog="python -m fedstat",
        description=f"fedstat {__version__}\n\n{listed}\n\nEach has --help. In Python: import fedstat; help(fedstat)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m fedstat [verify RUN ...]",
    )
    commands = cli.add_subparsers(dest="command", metavar="verify")
    verify = commands.add_parser("verify", help="compare every file of runs with the checksums noted when written")
    verify.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a store, or a folder of stores")
    return cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see :func:`fedstat._cli.run`; 1 if a run is damaged."""
    return _cli.run(parser(), _work, argv)


def _work(args: argparse.Namespace) -> int:
    if args.command is None:
        print(parser().description)
        return 0
    sound = True
    for path in (store_ for run in args.runs for store_ in _stores(run)):
        try:
            found = store.damage(path, checksums=True, require=True)
            said = f"damaged: {store.describe(found, most=None)}" if found else "as it was written"
            sound = sound and not found
        except ValueError as error:
            said, sound = str(error), False
        print(f"{path}: {said}")
    return 0 if sound else 1


def _stores(path: Path) -> list[Path]:
    """The store at a path, or the stores in the folder there."""

    def is_store(one: Path) -> bool:
        return (one / "zarr.json").exists() or (one / "journal").exists()

    found = [path] if is_store(path) else sorted(filter(is_store, path.iterdir() if path.is_dir() else []))
    if not found:
        raise FileNotFoundError(
            f"there is no run at {path}, and none in it: a run is a folder with a file zarr.json in it"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
