"""FedCP Table 9: images recovered from what is sent.

python analysis/fedcp/table9.py --runs runs/fedcp-quick --out runs/tables/fedcp-table9
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fedstat._table_command import Asked, command
from fedstat.attack.experiment import leakage
from fedstat.attack.table import table
from fedstat.study.accuracy import of_study
from fedstat.study.collect import Grid
from fedstat.study.table import Table

FILE = Path(__file__).parents[2] / "simulations" / "fedcp.toml"


def build(grid: Grid, asked: Asked) -> Table:
    """The attack on the runs of the first seed; it trains them again, from the data in FEDSTAT_DATA."""
    found = of_study(grid, FILE, "table9").table
    found = found[found["seed"] == found["seed"].min()]
    result = leakage(found["path"].tolist())
    return table(result, asked.paper, name="table9", title=__doc__.partition("\n")[0])


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": build}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
