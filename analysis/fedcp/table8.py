"""FedCP Table 8: weight λ of the alignment.

python analysis/fedcp/table8.py --runs runs/fedcp-quick --out runs/tables/fedcp-table8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="fedcp, lam=5.0", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
