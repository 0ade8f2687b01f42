"""Plots of studies: grids of accuracies, and the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from fedstat._utils import check
from fedstat.plot._figure import Look, caption, given, interval, literal, looks, one_legend, ordered, refusal
from fedstat.plot.simulation import accuracy, is_study, one_setting, stability, study_dataset
from fedstat.stats import ranking
from fedstat.study.collect import title_of

_REFERENCE = "true"
_BARS = "Bars and bands: Student's 95 % intervals over replicates"
_DIFFERENCES = (
    "Right: differences in accuracy within replicates, which differ from one another more than the ways to split do; "
    "what lies far off stands below, on its own scale."
)


def accuracy_grid(*runs: xr.DataTree) -> Figure:
    """Accuracy, and paired differences from ``true``, of every run: FedFac Fig. 6 for one's own p and α.

    Parameters
    ----------
    *runs : DataTree
        What :func:`fedstat.sim.study` returns. A run where both p and α vary has a row for every α.

    Returns
    -------
    matplotlib Figure
        Left the accuracies, right their differences within replicates; methods that lie far from the others are
        drawn below them, on a scale of their own.
    """
    return _grid(runs, moving=False)


def study_grid(run: xr.DataTree) -> Figure:
    """Accuracy, paired difference from ``true`` and stability of dynamic FedFac: one row for every α.

    Parameters
    ----------
    run : DataTree
        What :func:`fedstat.sim.study` returns. Where only α varies, it is the x axis of a single row.

    Returns
    -------
    matplotlib Figure
    """
    return _grid([run], moving=True)


def stability_grid(*runs: xr.DataTree) -> Figure:
    """Stability of dynamic FedFac, one panel for every p and α (FedFac Fig. 7).

    Parameters
    ----------
    *runs : DataTree
        What :func:`fedstat.sim.study` returns, with dynamic FedFac among the methods.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        If dynamic FedFac was not run.
    """
    for run in runs:
        if not is_study(run):
            raise refusal("stability_grid", "runs of fedstat.sim.study", run)
    results = [study_dataset(run) for run in runs]
    if not all("same_state" in result for result in results):
        raise ValueError("stability is that of dynamic FedFac: add `dynamic` to the methods of the study")
    rows = [row for result in results for row in _rows(result)]
    columns = max(row.sizes["p"] * row.sizes["alpha"] for row in rows)
    figure, axes = plt.subplots(
        len(rows), columns, figsize=(max(2 * columns, 5), 2.1 * len(rows) + 0.9), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for line, row in zip(axes, rows, strict=True):
        parts = [row.isel(p=[i], alpha=[j]) for i in range(row.sizes["p"]) for j in range(row.sizes["alpha"])]
        for ax, part in zip(line, parts, strict=False):
            stability(part, ax=ax).set_title(one_setting(part, "p", "alpha"), fontsize="medium")
            ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            ax.set_ylabel("share that keeps its state" if ax is line[0] else "")
        for ax in line[len(parts) :]:
            ax.remove()
    lowest = min(float(ax.dataLim.y0) for ax in figure.axes if np.isfinite(ax.dataLim.y0))
    axes[0, 0].set_ylim(lowest, 1 + 0.03 * (1 - lowest))
    caption(
        figure,
        *dict.fromkeys(map(origin, runs)),
        "Neurons of dynamic FedFac that are shared, or personal, as in the round before. Bands are cut off at 1, "
        "which no share exceeds.",
    )
    return figure


def origin(run: xr.DataTree) -> str:
    """Scale and origin of a study in one line, to be set under a figure made from it."""
    config, attrs = json.loads(run.attrs["config"]), run.attrs
    scale = f"C = {config['clients']}, d = {config['d']}, m = {config['m']}, n = {config['n_train']} a client"
    replicates = f"{config['replicates']} replicate" + "s" * (config["replicates"] > 1)
    runs = f"{config['rounds']} rounds, {replicates}, seed {config['seed']}"
    return f"{_BARS}; {scale}; {runs}; {attrs['source']} {attrs['revision']}".strip()


def _grid(runs: Sequence[xr.DataTree], *, moving: bool) -> Figure:
    """Rows of panels, with one legend above and one caption below."""
    for run in runs:
        if not is_study(run):
            raise refusal("study_grid" if moving else "accuracy_grid", "runs of fedstat.sim.study", run)
    rows = [row for run in runs for row in _rows(study_dataset(run))]
    paired = any(_REFERENCE in row["method"].values for row in rows)
    moving = moving and any("same_state" in row for row in rows)
    columns = 1 + paired + moving
    figure = plt.figure(figsize=(5 * columns, 3.3 * len(rows) + 1.1), layout="constrained")
    grid, panels = figure.add_gridspec(len(rows), columns), []
    for i, row in enumerate(rows):
        panels.append(accuracy(row, ax=figure.add_subplot(grid[i, 0])))
        if _REFERENCE in row["method"].values:
            panels += _differences(figure, grid[i, 1], row)
        if moving and "same_state" in row:
            stability(row, ax=figure.add_subplot(grid[i, columns - 1]))
    one_legend(figure, panels)
    caption(figure, _DIFFERENCES * paired, *dict.fromkeys(map(origin, runs)))
    return figure


def _differences(figure: Figure, place: SubplotSpec, result: xr.Dataset) -> list[Axes]:
    """Paired differences in one panel, or in two where a few methods would squeeze all others to a line."""
    far = _far(result)
    if not far:
        return [accuracy(result, relative_to=_REFERENCE, ax=figure.add_subplot(place))]
    parts = place.subgridspec(2, 1, height_ratios=(2.4, 1), hspace=0.05)
    top = figure.add_subplot(parts[0])
    bottom = figure.add_subplot(parts[1], sharex=top)
    below = result["method"].isin(far)
    accuracy(result.where(~below), relative_to=_REFERENCE, ax=top)
    accuracy(result.where(below | (result["method"] == _REFERENCE)), relative_to=_REFERENCE, ax=bottom)
    top.tick_params(labelbottom=False)
    top.set_xlabel("")
    bottom.set(title="", ylabel="\n".join(far))
    return [top, bottom]


def _far(result: xr.Dataset) -> list[str]:
    """Methods beside which the differences of all others are small; none where these are not a few."""
    values = result["accuracy"]
    others = values.sel({"method": values["method"] != _REFERENCE})
    mean = (others - values.sel({"method": _REFERENCE}, drop=True)).mean("replicate")
    reach = abs(mean).max([dim for dim in mean.dims if dim != "method"])
    far = [str(name) for name in reach["method"].values[(reach > reach.max() / 3).values]]
    return far if 2 * len(far) < reach.size else []


def _rows(result: xr.Dataset) -> list[xr.Dataset]:
    if result.sizes["p"] == 1:
        return [result]
    return [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]


HIGHLIGHTS = ("local", "fedavg", "fedavg+", "ditto", "fedfac-dynamic", "feddecomp", "fedcp")
"""Methods that figures of many methods show in colour: the two ends, fine-tuning, and the systems of the papers."""

_GREY = "0.78"
_ROW = 0.2  # inches
Cost = Literal["round", "bytes", "elapsed"]
_COSTS = {"round": "round", "bytes": "MB sent up and down by all clients", "elapsed": "seconds of training"}


def critical_difference(
    data: Any, *, level: float = 0.95, highlight: Sequence[str] = HIGHLIGHTS, ax: Axes | None = None
) -> Axes:
    """Mean ranks over settings with Nemenyi's critical difference, best method above (Demšar 2006, in rows).

    Parameters
    ----------
    data : DataFrame (setting, method)
        Accuracies, such as means over seeds: a row for every setting, a column for every method, no gaps.
    level : float in (0, 1)
        Of all pairs of methods together.
    highlight : sequence of str
        Methods in their own colours.
    ax : matplotlib Axes, optional
        By default a new figure, high enough for the names.

    Returns
    -------
    matplotlib Axes
        Large points are mean ranks, small ones the ranks in the settings. Every bar on the right spans methods that
        are not shown to differ; the bar above is the critical difference.

    Raises
    ------
    ValueError
        If there are fewer than two settings or three methods, or a value is missing.
    """
    if not isinstance(data, pd.DataFrame):
        raise refusal("critical_difference", "a table of accuracies (setting, method)", data)
    found = ranking.friedman(data.to_numpy())
    apart = ranking.critical_difference(data.shape[1], len(data), level=level)
    order = np.argsort(found.mean_ranks, kind="stable")
    names, k = [str(data.columns[i]) for i in order], len(order)
    ax, styles = given(ax, (7.0, 1.4 + _ROW * k)), looks(names)
    for y, (i, name) in enumerate(zip(order, names, strict=True)):
        colour = styles[name].colour if name in highlight else "0.45"
        ax.plot(found.ranks[:, i], np.full(len(data), y), "|", color=_GREY, markersize=6, zorder=1)
        ax.plot(found.mean_ranks[i], y, styles[name].marker, color=colour, markersize=6, zorder=3)
    bars = ranking.groups(found.mean_ranks, apart)
    place = {int(i): y for y, i in enumerate(order)}
    for at, group in enumerate(bars):
        x = k + 1.2 + 0.6 * at
        ax.plot([x, x], [place[group[0]] - 0.3, place[group[-1]] + 0.3], color="0.2", linewidth=2.2)
    ax.plot([1, 1 + apart], [-1.6, -1.6], color="0.1", linewidth=1.6, marker="|", markersize=7)
    ax.annotate(f"critical difference {apart:.1f}", (1 + apart, -1.6), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(k), [literal(title_of(name)) for name in names])
    for label, name in zip(ax.get_yticklabels(), names, strict=True):
        label.set_color(styles[name].colour if name in highlight else "0.2")
    ax.set(xlabel=f"rank by accuracy in {len(data)} settings, 1 is best", ylim=(k - 0.4, -2.4))
    ax.set_xlim(0.3, max(k + 1.2 + 0.6 * len(bars), 1.3 + 1.6 * apart))
    ax.set_xticks([at for at in MaxNLocator(8, integer=True).tick_values(1, k) if 1 <= at <= k])
    ax.grid(axis="y", color="0.94", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def method_courses(
    data: Any, *, x: Cost = "round", highlight: Sequence[str] = HIGHLIGHTS, ax: Axes | None = None
) -> Axes:
    """Test accuracy over rounds, bytes or seconds: a few methods in colour and named, all others grey.

    Parameters
    ----------
    data : DataFrame
        Of one setting: ``method``, ``seed``, ``round``, ``accuracy``, and ``bytes`` or ``elapsed`` up to each round.
    x : {"round", "bytes", "elapsed"}
        Bytes and seconds are on a logarithmic axis, means over seeds.
    highlight : sequence of str
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Lines are means over seeds; bands, of the methods in colour and from three seeds on, Student's 95 % intervals.
    """
    _needs("method_courses", data, "method", "seed", "round", "accuracy", check.choice("x", x, list(_COSTS)))
    ax, styles = given(ax), looks(data["method"])
    ends = {}
    for name in sorted(ordered(data["method"]), key=lambda name: name in highlight):
        own = data[data["method"] == name].groupby("round")
        at = own[x].mean().to_numpy() / (1e6 if x == "bytes" else 1) if x != "round" else np.array(list(own.groups))
        mean = own["accuracy"].mean().to_numpy()
        shown = at > 0 if x != "round" else np.full(len(at), True)
        if not shown.any():  # nothing is ever sent
            colour = styles[name].colour if name in highlight else _GREY
            ax.axhline(mean[-1], color=colour, linestyle=":", linewidth=1.4)
            ends[name] = (np.nan, mean[-1])
            continue
        if name not in highlight:
            ax.plot(at[shown], mean[shown], color=_GREY, linewidth=0.8, zorder=1)
            continue
        style = styles[name]
        ax.plot(at[shown], mean[shown], color=style.colour, linestyle=style.linestyle, linewidth=1.8, zorder=3)
        ends[name] = (at[-1], mean[-1])
        if data["seed"].nunique() > 2:
            low, high = np.array([interval(values) for _, values in own["accuracy"]]).T
            ax.fill_between(at[shown], low[shown], high[shown], color=style.colour, alpha=0.15, linewidth=0)
    if x != "round":
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel=_COSTS[x], ylabel="test accuracy")
    _name_ends(ax, {name: end for name, end in ends.items() if name in highlight}, styles)
    return ax


def trade_off(
    data: Any, *, x: Literal["bytes", "elapsed", "worst"] = "bytes", highlight: Sequence[str] = HIGHLIGHTS,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Accuracy of every method against what its training costs, or against the accuracy of the worst-off clients.

    Parameters
    ----------
    data : DataFrame
        Of one setting: ``method``, ``accuracy`` and the column ``x``; several rows of a method are averaged.
    x : {"bytes", "elapsed", "worst"}
    highlight : sequence of str
        Methods in colour and named. So are those that no other method beats in both.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Costs are on a logarithmic axis; a method that sends nothing stands at its left edge.
    """
    check.choice("x", x, ["bytes", "elapsed", "worst"])
    _needs("trade_off", data, "method", "accuracy", x)
    ax, styles = given(ax), looks(data["method"])
    mean = data.groupby("method")[[x, "accuracy"]].mean()
    cost = mean[x] / (1e6 if x == "bytes" else 1)
    if x != "worst":
        cost = cost.where(cost > 0, cost[cost > 0].min() / 3)
        ax.set_xscale("log")
    sign = 1 if x == "worst" else -1
    front = [
        str(name)
        for name in mean.index
        if not ((sign * mean[x] > sign * mean.loc[name, x]) & (mean["accuracy"] > mean.loc[name, "accuracy"])).any()
    ]
    named = [name for name in ordered(mean.index) if name in highlight or name in front]
    for name in mean.index:
        colour = styles[name].colour if name in named else _GREY
        ax.plot(cost[name], mean.loc[name, "accuracy"], styles[name].marker, color=colour, markersize=6)
    label = "accuracy that a tenth of the clients stay below" if x == "worst" else _COSTS[x]
    ax.set(xlabel=label, ylabel="test accuracy")
    _name_points(ax, {name: (float(cost[name]), float(mean.loc[name, "accuracy"])) for name in named}, styles)
    return ax


