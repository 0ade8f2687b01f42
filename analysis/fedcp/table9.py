"""FedCP Table 9: images recovered from what is sent.

python analysis/fedcp/table9.py --runs runs/fedcp-quick --out runs/tables/fedcp-table9
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat.attack.table import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
