"""FedDecomp Table 2: rank of the personal part, dense and convolutional layers.

python analysis/feddecomp/table2.py --runs runs/feddecomp-quick --out runs/tables/feddecomp-table2
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="feddecomp, rank_linear=0.6, rank_conv=0.6", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
