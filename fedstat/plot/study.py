"""Plots of studies: grids of accuracies, and the leaderboard."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
from fedstat.fl.losses import SCORES, Score
from fedstat.plot._figure import (
    RunOrPath,
    caption,
    get_axes,
    gray,
    interval,
    literal,
    one_legend,
    opened,
    panel_grid,
    refusal,
    wrap_panels,
)
from fedstat.plot._styles import Style, ordered, styles_of, title_of
from fedstat.plot.simulation import accuracy, is_study, one_setting, stability, study_dataset
from fedstat.stats import ranking
from fedstat.study.run_metrics import score_in

_REFERENCE = "true"
_BARS = "Bars and bands: 95% t intervals of the mean over replicates; those of proportions are cut off at 0 and 1."
_DIFFERENCES = (
    "Right: differences in accuracy within replicates, because accuracy varies more between replicates than between "
    "splitting rules; methods far from the others stand below, on another scale."
)


def accuracy_grid(*runs: RunOrPath) -> Figure:
    """Draw the accuracy and the paired differences from the true split of every run, as FedFac Fig. 6 does.

    Parameters
    ----------
    *runs : DataTree or path
        Runs of :func:`fedstat.sim.study`. A run where both p and α vary has a row for every α.

    Returns
    -------
    matplotlib Figure
        Left the accuracies, right their differences within replicates; methods far from the others are drawn below
        them, on another scale.
    """
    return _grid(runs, with_stability=False)


def study_grid(run: RunOrPath) -> Figure:
    """Draw accuracy, paired differences from the true split and stability of dynamic FedFac, one row per α.

    Parameters
    ----------
    run : DataTree or path
        Run of :func:`fedstat.sim.study`. If only α varies, it is on the x axis of a single row.

    Returns
    -------
    matplotlib Figure
    """
    return _grid([run], with_stability=True)


def stability_grid(*runs: RunOrPath) -> Figure:
    """Draw the stability of dynamic FedFac, one panel for every p and α with at least two rounds (FedFac Fig. 7).

    Parameters
    ----------
    *runs : DataTree or path
        Runs of :func:`fedstat.sim.study` with dynamic FedFac among the methods.

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ValueError
        If dynamic FedFac was not run, or no second round.
    """
    studies = _studies(runs, "stability_grid")
    results = [study_dataset(run) for run in studies]
    if not all("prop_unchanged" in result for result in results):
        raise ValueError("stability needs dynamic FedFac, which the study did not run: add `dynamic` to its methods.")
    rows = [parts for result in results for row in _rows(result) if (parts := _with_stability(row))]
    if not rows:
        raise ValueError("stability compares rounds, but no study has a second round. Run it with more rounds.")
    lengths = [*map(len, rows)]
    size = (max(2.0, 5 / max(lengths)), 2.1 + 0.9 / len(rows))  # with room for the caption
    figure, axes = panel_grid(lengths, size, sharex=True, sharey=True)
    for ax, part in zip(axes, itertools.chain(*rows), strict=True):
        stability(part, ax=ax).set(ylabel="proportion unchanged")
        ax.set_title(one_setting(part, "p", "alpha"), fontsize="medium")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    lowest = min(0.9, *(float(ax.dataLim.y0) for ax in axes))
    axes[0].set_ylim(lowest, 1 + 0.06 * (1 - lowest))
    meaning = "Unchanged: proportion of units in the same group as one round before."
    caption(figure, f"{meaning} {_BARS}", *origins(studies))
    return figure


def _with_stability(result: xr.Dataset) -> list[xr.Dataset]:
    """Return the parts of a study, by p and α, in which dynamic FedFac ran for two rounds."""
    if "prop_unchanged" not in result:
        return []
    parts = [result.isel(p=[i], alpha=[j]) for i in range(result.sizes["p"]) for j in range(result.sizes["alpha"])]
    return [part for part in parts if part["prop_unchanged"].notnull().any()]


def origins(runs: Iterable[RunOrPath]) -> list[str]:
    """Return the sizes and the revisions of studies for a caption: one line for all studies of equal sizes."""
    revisions: dict[str, dict[str, None]] = {}
    for run in runs:
        attrs = opened(run).attrs
        config = json.loads(attrs["config"])
        scale = f"C = {config['clients']}, d = {config['d']}, m = {config['m']}, n = {config['n_train']} per client"
        replicates = f"{config['replicates']} replicate" + "s" * (config["replicates"] > 1)
        size = f"{scale}; {config['rounds']} rounds, {replicates}, seed {config['seed']}; {attrs['source']}"
        revisions.setdefault(size, {})[attrs["revision"]] = None
    return [f"{size} {', '.join(names)}".strip() for size, names in revisions.items()]


def _studies(runs: Iterable[RunOrPath], figure: str) -> list[xr.DataTree]:
    """Return the studies, opened where they are paths; raise an error for anything else."""
    studies = [opened(run) for run in runs]
    for study in studies:
        if not is_study(study):
            raise refusal(f"papers.{figure}", "runs of fedstat.sim.study", study)
    return studies


def _grid(runs: Sequence[RunOrPath], *, with_stability: bool) -> Figure:
    """Draw rows of panels, with one legend above and one caption below."""
    studies = _studies(runs, "study_grid" if with_stability else "accuracy_grid")
    rows = [row for run in studies for row in _rows(study_dataset(run))]
    is_paired = any(_REFERENCE in row["method"].values for row in rows)
    with_stability = with_stability and any(map(_with_stability, rows))
    columns = 1 + is_paired + with_stability
    figure = plt.figure(figsize=(5 * columns, 3.3 * len(rows) + 1.1), layout="constrained")
    grid, panels = figure.add_gridspec(len(rows), columns), []
    for i, row in enumerate(rows):
        panels.append(accuracy(row, ax=figure.add_subplot(grid[i, 0])))
        if _REFERENCE in row["method"].values:
            panels += _differences(figure, grid[i, 1], row)
        if with_stability and _with_stability(row):
            stability(row, ax=figure.add_subplot(grid[i, columns - 1]))
    one_legend(figure, panels)
    caption(figure, _DIFFERENCES * is_paired, _BARS, *origins(studies))
    return figure


def _differences(figure: Figure, place: SubplotSpec, result: xr.Dataset) -> list[Axes]:
    """Draw the paired differences in one panel, or in two if a few methods would squeeze all others to a line."""
    far = _far_methods(result)
    if not far:
        ax = accuracy(result, relative_to=_REFERENCE, ax=figure.add_subplot(place))
        ax.set_title("")  # stands above the accuracies
        return [ax]
    parts = place.subgridspec(2, 1, height_ratios=(2.4, 1), hspace=0.05)
    top = figure.add_subplot(parts[0])
    bottom = figure.add_subplot(parts[1], sharex=top)
    below = result["method"].isin(far)
    accuracy(result.where(~below), relative_to=_REFERENCE, ax=top)
    accuracy(result.where(below | (result["method"] == _REFERENCE)), relative_to=_REFERENCE, ax=bottom)
    top.tick_params(labelbottom=False)
    top.set(title="", xlabel="")
    bottom.set(title="", ylabel="difference")
    return [top, bottom]


def _far_methods(result: xr.Dataset) -> list[str]:
    """Return methods with more than a third of the largest mean difference, if they are fewer than half."""
    values = result["accuracy"]
    compared = values.sel({"method": values["method"] != _REFERENCE})
    mean = (compared - values.sel({"method": _REFERENCE}, drop=True)).mean("replicate")
    reach = abs(mean).max([dim for dim in mean.dims if dim != "method"])
    far = [str(name) for name in reach["method"].values[(reach > reach.max() / 3).values]]
    return far if 2 * len(far) < reach.size else []


def _rows(result: xr.Dataset) -> list[xr.Dataset]:
    """Return the parts of a study for the rows of a figure: one per α if p varies, else the whole study."""
    if result.sizes["p"] == 1:
        return [result]
    return [result.isel(alpha=[i]) for i in range(result.sizes["alpha"])]


HIGHLIGHTS = ("local", "fedavg", "fedavg+", "ditto", "fedfac-dynamic", "feddecomp", "fedcp")
"""Methods in color in figures of many methods: local and global training, fine-tuning, and the papers' systems."""

