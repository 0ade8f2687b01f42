"""FedDecomp Fig. 6: distance of clients' shared parts from their mean, parts trained in turn or together.

Reads the runs of `python -m fedstat.fl --config simulations/feddecomp.toml --scale quick --study table3`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from _study import figure, legend_above, of_runs
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstat.study.collect import Grid


def distance(run: xr.DataTree) -> pd.DataFrame:
    """Mean over clients of ‖σ_i − σ̄‖ over all layers, by round."""
    of_all = np.sqrt((run["drift/distance"].astype(float) ** 2).sum("layer", skipna=False))
    return of_all.mean("client").rename("distance").to_dataframe().reset_index()[["round", "distance"]]


def draw(grid: Grid) -> tuple[Figure, str]:
    data = of_runs(grid, distance)
    drawn, ax = plt.subplots(figsize=(5, 3.6), layout="constrained")
    sns.lineplot(
        data, x="round", y="distance", hue="method", style="method", errorbar="se", palette="colorblind", ax=ax
    )
    ax.set(ylim=(0, None), ylabel="distance before aggregation")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(ax)
    return drawn, "mean over clients of the Euclidean distance over all layers; bands: one standard error over seeds"


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "table3", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
