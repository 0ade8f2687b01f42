"""Factorized-FL Fig. 7 (a-f): similarity of clients by u (above) and v (below) over rounds; who averages whom.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/factorized_fl.toml --study fig7` makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from _study import figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

import fedstat
from fedstat.plot.client_plots import color_scale, draw_matrix, off_diagonal
from fedstat.study.collect import Grid, title_of

WHAT = {"similarity_u": "u", "similarity": "v"}


def draw(grid: Grid) -> tuple[Figure, str]:
    first = grid.table.sort_values(["scenario", "seed", "method"]).iloc[0]
    run = fedstat.open_run(first["path"])
    rounds = np.unique(np.linspace(0, run["measures"].sizes["round"] - 1, 5).round().astype(int))
    drawn = plt.figure(figsize=(2.1 * len(rounds) + 4.2, 4.6), layout="constrained")
    places = drawn.add_gridspec(2, len(rounds) + 1, width_ratios=[1.0] * len(rounds) + [1.5])
    axes = [[drawn.add_subplot(places[row, column]) for column in range(len(rounds))] for row in range(2)]
    domain = run["clients/domain"].to_numpy()
    ends = np.flatnonzero(domain[1:] != domain[:-1]) + 0.5
    matrices = [[off_diagonal(run[f"measures/{name}"].to_numpy()[at]) for at in rounds] for name in WHAT]
    for row, symbol, of_symbol in zip(axes, WHAT.values(), matrices, strict=True):
        for ax, at, matrix in zip(row, rounds, of_symbol, strict=True):
            image = draw_matrix(ax, matrix, color_scale(matrices))
            ax.set_title(f"{symbol}, round {at + 1}", fontsize="medium")
            _of_clients(ax, ends)
    drawn.colorbar(image, ax=axes[0] + axes[1], label="cosine similarity", shrink=0.6)
    weight = run["mixing/weight"].to_numpy()
    ax = drawn.add_subplot(places[:, -1])
    image = draw_matrix(ax, off_diagonal((weight > 0).sum(axis=0)), {"cmap": "viridis", "vmin": 0, "vmax": len(weight)})
    ax.set(title="who averages whom", xlabel="client that is averaged", ylabel="client that averages")
    ax.title.set_fontsize("medium")
    _of_clients(ax, ends)
    drawn.colorbar(image, ax=ax, label=f"rounds of {len(weight)}", shrink=0.6)
    title = f"{title_of(first['method'])}, {first['scenario']}, seed {first['seed']}"
    names = ", ".join(dict.fromkeys(map(str, domain)))
    return drawn, f"{title}; layer before the classifier; lines separate the domains: {names}"


def _of_clients(ax: Axes, ends: NDArray[np.floating[Any]]) -> None:
    """Lines between domains, and whole clients at the ticks."""
    for end in ends:
        ax.axhline(end, color="0.5", linewidth=0.5)
        ax.axvline(end, color="0.5", linewidth=0.5)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(4, integer=True))


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "fig7", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
