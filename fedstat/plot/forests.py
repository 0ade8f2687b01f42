"""Forest plots: every estimate with its interval, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fedstat import _check
from fedstat.plot._axes import given, name_rows
from fedstat.plot._rows import Rows, rows
from fedstat.results.icc import HEADLINE
from fedstat.stats.icc import TYPES, Type

_ROW = 0.19  # inches
_LINE = 60  # characters below the axis


def forest(
    result: Any,
    *,
    type: Type = HEADLINE,  # noqa: A002
    units: int = 40,
    ax: Axes | None = None,
) -> Axes:
    """Forest plot: the estimate of every unit, method, layer or run with its interval, and the layer below.

    Parameters
    ----------
    result : result with intervals, or DataFrame
        Of :func:`fedstat.icc` (with replicates the intervals are those of the bootstrap),
        of :func:`fedstat.variance_components` (personal shares), of :func:`fedstat.bootstrap` (communalities), of
        :func:`fedstat.compare` (differences, simultaneous intervals), ``effective_rank``, ``knn_entropy``,
        ``attack.leakage`` (gain over the mean image) or ``ntk.extreme_eigenvalues``; a split by agreement; or a table
        with the columns estimate, conf_low and conf_high, and term, unit, method, layer or run for the names.
    type : {"ICC1", "ICC2", "ICC3", "ICC1k", "ICC2k", "ICC3k"}
        Which coefficient of an IccResult.
    units : int
        Largest number to draw; of more units the two ends are kept. Dead units are left out and counted.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure, high enough for the names.

    Returns
    -------
    matplotlib Axes
        Units from high to low, named on the left; methods, layers and runs in their own order. What filled points and
        lines mean is said below the axis. Personal shares have a line at 1/2, from which on own weights beat the mean
        over clients; what lies below -1 is cut off.

    Raises
    ------
    TypeError
        If the result has no intervals, such as a split by factor analysis.
    """
    found = rows(result, _check.choice("type", type, TYPES))
    _check.integer("units", units)
    drawn, y, note = _places(found, units)
    bottom = (y[-1] if len(y) else 0.0) + 1.5
    ax = given(ax, (6.4, 1.3 + _ROW * (bottom + 1.6)))
    for at in found.lines:
        ax.axvline(at, color="0.7", linewidth=0.8, zorder=0)
    ax.hlines(y, drawn["low"], drawn["high"], color="0.5", linewidth=1)
    color = np.where(drawn["filled"].to_numpy(dtype=bool), "0.1", "white")
    ax.scatter(drawn["value"], y, s=16, color=color, edgecolor="0.1", linewidth=0.8, zorder=3)
    names, places = list(drawn["name"]), list(y)
    if found.whole is not None:
        ax.hlines(bottom, found.whole["low"], found.whole["high"], color="0.1", linewidth=1.6)
        ax.scatter(found.whole["value"], [bottom], s=36, marker="D", color="0.1", zorder=3)
        names, places = [*names, "layer"], [*places, bottom]
    else:
        bottom -= 1.5
    if len(gaps := np.flatnonzero(np.diff(y) > 1.5)):
        ax.axhline(y[gaps[0]] + 1, color="0.8", linewidth=0.8, linestyle=":")
    apart = "\n" if len(found.filled + found.empty) > _LINE else "   "
    key = f"\n● {found.filled}{apart}○ {found.empty}" if found.filled else ""
    ax.set(xlabel=found.label + key, ylabel=found.kind, ylim=(bottom + 0.8, -0.8))
    ax.set_title("; ".join(note), fontsize="medium")
    if found.log:
        ax.set_xscale("log")
    name_rows(ax, places, names, height=bottom + 1.6)
    return ax


def _places(found: Rows, most: int) -> tuple[pd.DataFrame, NDArray[np.float64], list[str]]:
    """Rows to draw, where, with a gap between two ends, and what was left out."""
    table = found.table[np.isfinite(found.table["value"])]
    if found.ordered:
        table = table.sort_values("value", ascending=False, kind="stable")
    left_out = len(found.table) - len(table)
    note = [f"undefined units left out: {left_out}"] if left_out else []
    n, y = len(table), np.arange(len(table), dtype=float)
    if n > most:
        ends = ("highest", "lowest") if found.ordered else ("first", "last")
        note.insert(0, f"{most - most // 2} {ends[0]} and {most // 2} {ends[1]} of {n} {found.kind or 'row'}s")
        kept = np.r_[0 : most - most // 2, n - most // 2 : n]
        table = table.iloc[kept]
        y = np.arange(most) + np.where(kept >= most - most // 2, 1.0, 0.0)
    return table, y, note
