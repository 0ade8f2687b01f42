"""FedFac Fig. 8: test accuracies of all clients under every method, ordered by their medians; FedFac is orange.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/fedfac.toml` makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import fedstat
from fedstat import _cli, plot
from fedstat.study import collect, origin, summary


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=Path("runs/fedfac-quick"), help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig08-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig08-{args.runs.name}.png"
    _cli.require_figure("--out", out)
    grid = collect.select(collect.collect(args.runs), ())
    labels = collect.labels(grid)
    clients = pd.concat(
        summary.clients(fedstat.open_run(r["path"])).assign(label=r["label"], method=r["method"])
        for r in grid.table.to_dict("records")
    )
    wide = 0.34 * grid.table["method"].nunique() + 1.2
    columns = min(3, len(labels))
    rows = -(-len(labels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(wide * columns, 3.6 * rows + 0.6), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(labels) :]:
        ax.remove()
    for ax, label in zip(axes.flat, labels, strict=False):
        plot.clients(clients[clients["label"] == label], ax=ax).set_title(label)
    note = (
        "clients of all seeds; accuracy: mean over the last 10 rounds (if there are as many); white: mean over clients"
    )
    figure.supxlabel("\n".join([note, *origin.caption(grid)]), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
