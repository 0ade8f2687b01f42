"""FedFac Table 5: tuning τ of FedFac on validation data.

python analysis/fedfac/table5.py --runs runs/tune-quick --out runs/tables/table5
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tuning import tuning

from fedstat._table_command import command


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": partial(tuning, name="table5")}, runs="runs/tune-quick", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
