"""FedFac Fig. 6: test accuracy by splitting rule, as p varies (top) and as α varies (bottom).

Left the accuracies, right their differences from the true split within replicates: accuracy varies more between
replicates than between splitting rules. Reads the stores that `make figures` keeps under runs/, or any others of
`python -m fedstat.sim`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from _simulation import add_options, read

from fedstat import _cli
from fedstat.plot import papers


def main(argv: Sequence[str] | None = None) -> int:
    return _cli.run(add_options(__doc__, "fig06"), work, argv)


def work(args: argparse.Namespace) -> None:
    runs, out = read(args, "fig06")
    _cli.save_figure(papers.accuracy_grid(*runs), out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
