"""FedCP Table 3: time of a round relative to FedAvg.

python analysis/fedcp/table3.py --runs runs/fedcp-quick --out runs/tables/fedcp-table3
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import Asked, command
from fedstat.study.collect import Grid
from fedstat.study.summary import Table
from fedstat.study.timing import timing


def build(grid: Grid, asked: Asked) -> Table:
    """Seconds of a round; the paper's are minutes of its own machines."""
    reference, title = asked.reference or "fedavg", __doc__.partition("\n")[0]
    return timing(grid, asked.paper, name="table3", title=title, reference=reference)


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": build}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
