"""FedFac Table 8: (A) shared and personal parts masked, (B) the split by factor analysis against random splits.

python analysis/table8.py --runs runs/fedfac-quick --out runs/tables/table8
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat.study import ablations, show


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"a": ablations.masking, "b": ablations.random_split}, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
