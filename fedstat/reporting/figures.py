"""Figures of a report, as images that hold all they need."""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat.plot._axes import literal
from fedstat.plot.factor import bin_edges
from fedstat.reporting.document import Figure, shown
from fedstat.study.show import title_of

SIZE = (5.2, 3.5)
"""Inches; at the width of a phone letters of 10 points stay readable."""

FEW = 3
"""With fewer seeds an interval of their mean has less than two degrees of freedom, and is not given."""

_LARGEST = 150_000  # characters of an SVG; beyond it, pixels
_INK, _BAND, _ORANGE = "#1f4e79", "#c5d5e4", "#e69f00"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f]")


def figure(draw: Callable[..., Any], caption: str, *, size: tuple[float, float] = SIZE) -> Figure:
    """A figure of one panel that a function draws.

    Parameters
    ----------
    draw : callable (*, ax)
    caption : str
        What is shown, with the meaning of lines, bands and bars.
    size : (float, float)
        Inches.
    """
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        made = matplotlib.figure.Figure(figsize=size, layout="constrained")
        draw(ax=made.subplots())
        return image(made, caption)


def image(made: matplotlib.figure.Figure, caption: str, *, wide: bool = False) -> Figure:
    """A figure as an image in the page: SVG, or PNG where that is smaller."""
    with warnings.catch_warnings(), mpl.rc_context({"svg.hashsalt": "fedstat"}):
        warnings.simplefilter("ignore", UserWarning)  # names in scripts that the font lacks, or too long for the axes
        try:
            source = _svg(made)
        except ValueError:  # a name that reads as broken mathematics
            for text in made.findobj(Text):
                text.set_parse_math(False)
            source = _svg(made)
        if len(source) <= _LARGEST:
            return Figure(f"data:image/svg+xml;base64,{base64.b64encode(source.encode()).decode()}", caption, wide)
        drawn = io.BytesIO()
        made.savefig(drawn, format="png", dpi=150)
    plt.close(made)
    return Figure(f"data:image/png;base64,{base64.b64encode(drawn.getvalue()).decode()}", caption, wide)


def _svg(made: matplotlib.figure.Figure) -> str:
    drawn = io.StringIO()
    made.savefig(drawn, format="svg", metadata={"Date": None, "Creator": "fedstat"})
    plt.close(made)
    return _CONTROL.sub("", drawn.getvalue()).encode("utf-8", "replace").decode()


def over_clients(rounds: NDArray[Any], mean: NDArray[Any], values: NDArray[Any], label: str, ax: Axes) -> None:
    """Mean of a metric over rounds, and the band of the middle 80 % of clients.

    Parameters
    ----------
    rounds, mean : array (round,)
        Rounds without a value are left out.
    values : array (round, client)
    label : str
        Of the y axis.
    ax : matplotlib Axes
    """
    there = np.isfinite(mean)
    low, high = np.nanquantile(values[there], [0.1, 0.9], axis=1)
    ax.fill_between(rounds[there], low, high, color=_BAND, linewidth=0)
    ax.plot(rounds[there], mean[there], color=_INK, linewidth=1.6, marker="o" if there.sum() < 30 else "", markersize=3)
    _rounds(ax, label)


def over_seeds(draw: Callable[..., Axes], curves: pd.DataFrame, ax: Axes) -> None:
    """Curves of several methods, as ``plot.accuracy_curves`` draws them, with the legend below, where it hides none."""
    draw(curves, ax=ax)
    sns.move_legend(
        ax, "upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize="small", title=None
    )


def sorted_clients(accuracy: NDArray[Any], low: NDArray[Any], high: NDArray[Any], mean: float, ax: Axes) -> None:
    """Accuracy of every client in ascending order, with its interval, and their mean."""
    order = np.argsort(accuracy, kind="stable")
    at = np.arange(1, len(order) + 1)
    ax.vlines(at, low[order], high[order], color=_BAND, linewidth=max(0.6, min(4.0, 160 / len(order))))
    ax.plot(at, accuracy[order], "o", color=_INK, markersize=max(1.5, min(4.0, 160 / len(order))))
    ax.axhline(mean, color="0.5", linestyle="--", linewidth=1)
    ax.set(xlabel="clients, in ascending order", ylabel="test accuracy", ylim=(min(0.5, low.min()) - 0.03, 1.03))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def split_map(shared: NDArray[np.bool_], ax: Axes) -> None:
    """Units (rows) that are shared (dark) in each round, those that are so most often on top."""
    order = np.argsort(-shared.mean(axis=0), kind="stable")
    ax.imshow(
        shared[:, order].T, aspect="auto", interpolation="nearest", cmap=ListedColormap(["#eef2f5", _INK]), vmin=0,
        vmax=1, extent=(0.5, len(shared) + 0.5, shared.shape[1] + 0.5, 0.5),
    )  # fmt: skip
    _rounds(ax, "units")


def split_histogram(values: NDArray[Any], shared: NDArray[np.bool_], threshold: float, label: str, ax: Axes) -> None:
    """Statistic of the units of a layer, by what became of them, with the threshold."""
    known = np.isfinite(values)
    groups = [values[known & shared], values[known & ~shared]]
    edges = bin_edges(values[known], threshold).tolist()
    ax.hist(groups, bins=edges, stacked=True, color=[_INK, _ORANGE], label=["shared", "a client's own"], rwidth=0.94)
    if np.isfinite(threshold):
        ax.axvline(threshold, color="0.2", linestyle="--", linewidth=1, label="threshold")
    ax.set(xlabel=label, ylabel="units")
    ax.legend(frameon=False, fontsize="small")


def units_interval(table: pd.DataFrame, threshold: float, label: str, ax: Axes) -> None:
    """Estimate of every unit in ascending order with its interval; ``estimate``, ``low``, ``high``, ``shared``."""
    found = table.sort_values("estimate", ignore_index=True)
    for flag, colour, name in ((True, _INK, "shared"), (False, _ORANGE, "a client's own")):
        rows = found[found["shared"] == flag]
        ax.vlines(
            rows.index + 1, rows["low"], rows["high"], color=colour, alpha=0.35, linewidth=max(0.6, 90 / len(found))
        )
        ax.plot(rows.index + 1, rows["estimate"], "o", color=colour, markersize=2.5, label=name)
    if np.isfinite(threshold):
        ax.axhline(threshold, color="0.2", linestyle="--", linewidth=1, label="threshold")
    ax.set(xlabel="units, in ascending order", ylabel=label)
    ax.legend(frameon=False, fontsize="small")


def _rounds(ax: Axes, label: str) -> None:
    ax.set(xlabel="round", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def forest(data: pd.DataFrame, label: str, ax: Axes) -> None:
    """Differences with their intervals, one line each: ``method``, ``difference``, ``low``, ``high``."""
    at = np.arange(len(data))
    ax.hlines(at, data["low"], data["high"], color=_INK, linewidth=1.4)
    ax.plot(data["difference"], at, "o", color=_INK, markersize=4.5)
    ax.axvline(0, color="0.5", linewidth=0.9)
    ax.set_yticks(at, [literal(shown(title_of(str(method)))) for method in data["method"]])
    ax.set(xlabel=label, ylim=(-0.6, len(data) - 0.4))
