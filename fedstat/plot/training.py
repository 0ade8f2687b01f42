"""Plots of runs of the trainer, and of gradient inversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.labels import labelled
from fedstat.plot._figure import (
    ResultPath,
    RunOrPath,
    concat_runs,
    get_axes,
    gray,
    interval,
    legend_above,
    literal,
    opened,
    refusal,
    sequential_colors,
    split_of_run,
)
from fedstat.plot._styles import ordered, styles_of, title_of
from fedstat.results import ComparisonResult, LayerResults
from fedstat.results.base import Result
from fedstat.results.leakage import LeakageResult
from fedstat.stats import split as splitting
from fedstat.store import results
from fedstat.study import collect, run_metrics, run_table
from fedstat.study.runs_result import RunsResult

HIGHLIGHT = "fedfac-dynamic"
_SHOWN = 5  # most seeds whose lines are drawn


def client_boxplot(data: Any, *, highlight: str = HIGHLIGHT, ax: Axes | None = None) -> Axes:
    """Draw a box plot of the scores of clients for every method, in the order of all figures (FedFac Fig. 8).

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``method`` and ``accuracy`` (or ``rmse``), one row per client (and seed) of one scenario. With ``seed`` the mean
        has an interval. The score of a run is the mean over the evaluated rounds among its last 10.
    highlight : str
        Method whose box is dark; other boxes are pale.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Boxes are quartiles, whiskers extend up to 1.5 times the interquartile range, and dots are clients beyond. The
        white point is the mean, its line the 95% t interval of the mean over seeds, cut off at the extreme clients.
    """
    data = _to_table(data, "client_boxplot", run_table.clients)
    score = run_metrics.score_in(data)
    _require_columns(data, "method", score.name)
    if data[score.name].isna().all():
        raise ValueError(
            f"there is no {score.title} in the last rounds. Continue unfinished runs with resume=True (--resume)."
        )
    ax = get_axes(ax)
    order, styles = ordered(data["method"]), styles_of(data["method"])
    for y, m in enumerate(order):
        rows, colour = data[data["method"] == m].dropna(subset=score.name), styles[m].colour
        ax.boxplot(
            rows[score.name].to_numpy(), positions=[y], orientation="horizontal", widths=0.62, patch_artist=True,
            boxprops={"facecolor": to_rgba(colour, 0.9 if m == highlight else 0.35), "edgecolor": colour},
            medianprops={"color": gray(0.1)}, whiskerprops={"color": colour}, capprops={"color": colour},
            flierprops={"marker": ".", "markersize": 3, "markerfacecolor": colour, "markeredgecolor": "none"},
        )  # fmt: skip
        by_seed = rows.groupby("seed")[score.name].mean() if "seed" in rows else []
        low, high = interval(by_seed, lowest=0, highest=score.highest)
        mean = rows[score.name].mean()
        ax.errorbar(
            mean, y, xerr=[[mean - low], [high - mean]], color=gray(0.1), marker="o", markerfacecolor=gray(1),
            markersize=4, elinewidth=1.4, zorder=4,
        )  # fmt: skip
    ax.set_yticks(range(len(order)), [title_of(m) for m in order])
    ax.set(xlabel=f"{score.long_name} of a client", ylim=(len(order) - 0.5, -0.5))
    span = data[score.name].agg(["min", "max"])
    ax.set_xlim(span["min"] - 0.03 * np.ptp(span), span["max"] + 0.03 * np.ptp(span))
    ax.grid(axis="x", color=gray(0.9), linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def loss_curves(data: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the training loss over rounds, one line per method, with 95% t intervals over seeds (FedFac Fig. 9).

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``round``, ``train_loss``, ``method``, ``seed`` of one scenario.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Thick lines are means over seeds, thin lines the seeds (if there are at most five). Bands need three seeds; with
        few seeds they are wide, and cut off at the axes.
    """
    return _curves(_to_table(data, "loss_curves", run_table.curve), "train_loss", "training loss", ax)


def score_curves(data: Any, *, ax: Axes | None = None) -> Axes:
    """Draw the test score over rounds, one line per method, with 95% t intervals over seeds.

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``round``, ``accuracy`` (or ``rmse``), ``method``, ``seed`` of the evaluated rounds of one scenario.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Thick lines are means over seeds, thin lines the seeds (if there are at most five). Bands need three seeds; with
        few seeds they are wide, and cut off at the axes.
    """
    table = _to_table(data, "score_curves", lambda run: run_table.curve(run, run_metrics.score_of(run).name))
    score = run_metrics.score_in(table)
    return _curves(table, score.name, score.long_name, ax, highest=score.highest)


