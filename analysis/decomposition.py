"""What FedFac's decomposition means: is its split better than random, stable, certain, and agreed on by estimators?

python analysis/decomposition.py --runs runs/fedfac-quick --out runs/tables/decomposition
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from fedstat import _cli
from fedstat.study import decomposition, show, summary


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/fedfac-quick"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="name without ending: writes NAME-1.csv, NAME-1.md, ...")
    show.add_rule(cli)
    cli.add_argument("--replicates", type=int, default=50, help="bootstrap samples and shuffles (default 50)")
    cli.add_argument("--methods", nargs="+", default=decomposition.ANALYSED, help="whose weights are analysed")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    if args.out is not None:
        show.require_writable(Path(f"{args.out}-1"))
    grid = show.select(summary.collect(args.runs), ())
    bar = partial(tqdm, unit="run", disable=not sys.stderr.isatty())
    tables = decomposition.study(grid, value=args.rule, methods=args.methods, replicates=args.replicates, progress=bar)
    for number, table in enumerate(tables, 1) if args.out is not None else ():
        table.write(Path(f"{args.out}-{number}"))
    print("\n\n\n".join(table.text() for table in tables))


if __name__ == "__main__":
    sys.exit(main())