def by_setting(data: pd.DataFrame, draw: Callable[..., Axes], *, columns: int = 2, **options: Any) -> Figure:
    """One panel for every setting of a table.

    Parameters
    ----------
    data : DataFrame
        ``label``, the setting, and what ``draw`` needs.
    draw : callable (data, ax, ...) -> Axes
        Such as :func:`method_courses` or :func:`trade_off`.
    columns : int
        Panels side by side.
    **options
        Of ``draw``.

    Returns
    -------
    matplotlib Figure
    """
    check.integer("columns", columns)
    labels = list(dict.fromkeys(data["label"]))
    columns = min(columns, len(labels))
    rows = -(-len(labels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.0 * columns, 3.9 * rows), squeeze=False, layout="constrained"
    )  # fmt: skip
    for ax, label in zip(axes.flat, labels, strict=False):
        draw(data[data["label"] == label], ax=ax, **options).set_title(literal(label), fontsize="medium")
    for ax in axes.flat[len(labels) :]:
        ax.remove()
    return figure


def _needs(figure: str, data: Any, *columns: str) -> None:
    if not isinstance(data, pd.DataFrame):
        raise refusal(figure, f"a table with the columns {', '.join(columns)}", data)
    for name in columns:
        check.choice("a column of data", name, [str(c) for c in data.columns])


