"""FedDecomp Table 4: low rank added to methods without a personal part.

python analysis/feddecomp/table4.py --runs runs/feddecomp-quick --out runs/tables/feddecomp-table4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="fedavg", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
