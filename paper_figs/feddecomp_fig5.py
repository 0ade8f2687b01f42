"""FedDecomp Fig. 5: test accuracy by epochs E_lora on the personal part, E − E_lora on the shared one.

Reads the runs of `python -m fedstat.fl --config simulations/feddecomp.toml --scale quick --study fig5`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from _study import figure, legend_above
from matplotlib.figure import Figure

from fedstat.study import run_table
from fedstat.study.collect import Grid


def draw(grid: Grid) -> tuple[Figure, str]:
    rule = run_table.choose(grid.table)
    epochs = grid.table["method"].str.extract(r"lora_epochs=(\d+)")[0].astype(int)
    data = pd.DataFrame({"epochs": epochs, "accuracy": grid.table[rule], "setting": grid.table["scenario"]})
    drawn, ax = plt.subplots(figsize=(5, 3.6), layout="constrained")
    sns.lineplot(data, x="epochs", y="accuracy", style="setting", marker="o", errorbar="se", err_style="bars", ax=ax)
    ax.set(xlabel="$E_{lora}$, epochs on the personal part", ylabel="test accuracy")
    ax.set_xticks(sorted(epochs.unique()))
    legend_above(ax)
    return drawn, f"{rule}: {run_table.words(rule, grid.table)}; bars: one standard error over seeds; 0 is FedAvg"


def main(argv: Sequence[str] | None = None) -> int:
    return figure(__file__, __doc__, "fig5", draw, argv)


if __name__ == "__main__":
    sys.exit(main())
