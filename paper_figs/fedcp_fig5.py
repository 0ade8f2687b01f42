"""FedCP Fig. 5: personalization identification ratio of every client over rounds.

Reads the runs of `python -m fedstat.fl --config simulations/fedcp.toml --scale quick --study fig5`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import xarray as xr
from _study import figure, of_runs
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstat.study import collect
from fedstat.study.collect import Grid


def ratio(run: xr.DataTree) -> pd.DataFrame:
    """Ratio (round, client) of the selected clients."""
    return run["measures/personalisation"].rename("ratio").to_dataframe().reset_index().dropna()


def draw(grid: Grid) -> tuple[Figure, str]:
    scenarios, data = collect.scenarios(grid), of_runs(grid, ratio)
    seed = data["seed"].min()
    drawn, axes = plt.subplots(
        1, len(scenarios), figsize=(4.6 * len(scenarios), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, scenario in zip(axes.flat, scenarios, strict=True):
        here = data[(data["scenario"] == scenario) & (data["seed"] == seed)]
        sns.lineplot(here, x="round", y="ratio", units="client", estimator=None, color="0.6", linewidth=0.7, ax=ax)
        sns.lineplot(here, x="round", y="ratio", errorbar=None, color="black", linewidth=2, ax=ax)
        ax.axhline(0.5, color="#e69f00", linewidth=1, linestyle="--")
        ax.set(title=scenario, ylabel="mean policy s")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return drawn, (
        f"seed {seed}; gray: clients; black: their mean; mean policy s of a client's training samples, as downloaded; "
        "dashed: both heads weigh equally"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "fig5", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
