"""FedFac Table 6: tuning κ of FedFac on validation data.

python analysis/fedfac/table6.py --runs runs/tune-quick --out runs/tables/table6
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from tuning import tuning

from fedstat._table_command import command


def main(argv: Sequence[str] | None = None) -> int:
    return command(__file__, __doc__, {"": partial(tuning, name="table6")}, runs="runs/tune-quick", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
