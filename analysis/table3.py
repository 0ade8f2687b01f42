"""FedFac Table 3: accuracy of clients that took no part in training.

python analysis/table3.py --runs runs/fedfac-quick --out runs/tables/table3
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat.study import show, tables


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"": tables.newcomers}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
