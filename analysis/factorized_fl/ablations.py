"""Factorized-FL Fig. 7 (g) to (k): without parts, other matching, ranks, thresholds and sparsity.

python analysis/factorized_fl/ablations.py --runs runs/factorized_fl-quick --out runs/tables/factorized_fl-ablations
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="factorized-fl-beta", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
