"""Table of a simulation study: store -> csv, one row per p, α and way to split.

python analysis/sim_table.py runs/vary_p-quick.zarr table.csv
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fedstat


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("run", type=Path, help="store that python -m fedstat.sim wrote")
    cli.add_argument("csv", type=Path, help="table to write")
    args = cli.parse_args()
    table = fedstat.sim.summary(fedstat.open_run(args.run))
    table.to_csv(args.csv, index=False, float_format="%.6g")
    print(table.round(4).to_string(index=False))


if __name__ == "__main__":
    main()