_GREY = "0.78"
_ROW = 0.2  # inches
Cost = Literal["round", "bytes", "elapsed"]
_COSTS = {"round": "round", "bytes": "MB uploaded and downloaded by all clients", "elapsed": "seconds of training"}


def critical_difference(
    data: Any,
    *,
    value: str = "accuracy",
    higher_is_better: bool | None = None,
    level: float = 0.95,
    highlight: Sequence[str] = HIGHLIGHTS,
    ax: Axes | None = None,
) -> Axes:
    """Draw mean ranks over scenarios with Nemenyi's critical difference, the best method on top (Demšar 2006).

    Parameters
    ----------
    data : DataFrame (scenario, method)
        Accuracies or other values without gaps, such as means over seeds: one row per scenario, one column per method.
    value : str
        Name of the values, such as "loss".
    higher_is_better : bool, optional
        True if the highest value has rank 1, False for the lowest. By default, the name tells: the highest accuracy,
        AUC, F1, precision, recall or R2; the lowest loss, error, RMSE, MSE, MAE, NLL or perplexity.
    level : float in (0, 1)
        Simultaneous confidence level over all pairs of methods.
    highlight : sequence of str
        Methods in color.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure, high enough for the names.

    Returns
    -------
    matplotlib Axes
        Points are mean ranks, ticks the ranks in single scenarios. A bar on the right spans methods without evidence of
        a difference; the bar on top is the critical difference.

    Raises
    ------
    ValueError
        If there are fewer than two scenarios or three methods, or a value is missing. If there is no
        ``higher_is_better``, and the name of the values is no known measure.
    """
    if not isinstance(data, pd.DataFrame):
        raise refusal("critical_difference", "a table of accuracies (scenario, method)", data)
    sign = 1 if ranking.is_higher_better(value, higher_is_better) else -1
    ranks = ranking.friedman(sign * data.to_numpy())
    critical = ranking.critical_difference(data.shape[1], len(data), level=level)
    order = np.argsort(ranks.mean_ranks, kind="stable")
    names, k = [str(data.columns[i]) for i in order], len(order)
    ax, styles = get_axes(ax, (7.0, 1.4 + _ROW * k)), styles_of(names)
    for y, (i, name) in enumerate(zip(order, names, strict=True)):
        colour = styles[name].colour if name in highlight else gray(0.45)
        ax.plot(ranks.ranks[:, i], np.full(len(data), y), "|", color=_GREY, markersize=6, zorder=1)
        ax.plot(ranks.mean_ranks[i], y, styles[name].marker, color=colour, markersize=6, zorder=3)
    bars = ranking.groups(ranks.mean_ranks, critical)
    row_of = {int(i): y for y, i in enumerate(order)}
    for i, group in enumerate(bars):
        x = k + 1.2 + 0.6 * i
        ax.plot([x, x], [row_of[group[0]] - 0.3, row_of[group[-1]] + 0.3], color=gray(0.2), linewidth=2.2)
    ax.plot([1, 1 + critical], [-1.6, -1.6], color=gray(0.1), linewidth=1.6, marker="|", markersize=7)
    words = f"critical difference {critical:.1f}"
    ax.annotate(words, (1 + critical, -1.6), (5, 0), textcoords="offset points", va="center")
    ax.set_yticks(range(k), [title_of(name) for name in names])
    for label, name in zip(ax.get_yticklabels(), names, strict=True):
        label.set_color(styles[name].colour if name in highlight else gray(0.2))
    ax.set(xlabel=f"rank by {value} in {len(data)} scenarios, 1 is best", ylim=(k - 0.4, -2.4))
    ax.set_xlim(0.3, max(k + 1.2 + 0.6 * len(bars), 1.3 + 1.6 * critical))
    ax.set_xticks([tick for tick in MaxNLocator(8, integer=True).tick_values(1, k) if 1 <= tick <= k])
    ax.grid(axis="y", color=gray(0.94), linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def method_courses(
    data: Any, *, x: Cost = "round", highlight: Sequence[str] = HIGHLIGHTS, ax: Axes | None = None
) -> Axes:
    """Draw the test score over rounds, bytes or seconds, a few methods in color with names, the others in gray.

    Parameters
    ----------
    data : DataFrame
        Rounds of one scenario: ``method``, ``seed``, ``round``, ``accuracy`` (or ``rmse``), and ``bytes`` or
        ``elapsed`` up to each round.
    x : {"round", "bytes", "elapsed"}
        Column on the x axis. Bytes and seconds are means over seeds, on a logarithmic axis.
    highlight : sequence of str
        Methods in color.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Lines are means over seeds. With at least three seeds, methods in color have bands: 95% t intervals of the mean.
    """
    check.choice("x", x, list(_COSTS))
    score = _score_of_table("method_courses", data, "method", "seed", "round", x)
    ax, styles = get_axes(ax), styles_of(data["method"])
    ends = {}
    for name in sorted(ordered(data["method"]), key=lambda name: name in highlight):
        rounds = data[data["method"] == name].groupby("round")
        numbers = np.array(list(rounds.groups))
        cost = rounds[x].mean().to_numpy() / (1e6 if x == "bytes" else 1) if x != "round" else numbers
        mean = rounds[score.name].mean().to_numpy()
        shown = cost > 0 if x != "round" else np.full(len(cost), True)
        if not shown.any():  # a method without communication
            colour = styles[name].colour if name in highlight else _GREY
            ax.axhline(mean[-1], color=colour, linestyle=":", linewidth=1.4)
            ends[name] = (np.nan, mean[-1])
            continue
        if name not in highlight:
            ax.plot(cost[shown], mean[shown], color=_GREY, linewidth=0.8, zorder=1)
            continue
        style = styles[name]
        ax.plot(cost[shown], mean[shown], color=style.colour, linestyle=style.linestyle, linewidth=1.8, zorder=3)
        ends[name] = (cost[-1], mean[-1])
        if data["seed"].nunique() > 2:
            ends_of = partial(interval, lowest=0, highest=score.highest)
            low, high = np.array([ends_of(values) for _, values in rounds[score.name]]).T
            ax.fill_between(cost[shown], low[shown], high[shown], color=style.colour, alpha=0.15, linewidth=0)
    if x != "round":
        scale_cost(ax)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel=_COSTS[x], ylabel=score.long_name)
    _name_ends(ax, {name: end for name, end in ends.items() if name in highlight}, styles)
    return ax