def _name_ends(ax: Axes, ends: dict[str, tuple[float, float]], styles: Mapping[str, Look]) -> None:
    """Names at the right edge, at the height of each line's end, moved apart where they would overlap."""
    low, high = ax.get_ylim()
    step = 0.055 * (high - low)
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = _apart([ends[name][1] for name in names], step)
    for name, y in zip(names, heights, strict=True):
        ax.annotate(
            literal(title_of(name)), (1.02, y), xycoords=("axes fraction", "data"), color=styles[name].colour,
            fontsize="small", va="center", annotation_clip=False,
        )  # fmt: skip


def _name_points(ax: Axes, points: dict[str, tuple[float, float]], styles: Mapping[str, Look]) -> None:
    """Names at the right edge with a thin line to each point."""
    low, high = ax.get_ylim()
    names = sorted(points, key=lambda name: points[name][1])
    heights = _apart([points[name][1] for name in names], 0.055 * (high - low))
    for name, y in zip(names, heights, strict=True):
        ax.annotate(
            literal(title_of(name)), points[name], (1.04, y), textcoords=("axes fraction", "data"),
            color=styles[name].colour, fontsize="small", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": styles[name].colour, "linewidth": 0.5, "alpha": 0.6},
        )  # fmt: skip


def _apart(values: Sequence[float], step: float) -> np.ndarray:
    """Increasing values, moved as little as needs be to lie a step apart."""
    index = step * np.arange(len(values))
    shifted = np.asarray(values) - index
    # Least squares under order: pool adjacent violators, after taking off the steps.
    blocks: list[list[float]] = []
    for x in shifted:
        blocks.append([x])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.concatenate([np.full(len(b), np.mean(b)) for b in blocks]) + index if len(values) else index
