"""FedFac Table 6: tuning κ of FedFac on validation data.

python analysis/table6.py --runs runs/tune-quick --out runs/tables/table6
"""

from __future__ import annotations

from functools import partial

from fedstat.fl.study import ablations, show

if __name__ == "__main__":
    print(show.command(__doc__, {"": partial(ablations.tuning, name="table6")}, runs="runs/tune-quick"))
