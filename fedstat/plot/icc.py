"""Forest plots of a layer's units: agreement between clients, or how much of their differences is their own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from fedstat import _check
from fedstat.plot._axes import given
from fedstat.results.components import ComponentsResult
from fedstat.results.icc import HEADLINE, IccResult
from fedstat.stats.icc import TYPES, Type


class _Rows(NamedTuple):
    """What is drawn: units and layer with columns value, low, high and (units) unit, filled; axis label; lines."""

    units: pd.DataFrame
    layer: pd.DataFrame
    label: str
    lines: tuple[float, ...]


def forest(
    result: IccResult | ComponentsResult,
    *,
    type: Type = HEADLINE,  # noqa: A002
    units: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """Forest plot: an intraclass correlation or personal share of every unit with its interval, and the layer below.

    Parameters
    ----------
    result : IccResult or ComponentsResult
        With replicates the intervals of an IccResult are those of the bootstrap over clients, else those of F.
    type : {"ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"}
        Which coefficient of an IccResult.
    units : int
        Largest number to draw; of more units the two ends are kept. Dead units are left out and counted.
    ax : matplotlib Axes, optional
        Where to draw; the current axes if not given.

    Returns
    -------
    matplotlib Axes
        Units from high to low, named on the left; filled points: above 0 at the result's false discovery rate. Personal
        shares have a line at 1/2, from which on own weights beat the mean over clients; what lies below -1 is cut off.
    """
    ax = given(ax)
    if not isinstance(result, IccResult | ComponentsResult):
        kind = result.__class__.__name__
        raise ValueError(f"a forest is drawn of what icc or variance_components returns, but got {kind}")
    _check.choice("type", type, TYPES)
    _check.integer("units", units)
    rows = _shares(result) if isinstance(result, ComponentsResult) else _coefficients(result, type)
    drawn = rows.units[np.isfinite(rows.units["value"])].sort_values("value", ascending=False, kind="stable")
    note = [] if len(drawn) == len(rows.units) else [f"undefined units left out: {len(rows.units) - len(drawn)}"]
    if len(drawn) > units:
        note.insert(0, f"{units - units // 2} highest and {units // 2} lowest of {len(drawn)} units")
        ends = np.r_[0 : units - units // 2, len(drawn) - units // 2 : len(drawn)]
        drawn = drawn.iloc[ends]
    y = np.arange(len(drawn))
    for at in rows.lines:
        ax.axvline(at, color="0.7", linewidth=0.8, zorder=0)
    ax.hlines(y, drawn["low"], drawn["high"], color="0.5", linewidth=1)
    color = np.where(drawn["filled"].to_numpy(), "0.1", "white")
    ax.scatter(drawn["value"], y, s=16, color=color, edgecolor="0.1", linewidth=0.8, zorder=3)
    bottom = len(drawn) + 0.5
    ax.hlines(bottom, rows.layer["low"], rows.layer["high"], color="0.1", linewidth=1.6)
    ax.scatter(rows.layer["value"], [bottom], s=36, marker="D", color="0.1", zorder=3)
    ax.set_yticks([*y, bottom], [*map(str, drawn["unit"]), "layer"])
    ax.set(xlabel=f"{rows.label}, {100 * result.level:g} % interval", ylabel="unit", title="; ".join(note))
    ax.set_ylim(bottom + 0.8, -0.8)
    return ax


def _coefficients(result: IccResult, type: Type) -> _Rows:  # noqa: A002
    low, high = ("conf_low", "conf_high") if result.replicates is None else ("boot_low", "boot_high")
    names = {"icc": "value", low: "low", high: "high"}
    table, layer = (t[t["type"] == type].reset_index(drop=True) for t in (result.tidy(), result.layer))
    units = table[["unit", *names]].rename(columns=names)
    return _Rows(
        units.assign(filled=table["p_fdr"] <= 1 - result.level + 1e-12),
        layer[[*names]].rename(columns=names),
        type,
        (0,),
    )


def _shares(result: ComponentsResult) -> _Rows:
    names = {"personal": "value", "conf_low": "low", "conf_high": "high"}
    table, layer = (t.assign(conf_low=t["conf_low"].clip(lower=-1)) for t in (result.tidy(), result.layer))
    table.loc[table["personal"] < -1, "personal"] = -1.0
    units = table[["unit", *names]].rename(columns=names)
    filled = result.p_adjusted <= 1 - result.level + 1e-12
    return _Rows(units.assign(filled=filled), layer[[*names]].rename(columns=names), "personal share", (0, 0.5))
