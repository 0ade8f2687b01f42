"""Factorized-FL Fig. 7 (a-e): similarity of clients by u (above) and v (below) over rounds.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/factorized_fl.toml --study fig7` makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from _study import figure
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import fedstat
from fedstat.study.collect import Grid
from fedstat.study.show import title_of

WHAT = {"similarity_u": "u", "similarity": "v"}


def draw(grid: Grid) -> tuple[Figure, str]:
    first = grid.table.sort_values(["label", "seed", "method"]).iloc[0]
    run = fedstat.open_run(first["path"])
    rounds = np.unique(np.linspace(0, run["measures"].sizes["round"] - 1, 5).round().astype(int))
    drawn, axes = plt.subplots(2, len(rounds), figsize=(2.1 * len(rounds) + 0.8, 4.6), layout="constrained")
    domain = run["clients/domain"].to_numpy()
    ends = np.flatnonzero(domain[1:] != domain[:-1]) + 0.5
    for row, (name, symbol) in zip(axes, WHAT.items(), strict=True):
        similarity = run[f"measures/{name}"].to_numpy()
        own = np.eye(similarity.shape[1], dtype=bool)
        # The colours of a row span its own similarities, those of a client with itself left out.
        low, high = similarity[rounds][:, ~own].min(), similarity[rounds][:, ~own].max()
        for ax, at in zip(row, rounds, strict=True):
            image = ax.imshow(np.where(own, np.nan, similarity[at]), vmin=low, vmax=high, cmap="magma_r")
            for end in ends:
                ax.axhline(end, color="0.5", linewidth=0.5)
                ax.axvline(end, color="0.5", linewidth=0.5)
            ax.set_title(f"{symbol}, round {at + 1}", fontsize="medium")
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(MaxNLocator(4, integer=True))
        drawn.colorbar(image, ax=row, label="cosine similarity", shrink=0.9)
    title = f"{title_of(first['method'])}, {first['label']}, seed {first['seed']}"
    names = ", ".join(dict.fromkeys(map(str, domain)))
    return drawn, f"{title}; layer before the classifier; lines part the domains: {names}"


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "fig7", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
