"""Figure of agreement between clients: a forest plot of the units."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from fedstat import _check
from fedstat.results.icc import HEADLINE, IccResult
from fedstat.stats.icc import TYPES, Type


def forest(result: IccResult, *, type: Type = HEADLINE, units: int = 40, ax: Axes | None = None) -> Axes:  # noqa: A002
    """Forest plot: an intraclass correlation of every unit with its interval, and of the layer below.

    Parameters
    ----------
    result : IccResult
        With replicates the intervals are those of the bootstrap over clients, else those of F.
    type : {"ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"}
        Which coefficient.
    units : int
        Most to draw, of more units the two ends; dead units are left out and counted.
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.

    Returns
    -------
    matplotlib Axes
        Units from high to low, named on the left; filled points: above 0 at the result's false discovery rate.
    """
    ax = ax or plt.gca()
    _check.choice("type", type, TYPES)
    _check.integer("units", units)
    table, layer = (t[t["type"] == type] for t in (result.tidy(), result.layer))
    drawn = table[np.isfinite(table["icc"])].sort_values("icc", ascending=False, kind="stable")
    note = [] if len(drawn) == len(table) else [f"undefined units left out: {len(table) - len(drawn)}"]
    if len(drawn) > units:
        note.insert(0, f"{units - units // 2} highest and {units // 2} lowest of {len(drawn)} units")
        ends = np.r_[0 : units - units // 2, len(drawn) - units // 2 : len(drawn)]
        drawn = drawn.iloc[ends]
    low, high = ("conf_low", "conf_high") if result.replicates is None else ("boot_low", "boot_high")
    y = np.arange(len(drawn))
    ax.axvline(0, color="0.7", linewidth=0.8, zorder=0)
    ax.hlines(y, drawn[low], drawn[high], color="0.5", linewidth=1)
    above = (drawn["p_fdr"] <= 1 - result.level + 1e-12).to_numpy()
    ax.scatter(drawn["icc"], y, s=16, color=np.where(above, "0.1", "white"), edgecolor="0.1", linewidth=0.8, zorder=3)
    bottom = len(drawn) + 0.5
    ax.hlines(bottom, layer[low], layer[high], color="0.1", linewidth=1.6)
    ax.scatter(layer["icc"], [bottom], s=36, marker="D", color="0.1", zorder=3)
    ax.set_yticks([*y, bottom], [*map(str, drawn["unit"]), "layer"])
    ax.set(xlabel=f"{type}, {100 * result.level:g} % interval", ylabel="unit", title="; ".join(note))
    ax.set_ylim(bottom + 0.8, -0.8)
    return ax
