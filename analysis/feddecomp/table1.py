"""FedDecomp Table 1: test accuracy under Dirichlet label shift.

python analysis/feddecomp/table1.py --runs runs/feddecomp-quick --out runs/tables/feddecomp-table1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="feddecomp", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
