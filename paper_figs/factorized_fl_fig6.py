"""Factorized-FL Fig. 6: test accuracy over rounds, and over communication.

Reads the runs of `python -m fedstat.fl --config simulations/factorized_fl.toml --scale quick --study table1`.
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

from fedstat.plot.study import scale_cost
from fedstat.study import collect, run_table
from fedstat.study.collect import Grid


def progress(run: xr.DataTree) -> pd.DataFrame:
    """Accuracy by round, with the megabytes uploaded and downloaded until then."""
    sent = (run["metrics/bytes_up"] + run["metrics/bytes_down"]).cumsum("round").to_numpy() / 1e6
    curve = run_table.curve(run, "accuracy")
    return curve.assign(megabytes=sent[curve["round"].to_numpy() - 1])


def draw(grid: Grid) -> tuple[Figure, str]:
    scenarios, data = collect.scenarios(grid), of_runs(grid, progress)
    mean = data.groupby(["scenario", "method", "round"], sort=False)[["accuracy", "megabytes"]].mean().reset_index()
    names = list(dict.fromkeys(data["method"]))
    drawn, axes = plt.subplots(
        2, len(scenarios), figsize=(4.2 * len(scenarios), 6.4), squeeze=False, layout="constrained"
    )
    for column, scenario in zip(axes.T, scenarios, strict=True):
        here = mean[mean["scenario"] == scenario]
        for ax, x in zip(column, ("round", "megabytes"), strict=True):
            # A method without communication has no place on this axis.
            shown = here if x == "round" else here[here["megabytes"] > 0]
            method_lines(shown, names, x, "accuracy", ax, legend=bool(ax is axes[0, -1]))
        column[0].set(title=scenario, ylabel="test accuracy")
        column[0].xaxis.set_major_locator(MaxNLocator(integer=True))
        column[1].set(xlabel="MB uploaded and downloaded by all clients", ylabel="test accuracy")
        scale_cost(column[1])
    axes[0, -1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    return drawn, "means over seeds"


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "table1", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
