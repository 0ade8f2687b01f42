"""FedFac Fig. 9: training loss of FedFac and FedAvg over rounds, and test accuracy, with 95% t intervals over seeds.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/fedfac.toml` makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from _stores import RUNS, figure_path
from matplotlib.figure import Figure

import fedstat
from fedstat import _cli, plot
from fedstat.plot._figure import caption, one_legend
from fedstat.study import collect, run_table
from fedstat.study.collect import Grid


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=RUNS / "fedfac-quick", help="folder of the grid's stores")
    cli.add_argument(
        "--methods", nargs="+", default=["fedavg", "fedfac-dynamic"], help="default: fedavg fedfac-dynamic"
    )
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig09-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = figure_path(args.out, f"fig09-{args.runs.name}")
    grid = collect.collect(args.runs)
    grid = collect.select(grid._replace(table=grid.table[grid.table["method"].isin(args.methods)]), ())
    if absent := set(args.methods) - set(grid.table["method"]):
        raise ValueError(f"not run: {', '.join(sorted(absent))}")
    scenarios = collect.scenarios(grid)
    loss, accuracy = (of_runs(grid, name) for name in ("train_loss", "accuracy"))
    figure = draw(scenarios, loss, accuracy)
    caption(
        figure,
        "Training loss: of the selected clients' batches, weighted by their samples. Test accuracy: mean over clients, "
        "weighted by their test samples, in the rounds that were evaluated.",
        "Thick: mean over seeds; thin: each seed; bands: 95% t intervals over seeds, cut off at the axes.",
        *collect.caption(grid, 10_000),
    )
    _cli.save_figure(figure, out, dpi=110)


def of_runs(grid: Grid, name: str) -> pd.DataFrame:
    """A metric of all runs by round."""
    return pd.concat(
        run_table.curve(fedstat.open_run(r["path"]), name).assign(
            scenario=r["scenario"], method=r["method"], seed=r["seed"]
        )
        for r in grid.table.to_dict("records")
    )


def draw(scenarios: Sequence[str], loss: pd.DataFrame, accuracy: pd.DataFrame) -> Figure:
    """Loss above accuracy, three scenarios beside one another, one legend."""
    columns = min(3, len(scenarios))
    blocks = -(-len(scenarios) // columns)
    figure = plt.figure(figsize=(3.1 * columns + 0.4, 4.4 * blocks + 1.2), layout="constrained")
    grid, panels = figure.add_gridspec(2 * blocks, columns), []
    for i, scenario in enumerate(scenarios):
        block, column = divmod(i, columns)
        top = figure.add_subplot(grid[2 * block, column])
        bottom = figure.add_subplot(grid[2 * block + 1, column], sharex=top)
        plot.loss_curves(loss[loss["scenario"] == scenario], ax=top).set_title(scenario)
        plot.score_curves(accuracy[accuracy["scenario"] == scenario], ax=bottom)
        top.tick_params(labelbottom=False)
        top.set_xlabel("")
        panels += [top, bottom]
        if column:
            top.set_ylabel("")
            bottom.set_ylabel("")
    one_legend(figure, panels)
    return figure


if __name__ == "__main__":
    sys.exit(main())
