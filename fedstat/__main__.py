"""``python -m fedstat`` lists the commands, ``python -m fedstat NAME ...`` runs one; so does ``fedstat NAME ...``."""

from __future__ import annotations

import sys
from pathlib import Path

from fedstat._utils import lazy

if __name__ == "__main__" or Path(sys.argv[0]).stem == "fedstat":  # python -m fedstat, or the script
    lazy.leave_while_loading()

import argparse
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from typing import NamedTuple

from fedstat import __version__, _cli
from fedstat._utils import check


class Command(NamedTuple):
    """A command: the module with its ``parser()`` and ``main(argv)``, what it is for, and among which it is listed."""

    module: str
    purpose: str
    among: str


COMMANDS = {
    "decompose": Command(
        "fedstat.decompose.__main__", "weights of any origin -> shared and client-specific units", "split weights"
    ),
    "fl": Command("fedstat.fl.__main__", "federated training on real data, one run or a grid", "train"),
    "sim": Command(
        "fedstat.sim.__main__", "simulation study on model (8): ways to split neurons, side by side", "study"
    ),
    "recovery": Command(
        "fedstat.sim.recovery.__main__", "for which κ factor analysis finds the true split of model (8)", "study"
    ),
    "motivation": Command(
        "fedstat.motivation.__main__", "neurons' outputs over clients: entropy, its peaks, its relation to ν", "study"
    ),
    "ntk": Command("fedstat.ntk.__main__", "FedFac's theorems against training", "study"),
    "attack": Command("fedstat.attack.__main__", "what methods leak: images recovered from what clients send", "study"),
    "report": Command("fedstat.reporting.__main__", "one HTML file on runs and studies", "look after runs"),
    "verify": Command(
        "fedstat.reporting.verify", "check that runs are as they were written, by their checksums", "look after runs"
    ),
    "doctor": Command(
        "fedstat.reporting.doctor", "what fedstat finds here: packages, machine, data, space", "look after runs"
    ),
}
"""Commands by name, in the order in which they are listed."""


def parser(prog: str = "python -m fedstat") -> _cli.Parser:
    """Arguments of the entrance: a command's name; what follows is the command's own."""
    cli = _cli.Parser(
        prog=prog,
        usage="%(prog)s COMMAND [options]",
        description=f"fedstat {__version__}: statistics of personalised federated learning",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{listed()}\n\nOptions of a command: {prog} COMMAND --help. In Python: import fedstat; help(fedstat)",
    )
    cli.add_argument("command", nargs="?", metavar="COMMAND", help="one of those below")
    cli.add_argument("--version", action="version", version=f"fedstat {__version__}")
    return cli


def listed() -> str:
    """The commands, by what they are for."""
    parts = []
    for among, commands in groupby(COMMANDS.items(), key=lambda item: item[1].among):
        lines = (f"  {name:<12}{one.purpose}" for name, one in commands)
        parts.append("\n".join([f"{among}:", *lines]))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status, see :func:`fedstat._cli.run`."""
    argv = list(sys.argv[1:] if argv is None else argv)
    prog = "fedstat" if Path(sys.argv[0]).stem == "fedstat" else "python -m fedstat"
    if argv and argv[0] in COMMANDS:
        with _cli.set_prog(f"{prog} {argv[0]}"):
            status: int = import_module(COMMANDS[argv[0]].module).main(argv[1:])
            return status
    return _cli.run(parser(prog), lambda args: _work(args, prog), argv[:1])


def _work(args: argparse.Namespace, prog: str) -> None:
    if args.command is not None:
        check.choice("COMMAND", args.command, COMMANDS)
    print(parser(prog).format_help(), end="")


if __name__ == "__main__":
    sys.exit(main())
