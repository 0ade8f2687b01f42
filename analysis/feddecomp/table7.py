"""FedDecomp Table 7: images recovered from what is sent.

python analysis/feddecomp/table7.py --runs runs/feddecomp-quick --out runs/tables/feddecomp-table7
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fedstat.attack.table import study_of


def main(argv: Sequence[str] | None = None) -> int:
    return study_of(__file__, __doc__, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