def _curves(data: pd.DataFrame, name: str, label: str, ax: Axes | None, *, highest: float = np.inf) -> Axes:
    """Draw means over seeds of a metric from 0 to ``highest`` by round, in the color and line style of each method."""
    _require_columns(data, "round", name, "method", "seed")
    ax, names = get_axes(ax), ordered(data["method"])
    styles, seeds = styles_of(names), data["seed"].nunique()
    shown = {m: literal(m) for m in names}
    sns.lineplot(
        data.assign(method=data["method"].map(shown)), x="round", y=name, hue="method", style="method",
        hue_order=[*shown.values()], style_order=[*shown.values()],
        palette={shown[m]: style.colour for m, style in styles.items()},
        dashes={shown[m]: style.dashes or "" for m, style in styles.items()},
        errorbar=partial(interval, lowest=0, highest=highest) if seeds > 2 else None,
        err_kws={"alpha": 0.15, "linewidth": 0}, linewidth=1.8, ax=ax,
    )  # fmt: skip
    if 1 < seeds <= _SHOWN:
        for (method, _), run in data.groupby(["method", "seed"]):
            ax.plot(run["round"], run[name], color=styles[str(method)].colour, linewidth=0.6, alpha=0.8)
    low, high = data[name].min(), data[name].max()
    if high > low:
        ax.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    ax.set(xlabel="round", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if (legend := ax.get_legend()) is not None:
        handles = [handle for handle in legend.legend_handles if handle is not None]
        ax.legend(handles, [title_of(m) for m in names], frameon=False)
    return ax


def _to_table(data: Any, figure: str, of_run: Callable[[Any], pd.DataFrame]) -> pd.DataFrame:
    """Return data as a table; concatenate the tables of runs."""
    table = data if isinstance(data, pd.DataFrame) else concat_runs(data, of_run)
    if table is None:
        raise refusal(figure, "a run, a list of runs, {name: run} or a table", data)
    return table


def _require_columns(data: pd.DataFrame, *columns: str) -> None:
    """Raise ValueError unless the table has these columns."""
    for column in columns:
        if column not in data.columns:
            check.choice("a column of data", column, [str(c) for c in data.columns])


def rounds(shared: Any, *, ax: Axes | None = None, layer: str | None = None) -> Axes:
    """Draw the similarity of each round's split to the previous split (FedFac Fig. 7) and to the last split.

    Parameters
    ----------
    shared : bool array or DataFrame (round, unit), DataArray with these dims, or a run
        True where a unit is shared; or the node ``run["split/fc1"]`` of a run.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.
    layer : str, optional
        Layer of a run; required if the run splits several layers.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If there are fewer than 2 rounds.
    """
    splits, numbers = _splits_by_round(shared, layer)
    ax = get_axes(ax)
    unchanged = splitting.prop_unchanged(splits[1:], splits[:-1])
    ari = splitting.adjusted_rand(splits[1:], np.broadcast_to(splits[-1], splits[1:].shape))
    ax.plot(numbers[1:], unchanged, color=gray(0.2), marker=".", label="proportion of units in the same group")
    ax.plot(
        numbers[1:], ari, color=gray(0.5), linestyle="--", marker="^", markersize=3,
        label="adjusted Rand index with the last split",
    )  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set(xlabel="round", ylabel="similarity of splits", ylim=(min(0.0, float(ari.min())) - 0.03, 1.03))
    ax.legend(frameon=False)
    return ax


def _splits_by_round(shared: Any, layer: str | None) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return splits (round, unit) and the numbers of the rounds."""
    if isinstance(shared, Result | LayerResults):
        raise refusal("rounds", "splits (round, unit) of bool, or a run with such splits", shared)
    check.unmasked("shared", shared)
    shared = labelled(opened(shared), ("round", "unit"))
    if isinstance(shared, xr.DataTree):
        shared = split_of_run(shared, layer)
    if isinstance(shared, xr.Dataset) and "shared" in shared:
        shared = shared["shared"]
    numbers = None
    if isinstance(shared, xr.DataArray):
        if set(shared.dims) == {"round", "unit"}:
            shared = shared.transpose("round", "unit")
        numbers = shared["round"].to_numpy() if "round" in shared.coords else None
    splits = np.asarray(shared)
    if splits.ndim != 2 or len(splits) < 2:
        raise ValueError(f"shared must have shape (round, unit) with at least 2 rounds, but got {splits.shape}")
    return splits.astype(bool), np.arange(1, len(splits) + 1) if numbers is None else numbers


def differences(
    data: pd.DataFrame | ComparisonResult | ResultPath,
    *,
    methods: Sequence[str] = (),
    margin: float = 0.0,
    value: str = "test accuracy",
    ax: Axes | None = None,
) -> Axes:
    """Draw differences of a score from a reference in several scenarios, with their intervals.

    Parameters
    ----------
    data : DataFrame, ComparisonResult, or path of a saved one
        ``scenario``, ``method``, ``difference``, ``low``, ``high``, one row per scenario and method; scenarios keep
        their order. NaN limits draw no interval. A comparison is drawn with its simultaneous CIs.
    methods : sequence of str
        Methods in the order of their positions; by default the order of the data.
    margin : float
        Half width of a gray band around 0, of differences too small to matter.
    value : str
        Name of the score on the axis; that of a comparison of runs is known.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Methods of one scenario stand side by side.
    """
    if isinstance(data := opened(data), ComparisonResult):
        columns = {"term": "method", "estimate": "difference", "sim_conf_low": "low", "sim_conf_high": "high"}
        value = run_metrics.title_of(data.measure) if isinstance(data, RunsResult) else value
        data = data.tidy().rename(columns=columns).assign(scenario=f"minus {collect.title_of(data.reference)}")
    if not isinstance(data, pd.DataFrame):
        raise refusal("differences", "the result of compare, or a table", data)
    _require_columns(data, "scenario", "method", "difference", "low", "high")
    ax = get_axes(ax)
    scenarios, drawn = (list(dict.fromkeys(data[name])) for name in ("scenario", "method"))
    names, styles = list(methods) or drawn, styles_of(drawn)
    for method in drawn:
        i, rows, style = names.index(method), data[data["method"] == method], styles[method]
        x = rows["scenario"].map(scenarios.index) + 0.66 * ((i + 0.5) / len(names) - 0.5)
        _draw_points(rows, x, "difference", ax, label=title_of(method), color=style.colour, marker=style.marker)
    if margin:
        ax.axhspan(-margin, margin, color=gray(0.9), zorder=0)
    ax.axhline(0, color=gray(0.4), linewidth=0.8)
    _name_scenarios(ax, scenarios)
    ax.set_ylabel(f"difference in {value}")
    legend_above(ax, *ax.get_legend_handles_labels())
    return ax


def shares(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Draw the reliability of client differences by layer in several scenarios, from light to dark layers.

    Parameters
    ----------
    data : DataFrame
        ``scenario``, ``layer``, ``place`` (0 for the first layer of the network), ``reliability``, ``low``, ``high``,
        one row per scenario and layer. NaN limits draw no interval.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Layers of one scenario stand side by side in the order of the network, below their names. The dashed line is at
        0.5. Intervals are cut off at 0 and 1; an estimate outside of this range is drawn at its value.
    """
    if not isinstance(data, pd.DataFrame):
        raise refusal("shares", "a table with the columns scenario, layer, place, reliability, low and high", data,
                      "Draw a single run with plot.profile.")  # fmt: skip
    _require_columns(data, "scenario", "layer", "place", "reliability", "low", "high")
    ax = get_axes(ax)
    scenarios = list(dict.fromkeys(data["scenario"]))
    for number, scenario in enumerate(scenarios):
        layers = data[data["scenario"] == scenario].sort_values("place")
        layers["low"] = layers["low"].clip(lower=layers["reliability"].clip(upper=0))
        layers["high"] = layers["high"].clip(upper=layers["reliability"].clip(lower=1))
        for i, (name, colour) in enumerate(zip(layers["layer"], sequential_colors("crest", len(layers)), strict=True)):
            x, row = number + 0.86 * ((i + 0.5) / len(layers) - 0.5), layers.iloc[[i]]
            _draw_points(row, pd.Series([x], index=row.index), "reliability", ax, color=colour, marker="o")
            ax.text(x, 1.03, literal(name), rotation=90, ha="center", va="bottom", fontsize="x-small", color=gray(0.25))
    ax.axhline(0.5, color=gray(0.4), linewidth=0.8, linestyle="--", zorder=0)
    _name_scenarios(ax, scenarios)
    ax.set(ylabel="reliability", yticks=np.arange(0, 1.01, 0.25))
    ax.set_ylim(min(0.0, data["reliability"].min()) - 0.03, 1.25)
    return ax


def _draw_points(data: pd.DataFrame, x: pd.Series, value: str, ax: Axes, **style: Any) -> None:
    """Draw points with their intervals; NaN limits draw none."""
    reach = np.abs(data[["low", "high"]].to_numpy(dtype=float).T - data[value].to_numpy(dtype=float))
    ax.errorbar(x, data[value], yerr=reach, linestyle="none", markersize=4.5, elinewidth=1.2, **style)


def _name_scenarios(ax: Axes, scenarios: list[str]) -> None:
    """Write the scenarios below the axis, with lines between them."""
    ax.set_xticks(range(len(scenarios)), [literal(scenario) for scenario in scenarios])
    plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    for edge in range(1, len(scenarios)):
        ax.axvline(edge - 0.5, color=gray(0.92), linewidth=0.8, zorder=0)
    ax.set_xlim(-0.5, len(scenarios) - 0.5)


def leakage(result: LeakageResult | RunOrPath, *, labels: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the PSNR of recovered images by round, with intervals over clients, and that of the class-mean image.

    Parameters
    ----------
    result : LeakageResult, or a stored one as a DataTree or path
    labels : {"given", "inferred"}, optional
        "given" if the attacker knows the labels, "inferred" if it infers them; by default the first in the result.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        One line per run. The dashed line is the PSNR of the class-mean image, which needs no gradient; it has the color
        of the run, or is gray if it is equal in all runs.
    """
    result = _leakage(result, "leakage")
    mode = _label_mode(result, labels)
    ax = get_axes(ax)
    table = result.tidy()
    runs = list(dict.fromkeys(table["run"]))
    rounds = np.unique(table["round"])
    step = np.diff(rounds).min() if len(rounds) > 1 else 1
    of_mode = table[table["labels"] == mode]
    class_mean = of_mode.groupby("round")["class_mean_psnr"].first()
    is_common = np.allclose(
        of_mode["class_mean_psnr"], of_mode["round"].map(class_mean)
    )  # one value per round in all runs
    styles = styles_of(runs)
    for i, run in enumerate(runs):
        rows = of_mode[of_mode["run"] == run]
        x = rows["round"] + 0.06 * step * (i - (len(runs) - 1) / 2)
        error = np.stack([rows["estimate"] - rows["conf_low"], rows["conf_high"] - rows["estimate"]])
        ax.errorbar(
            x, rows["estimate"], error, color=styles[run].colour, marker=styles[run].marker, markersize=5, capsize=2,
            linewidth=1.2, label=title_of(run),
        )  # fmt: skip
        if not is_common:
            ax.plot(x, rows["class_mean_psnr"], color=styles[run].colour, linestyle="--", linewidth=1)
    ax.plot(
        rounds if is_common else [], class_mean if is_common else [], color=gray(0.3), linestyle="--", linewidth=1,
        label="class-mean image (no gradients)",
    )  # fmt: skip
    ax.set_xticks(rounds)
    ax.set(xlabel="completed rounds", ylabel="PSNR (dB)", title=f"labels {mode}")
    ax.legend(frameon=False, fontsize="small")
    return ax


def leakage_grid(result: LeakageResult | RunOrPath, *, labels: str | None = None) -> Figure:
    """Draw original and recovered images of the best and the median case of each run, and the PSNR by round."""
    result = _leakage(result, "leakage_grid")
    mode, runs = _label_mode(result, labels), list(result.data["run"].values)
    figure = plt.figure(figsize=(11, max(4.0, 1.7 * len(runs) + 0.6)), layout="constrained")
    halves = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)
    images, curves = halves[0]
    axes = images.subplots(len(runs), 4, squeeze=False)
    for row, run in zip(axes, runs, strict=True):
        part = result.data.sel(run=run, labels=mode).stack(case=("round", "client", "image"))
        order = np.argsort(part["psnr"].to_numpy(), kind="stable")
        for pair, name, index in ((row[:2], "best", order[-1]), (row[2:], "median", order[len(order) // 2])):
            case = part.isel(case=int(index))
            originals = result.data["original"].sel(client=case["client"].item()).isel(image=int(case["image"].item()))
            original = originals.sel(run=run) if "run" in originals.dims else originals
            _draw_image(pair[0], original.to_numpy(), f"{name}: original")
            recovered = case["recovered"].transpose("channel", "row", "column").to_numpy()
            _draw_image(pair[1], recovered, f"{float(case['psnr']):.1f} dB")
        row[0].set_ylabel(title_of(run))
    leakage(result, labels=mode, ax=curves.subplots())
    return figure


def _leakage(result: object, figure: str) -> LeakageResult:
    """Return the result, from itself or from its store."""
    if isinstance(result := opened(result), xr.DataTree) and "leakage" in result.children:
        return results.leakage(result)
    if not isinstance(result, LeakageResult):
        raise refusal(figure, "the result of fedstat.attack.leakage, or a store of it", result)
    return result


def _label_mode(result: LeakageResult, labels: str | None) -> str:
    """Return "given" or "inferred": the argument, or by default the first in the result."""
    modes = [str(mode) for mode in result.data["labels"].values]
    if labels is not None and labels not in modes:
        raise ValueError(f"labels must be one of {modes}, but got {labels!r}.")
    return labels or modes[0]


def _draw_image(ax: Axes, image: np.ndarray, title: str) -> None:
    """Draw an image (channel, row, column), in color if it has three channels."""
    shown = np.moveaxis(image, 0, -1) if len(image) == 3 else image[0]
    ax.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, fontsize="small")
    ax.set(xticks=[], yticks=[])
