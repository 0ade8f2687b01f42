"""FedFac Table 7: time of a round relative to FedAvg.

python analysis/fedfac/table7.py --runs runs/fedfac-quick --out runs/tables/table7
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import Asked, command
from fedstat.study.collect import Grid, title_of
from fedstat.study.summary import Table
from fedstat.study.timing import timing


def time(grid: Grid, asked: Asked) -> Table:
    """Table 7: seconds per round relative to FedAvg: geometric means of the ratios within seeds."""
    reference = asked.reference or "fedavg"
    return timing(
        grid, asked.paper, name="table7", title=f"Table 7. Time relative to {title_of(reference)}", reference=reference,
        said=["FedFac static trains and analyses once before round 1, which is not counted"],
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": time}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
