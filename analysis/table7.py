"""FedFac Table 7: time of a round relative to FedAvg.

python analysis/table7.py --runs runs/fedfac-quick --out runs/tables/table7
"""

from __future__ import annotations

from fedstat.fl.study import show, tables

if __name__ == "__main__":
    print(show.command(__doc__, {"": tables.time}))
