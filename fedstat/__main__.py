"""Command line: ``python -m fedstat`` lists the commands, ``python -m fedstat NAME ...`` runs one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from fedstat import __version__, _cli
from fedstat._utils import check


class Command(NamedTuple):
    """Command of fedstat.

    Attributes
    ----------
    module : str
        Module with its ``parser()`` and ``main(argv)``.
    purpose : str
        Its line in the list of commands.
    group : str
        Title under which it is listed.
    """

    module: str
    purpose: str
    group: str


COMMANDS = {
    "decompose": Command(
        "fedstat.decompose.__main__", "split units of trained layers into shared and personal units", "split weights"
    ),
    "data": Command("fedstat.data.__main__", "list and download published data sets", "prepare data"),
    "fl": Command("fedstat.fl.__main__", "federated training on real data: one run or a grid of runs", "train"),
    "leaderboard": Command(
        "fedstat.reporting.leaderboard", "algorithms side by side, with your own, all tuned alike", "train"
    ),
    "sim": Command("fedstat.sim.__main__", "simulation study on model (8): accuracy of splitting rules", "study"),
    "recovery": Command(
        "fedstat.sim.recovery.__main__", "recovery of the true split of model (8), as a function of κ", "study"
    ),
    "motivation": Command(
        "fedstat.motivation.__main__", "entropy of unit outputs over clients, and its relation to ν", "study"
    ),
    "ntk": Command("fedstat.ntk.__main__", "bounds of FedFac's theorems, compared with training", "study"),
    "attack": Command(
        "fedstat.attack.__main__", "gradient inversion: images recovered from what clients send", "study"
    ),
    "report": Command("fedstat.reporting.__main__", "HTML report of runs and studies", "report and check"),
    "verify": Command("fedstat.reporting.verify", "check that stored runs match their checksums", "report and check"),
    "doctor": Command(
        "fedstat.reporting.doctor", "check of packages, hardware, data sets and disk space", "report and check"
    ),
}
"""Commands by name, in the order in which they are listed."""


def parser(prog: str = "python -m fedstat") -> _cli.Parser:
    """Return the parser for the name of a command; the command parses the arguments that follow."""
    cli = _cli.Parser(
        prog=prog,
        usage="%(prog)s COMMAND [options]",
        description=f"fedstat {__version__}: statistics of personalized federated learning",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{list_commands()}\n\nOptions of a command: {prog} COMMAND --help\nIn Python: import fedstat; "
        "help(fedstat)",
    )
    cli.add_argument("command", nargs="?", metavar="COMMAND", help="name of a command below")
    cli.add_argument("--version", action="version", version=f"fedstat {__version__}")
    return cli


def list_commands() -> str:
    """Return the list of commands, grouped by purpose."""
    parts = []
    for title, commands in groupby(COMMANDS.items(), key=lambda item: item[1].group):
        lines = (f"  {name:<12}{command.purpose}" for name, command in commands)
        parts.append("\n".join([f"{title}:", *lines]))
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
