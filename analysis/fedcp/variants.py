"""FedCP: the text against the published code.

python analysis/fedcp/variants.py --runs runs/fedcp-quick --out runs/tables/fedcp-variants
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat._table_command import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, reference="fedcp", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
