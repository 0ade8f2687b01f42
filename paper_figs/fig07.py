"""FedFac Fig. 7: proportion of units in the same group one round later, under dynamic FedFac, as p and as α vary.

Reads the stores that `make figures` keeps under runs/, or any others of `python -m fedstat.sim`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from _simulation import add_options, read

from fedstat import _cli
from fedstat.plot import papers


def main(argv: Sequence[str] | None = None) -> int:
    return _cli.run(add_options(__doc__, "fig07"), work, argv)


def work(args: argparse.Namespace) -> None:
    runs, out = read(args, "fig07")
    _cli.save_figure(papers.stability_grid(*runs), out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
