"""FedFac Table 7: time of a round relative to FedAvg.

python analysis/table7.py --runs runs/fedfac-quick --out runs/tables/table7
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat.study import show, tables


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"": tables.time}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
