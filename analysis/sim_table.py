"""Table of a simulation study: store -> csv, one row per p, α and method.

python analysis/sim_table.py runs/vary_p-quick.zarr table.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import fedstat
from fedstat import _cli
from fedstat._utils.guard import replace_file


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("run", type=Path, help="store that python -m fedstat.sim wrote")
    cli.add_argument("csv", type=Path, help="table to write")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    _cli.require_file("csv", args.csv)
    table = fedstat.sim.summary(_cli.open_store(args.run, "fedstat.sim"))
    with replace_file(args.csv) as draft:
        table.to_csv(draft, index=False, float_format="%.6g")
    print(table.round(4).to_string(index=False))


if __name__ == "__main__":
    sys.exit(main())
