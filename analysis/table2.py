"""FedFac Table 2: test accuracy of all methods, paired with FedFac, and the mixed model of methods and settings.

python analysis/table2.py --runs runs/fedfac-quick --out runs/tables/table2
"""

from __future__ import annotations

from fedstat.fl.study import show, tables

if __name__ == "__main__":
    print(show.command(__doc__, {"": tables.accuracy, "-mixed": tables.interaction}))
