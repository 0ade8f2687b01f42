"""What FedFac's decomposition means: is its split better than random, stable, certain, and agreed on by estimators?

python analysis/decomposition.py --runs runs/fedfac-quick --out runs/tables/decomposition
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from tqdm import tqdm

from fedstat.fl.study import decomposition, show, summary


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/fedfac-quick"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME-1.csv, NAME-1.md, ...")
    cli.add_argument("--rule", choices=summary.RULES, default="best10", help="accuracy to compare (default best10)")
    cli.add_argument("--replicates", type=int, default=50, help="bootstrap samples and shuffles (default 50)")
    cli.add_argument("--methods", nargs="+", default=decomposition.ANALYSED, help="whose weights are analysed")
    args = cli.parse_args()
    try:
        grid = show.select(summary.collect(args.runs), ())
        bar = partial(tqdm, unit="run", disable=not sys.stderr.isatty())
        tables = decomposition.study(
            grid, value=args.rule, methods=args.methods, replicates=args.replicates, progress=bar
        )
    except (FileNotFoundError, ValueError) as error:
        cli.error(str(error))
    for number, table in enumerate(tables, 1):
        print(table.text(), end="\n\n\n")
        if args.out is not None:
            table.write(Path(f"{args.out}-{number}"))


if __name__ == "__main__":
    main()
