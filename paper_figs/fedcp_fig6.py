"""FedCP Fig. 6: training loss, and test accuracy before and after local training, over rounds.

Reads the runs of `python -m fedstat.fl --config simulations/fedcp.toml --scale quick --study table2`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import xarray as xr
from _study import figure, method_lines, of_runs
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstat.study import collect, run_table
from fedstat.study.collect import Grid

ROWS = {
    "train_loss": "training loss",
    "accuracy": "test accuracy,\nas downloaded",
    "accuracy_before": "test accuracy,\nafter local training",
}


def curves(run: xr.DataTree) -> pd.DataFrame:
    """Means over clients of every round that was evaluated."""
    loss, down, trained = (run_table.curve(run, name) for name in ROWS)
    return loss.merge(down, on="round").merge(trained, on="round")


def draw(grid: Grid) -> tuple[Figure, str]:
    scenarios, data = collect.scenarios(grid), of_runs(grid, curves)
    mean = data.groupby(["scenario", "method", "round"], sort=False)[list(ROWS)].mean().reset_index()
    names = list(dict.fromkeys(data["method"]))
    drawn, axes = plt.subplots(
        3, len(scenarios), figsize=(3.2 * len(scenarios) + 1.8, 7.2), squeeze=False, sharex="col", layout="constrained"
    )
    for column, scenario in zip(axes.T, scenarios, strict=True):
        for ax, (name, title) in zip(column, ROWS.items(), strict=True):
            here = mean[mean["scenario"] == scenario]
            method_lines(here, names, "round", name, ax, legend=bool(ax is axes[0, -1]))
            ax.set_ylabel(title)
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        high = max(ax.get_ylim()[1] for ax in column[1:])
        low = min(ax.get_ylim()[0] for ax in column[1:])
        for ax in column[1:]:
            ax.set_ylim(low, high)
        column[0].set_title(scenario)
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    return (
        drawn,
        "means over clients and seeds, in rounds that were evaluated; as downloaded: after the round's averaging",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "table2", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
