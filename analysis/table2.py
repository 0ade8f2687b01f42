"""FedFac Table 2: test accuracy of all methods, paired with FedFac, and the mixed model of methods and settings.

python analysis/table2.py --runs runs/fedfac-quick --out runs/tables/table2
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from fedstat._settings import read_toml
from fedstat.study import grid as grids
from fedstat.study import show, tables
from fedstat.study.summary import Grid

FILE = Path("simulations/fedfac.toml")
TUNED = (
    f"{FILE}: FedFac's Λ, κ and τ were tuned on validation samples of CIFAR-10 and taken over for the "
    "other data (Shakespeare's Λ was not tuned); FedProx's μ = 0.01, LG-FedAvg's one global layer and what else other "
    "methods can set were not tuned"
)
UNKNOWN = f"runs that are not those of {FILE}: whether any setting was tuned is not known here"


def accuracy(grid: Grid, paper: tables.Paper, args: Namespace) -> show.Table:
    table = tables.accuracy(grid, paper, args)
    return table._replace(notes=(*table.notes, *tuned(grid)))


def tuned(grid: Grid) -> list[str]:
    """What is known of tuning: that of the runs of one file, which a run's name tells, as it holds all settings."""
    names = {grids.name_of(run) for scale in read_toml(FILE)["scale"] for run in grids.cells(FILE, scale=scale)}
    of_file = {Path(path).stem in names for path in grid.table["path"]}
    return [note for known, note in ((True, TUNED), (False, UNKNOWN)) if known in of_file]


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"": accuracy, "-mixed": tables.interaction}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
