"""``python -m fedstat``: the commands there are."""

import argparse
import sys
from collections.abc import Sequence

from fedstat import __version__, _cli

COMMANDS = {
    "fedstat.sim": "simulation study on model (8): ways to split neurons, side by side",
    "fedstat.sim.recovery": "for which κ factor analysis finds the true split",
    "fedstat.decompose": "weights of any origin -> shared and client-specific units",
    "fedstat.motivation": "neurons' outputs over clients: entropy, its peaks, its relation to the split",
    "fedstat.ntk": "FedFac's theorems against training",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands."""
    cli = _cli.Parser(prog="python -m fedstat", description="Print the commands there are.")
    return _cli.run(cli, _work, argv)


def _work(_: argparse.Namespace) -> None:
    print(f"fedstat {__version__}\n")
    for name, purpose in COMMANDS.items():
        print(f"  python -m {name:<22} {purpose}")
    print("\nEach has --help. In Python: import fedstat; help(fedstat)")


if __name__ == "__main__":
    sys.exit(main())
