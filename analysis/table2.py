"""FedFac Table 2: test accuracy of all methods, paired with FedFac, and the mixed model of methods and settings.

python analysis/table2.py --runs runs/fedfac-quick --out runs/tables/table2
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence

from fedstat.fl.study import show, tables
from fedstat.fl.study.summary import Grid

TUNED = (
    "simulations/fedfac.toml: FedFac's Λ, κ and τ were tuned on validation samples of CIFAR-10 and taken over for the "
    "other data (Shakespeare's Λ was not tuned); FedProx's μ = 0.01, LG-FedAvg's one global layer and what else other "
    "methods can set were not tuned"
)


def accuracy(grid: Grid, paper: tables.Paper, args: Namespace) -> show.Table:
    table = tables.accuracy(grid, paper, args)
    return table._replace(notes=(*table.notes, TUNED))


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"": accuracy, "-mixed": tables.interaction}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
