"""Factorized-FL: the text against the published code.

python analysis/factorized_fl/variants.py --runs runs/factorized_fl-quick --out runs/tables/factorized_fl-variants
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="factorized-fl-beta", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
