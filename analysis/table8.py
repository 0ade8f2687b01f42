"""FedFac Table 8: (A) shared and personal parts masked, (B) the split by factor analysis against random splits.

python analysis/table8.py --runs runs/fedfac-quick --out runs/tables/table8
"""

from __future__ import annotations

from fedstat.fl.study import ablations, show

if __name__ == "__main__":
    print(show.command(__doc__, {"a": ablations.masking, "b": ablations.random_split}))
