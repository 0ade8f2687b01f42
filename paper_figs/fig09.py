"""FedFac Fig. 9: training loss of FedFac and FedAvg over rounds, with one standard error over seeds.

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
    cli.add_argument(
        "--methods", nargs="+", default=["fedavg", "fedfac-dynamic"], help="default: fedavg fedfac-dynamic"
    )
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig09-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig09-{args.runs.name}.png"
    _cli.require_figure("--out", out)
    grid = collect.collect(args.runs)
    grid = collect.select(grid._replace(table=grid.table[grid.table["method"].isin(args.methods)]), ())
    if absent := set(args.methods) - set(grid.table["method"]):
        raise ValueError(f"not run: {', '.join(sorted(absent))}")
    labels = collect.labels(grid)
    curves = pd.concat(
        summary.curve(fedstat.open_run(r["path"])).assign(label=r["label"], method=r["method"], seed=r["seed"])
        for r in grid.table.to_dict("records")
    )
    columns = min(3, len(labels))
    rows = -(-len(labels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.2 * rows + 0.6), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(labels) :]:
        ax.remove()
    for ax, label in zip(axes.flat, labels, strict=False):
        plot.loss_curves(curves[curves["label"] == label], ax=ax).set_title(label)
    note = "mean loss of the active clients' batches, weighted by their samples; bands: one standard error over seeds"
    figure.supxlabel("\n".join([note, *origin.caption(grid)]), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