def trade_off(
    data: Any, *, x: Literal["bytes", "elapsed", "worst"] = "bytes", highlight: Sequence[str] = HIGHLIGHTS,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """Draw the score of every method against the cost of training, or the score of the worst clients.

    Parameters
    ----------
    data : DataFrame
        Runs of one scenario: ``method``, ``accuracy`` (or ``rmse``) and the column ``x``. The rows of a method are
        averaged.
    x : {"bytes", "elapsed", "worst"}
        Column on the x axis.
    highlight : sequence of str
        Methods in color with names, in addition to methods that no other method beats in both.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Costs are on a logarithmic axis; a method without communication stands at its left edge.
    """
    check.choice("x", x, ["bytes", "elapsed", "worst"])
    score = _score_of_table("trade_off", data, "method", x)
    ax, styles = get_axes(ax), styles_of(data["method"])
    mean = data.groupby("method")[[x, score.name]].mean()
    cost = mean[x] / (1e6 if x == "bytes" else 1)
    if x != "worst":
        cost = cost.where(cost > 0, cost[cost > 0].min() / 3)
    better = -1 if score.is_error else 1
    good = mean * {x: better if x == "worst" else -1, score.name: better}  # larger is better
    front = [str(name) for name in mean.index if not (good > good.loc[name]).all(axis=1).any()]
    named = [name for name in ordered(mean.index) if name in highlight or name in front]
    for name in mean.index:
        colour = styles[name].colour if name in named else _GREY
        ax.plot(cost[name], mean.loc[name, score.name], styles[name].marker, color=colour, markersize=6)
    quantile = f"{90 if score.is_error else 10}% quantile of {score.title} over clients"
    ax.set(xlabel=quantile if x == "worst" else _COSTS[x], ylabel=score.long_name)
    if x != "worst":
        scale_cost(ax)
    _name_points(ax, {name: (float(cost[name]), float(mean.loc[name, score.name])) for name in named}, styles)
    return ax


def _score_of_table(figure: str, data: Any, *columns: str) -> Score:
    """Return the score of a table; raise ValueError unless it is a table with this and other columns."""
    score = score_in(data) if isinstance(data, pd.DataFrame) else SCORES["classification"]
    _require_columns(figure, data, *columns, score.name)
    return score


def by_setting(data: pd.DataFrame, draw: Callable[..., Axes], *, columns: int = 2, **options: Any) -> Figure:
    """Draw one panel for every scenario of a table.

    Parameters
    ----------
    data : DataFrame
        ``scenario``, the scenario, and the columns that ``draw`` needs.
    draw : callable (data, ax, ...) -> Axes
        Such as :func:`method_courses` or :func:`trade_off`.
    columns : int
        Number of panels side by side.
    **options
        Arguments of ``draw``.

    Returns
    -------
    matplotlib Figure
    """
    check.integer("columns", columns)
    scenarios = list(dict.fromkeys(data["scenario"]))
    figure, axes = panel_grid(wrap_panels(len(scenarios), columns), (5.0, 3.9))
    for ax, scenario in zip(axes, scenarios, strict=True):
        draw(data[data["scenario"] == scenario], ax=ax, **options).set_title(literal(scenario), fontsize="medium")
    return figure


def _require_columns(figure: str, data: Any, *columns: str) -> None:
    """Raise an error unless data is a table with these columns."""
    if not isinstance(data, pd.DataFrame):
        raise refusal(figure, f"a table with the columns {', '.join(columns)}", data)
    for name in columns:
        check.choice("a column of data", name, [str(c) for c in data.columns])


def scale_cost(ax: Axes) -> None:
    """Make the x axis of costs logarithmic, with plain numbers at few ticks."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    subs = (1, 2, 5) if high < 100 * low else (1,)
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]) if high < 6 * low else LogLocator(subs=subs))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def _name_ends(ax: Axes, ends: dict[str, tuple[float, float]], styles: Mapping[str, Style]) -> None:
    """Write names at the right edge, at the height of each line's end, moved where they would overlap."""
    low, high = ax.get_ylim()
    step = 0.055 * (high - low)
    names = sorted(ends, key=lambda name: ends[name][1])
    heights = _spread([ends[name][1] for name in names], step)
    for name, y in zip(names, heights, strict=True):
        ax.annotate(
            title_of(name), (1.02, y), xycoords=("axes fraction", "data"), color=styles[name].colour,
            fontsize="small", va="center", annotation_clip=False,
        )  # fmt: skip


def _name_points(ax: Axes, points: dict[str, tuple[float, float]], styles: Mapping[str, Style]) -> None:
    """Write names at the right edge, with a thin line to each point."""
    low, high = ax.get_ylim()
    names = sorted(points, key=lambda name: points[name][1])
    heights = _spread([points[name][1] for name in names], 0.055 * (high - low))
    for name, y in zip(names, heights, strict=True):
        ax.annotate(
            title_of(name), points[name], (1.04, y), textcoords=("axes fraction", "data"),
            color=styles[name].colour, fontsize="small", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": styles[name].colour, "linewidth": 0.5, "alpha": 0.6},
        )  # fmt: skip


def _spread(values: Sequence[float], step: float) -> np.ndarray:
    """Move increasing values as little as possible, so that neighbors differ by at least a step."""
    index = step * np.arange(len(values))
    shifted = np.asarray(values) - index
    # Least squares under an order constraint: subtract the steps, then pool adjacent violators.
    blocks: list[list[float]] = []
    for x in shifted:
        blocks.append([x])
        while len(blocks) > 1 and np.mean(blocks[-2]) > np.mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    return np.concatenate([np.full(len(b), np.mean(b)) for b in blocks]) + index if len(values) else index
