"""FedFac Fig. 2: entropy over clients of every hidden unit's outputs, IID and non-IID.

Left, as in the paper, a unit's output is its mean over the client's samples; right, over a common evaluation set.
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
    return _cli.run(add_options(__doc__, "fig02"), work, argv)


def work(args: argparse.Namespace) -> None:
    run, out = read(args, "fig02")
    _cli.save_figure(papers.fig2(run), out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
