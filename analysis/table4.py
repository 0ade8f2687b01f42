"""FedFac Table 4: tuning Λ of FedFac on validation data.

python analysis/table4.py --runs runs/tune-quick --out runs/tables/table4
"""

from __future__ import annotations

from functools import partial

from fedstat.fl.study import ablations, show

if __name__ == "__main__":
    print(show.command(__doc__, {"": partial(ablations.tuning, name="table4")}, runs="runs/tune-quick"))
