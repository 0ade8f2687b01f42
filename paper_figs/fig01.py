"""FedFac Fig. 1: outputs of every hidden unit for every client, IID and non-IID.

Reads the store that `make figures-motivation` keeps under runs/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from _motivation import add_options, read

from fedstat import _cli
from fedstat.plot import papers


def main(argv: Sequence[str] | None = None) -> int:
    return _cli.run(add_options(__doc__, "fig01"), work, argv)


def work(args: argparse.Namespace) -> None:
    run, out = read(args, "fig01")
    _cli.save_figure(papers.fig1(run), out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
