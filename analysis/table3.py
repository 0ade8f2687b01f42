"""FedFac Table 3: accuracy of clients that took no part in training.

python analysis/table3.py --runs runs/fedfac-quick --out runs/tables/table3
"""

from __future__ import annotations

from fedstat.fl.study import show, tables

if __name__ == "__main__":
    print(show.command(__doc__, {"": tables.newcomers}))
