"""FedDecomp Fig. 7: what each client gains over training alone and over FedAvg.

Reads the runs of `python -m fedstat.fl --config simulations/feddecomp.toml --scale quick --study table1`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from _study import figure, of_runs
from matplotlib.figure import Figure

from fedstat.study import collect, run_table
from fedstat.study.collect import Grid, title_of

OURS, OTHERS = "feddecomp", ("local", "fedavg")


def draw(grid: Grid) -> tuple[Figure, str]:
    scenarios = collect.scenarios(grid)
    data = of_runs(grid._replace(table=grid.table[grid.table["method"].isin([OURS, *OTHERS])]), run_table.clients)
    wide = data.pivot(index=["scenario", "seed", "client"], columns="method", values="accuracy")
    ours = title_of(OURS)
    gains = pd.concat(
        pd.DataFrame({"gain": wide[ours] - wide[title_of(m)], "over": title_of(m)}) for m in OTHERS
    ).reset_index()
    drawn, axes = plt.subplots(
        1, len(scenarios), figsize=(4 * len(scenarios), 3.6), squeeze=False, sharey=True, layout="constrained"
    )
    for ax, scenario in zip(axes.flat, scenarios, strict=True):
        here = gains[gains["scenario"] == scenario]
        order = [title_of(m) for m in OTHERS]
        sns.stripplot(here, x="over", y="gain", order=order, size=3, color="0.5", ax=ax)
        sns.pointplot(
            here,
            x="over",
            y="gain",
            order=order,
            errorbar=None,
            linestyle="none",
            marker="_",
            markersize=24,
            color="black",
            ax=ax,
        )
        ax.axhline(0, color="0.3", linewidth=0.8)
        lost = here.groupby("over")["gain"].agg(lambda g: f"{(g < 0).mean():.0%} lose")
        ax.set_xticks(range(len(order)), [f"over {m}\n{lost[m]}" for m in order])
        ax.set(title=scenario, xlabel="", ylabel=f"gain in accuracy of {ours}")
    return (
        drawn,
        "points: clients of all seeds, mean accuracy over the last 10 rounds (if there are as many); bar: their mean",
    )


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "table1", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
