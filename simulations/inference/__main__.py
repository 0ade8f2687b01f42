"""Try fedstat's p values and intervals where the truth is known: ``python -m simulations.inference``."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from simulations.inference import table
from simulations.inference.claims import CLAIMS, FILES

RESULTS = Path(__file__).parents[2] / "analysis/inference/results/rates"
QUICK = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m simulations.inference", description=__doc__)
    parser.add_argument("--claim", nargs="+", default=[""], metavar="TEXT", help="parts of CLAIM: CASE (default all)")
    parser.add_argument("--data-dir", help="folder of MNIST's files, for trained layers (default $FEDSTAT_DATA)")
    parser.add_argument("--quick", action="store_true", help=f"one case a claim, {QUICK} replicates: it runs")
    parser.add_argument("--stale", action="store_true", help="only cases without a row, or with one of other code")
    parser.add_argument("--replicates", type=int, help="in place of the number of each case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, help="the table, which is added to; in the long form those of results")
    args = parser.parse_args()
    if args.data_dir:
        os.environ["FEDSTAT_DATA"] = args.data_dir  # also of the processes
    out = args.out or (None if args.quick else RESULTS)
    if out == RESULTS:
        table.require_clean()
    known = table.read(out) if out else table.empty()
    done = table.current(known, CLAIMS) if args.stale else set()
    every = table.cases(CLAIMS) if not args.quick else [(c, next(iter(one.cases))) for c, one in CLAIMS.items()]
    names = [n for n in every if any(text in ": ".join(n) for text in args.claim) and n not in done]
    with ProcessPoolExecutor(args.processes) as pool:
        replicates = QUICK if args.quick else args.replicates
        each = table.rows(CLAIMS, names, replicates=replicates, seed=args.seed, executor=pool)
        for i, rows in enumerate(each, 1):
            known = table.with_rows(known, rows, CLAIMS)
            if out:
                table.write(out, known, FILES)
            for row in rows:
                of = ", ".join(filter(None, (row["case"], row["part"])))
                found = f"{row['observed']} ± {row['mc_error']} {row['conclusion']}"
                print(f"[{i}/{len(names)}] {row['claim']}: {of}: {found}", flush=True)


if __name__ == "__main__":
    main()
