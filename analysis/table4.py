"""FedFac Table 4: tuning Λ of FedFac on validation data.

python analysis/table4.py --runs runs/tune-quick --out runs/tables/table4
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from fedstat.study import ablations, show


def main(argv: Sequence[str] | None = None) -> int:
    return show.command(__doc__, {"": partial(ablations.tuning, name="table4")}, runs="runs/tune-quick", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
