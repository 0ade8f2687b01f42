"""Plots of runs of the trainer, and of gradient inversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedstat._utils import check
from fedstat.plot._figure import given, interval, literal, looks, ordered, over_runs, refusal
from fedstat.results import ComparisonResult
from fedstat.results.leakage import LeakageResult
from fedstat.study import summary
from fedstat.study.collect import about

HIGHLIGHT = "fedfac-dynamic"
_SHOWN = 5


def clients(data: Any, *, highlight: str = HIGHLIGHT, ax: Axes | None = None) -> Axes:
    """Accuracies of all clients, one box per method, in the order of all figures (FedFac Fig. 8).

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``method`` and ``accuracy``: one row per client (and seed) of one setting. With ``seed`` the mean has an
        interval. Of runs, accuracy is the mean over the last 10 rounds.
    highlight : str
        Method whose box is filled; those of others are pale.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        Boxes are quartiles, whiskers reach to 1.5 times their distance, points lie beyond; the white dot is the mean,
        its line Student's 95 % interval over seeds, cut off where there is no client.
    """
    data = _table(data, "clients", summary.clients)
    _needs(data, "method", "accuracy")
    ax = given(ax)
    order, styles = ordered(data["method"]), looks(data["method"])
    for y, m in enumerate(order):
        own, colour = data[data["method"] == m].dropna(subset="accuracy"), styles[m].colour
        ax.boxplot(
            own["accuracy"].to_numpy(), positions=[y], orientation="horizontal", widths=0.62, patch_artist=True,
            boxprops={"facecolor": to_rgba(colour, 0.9 if m == highlight else 0.35), "edgecolor": colour},
            medianprops={"color": "0.1"}, whiskerprops={"color": colour}, capprops={"color": colour},
            flierprops={"marker": ".", "markersize": 3, "markerfacecolor": colour, "markeredgecolor": "none"},
        )  # fmt: skip
        low, high = interval(own.groupby("seed")["accuracy"].mean()) if "seed" in own else (np.nan, np.nan)
        mean = own["accuracy"].mean()
        ax.errorbar(
            mean, y, xerr=[[mean - low], [high - mean]], color="0.1", marker="o", markerfacecolor="white",
            markersize=4, elinewidth=1.4, zorder=4,
        )  # fmt: skip
    ax.set_yticks(range(len(order)), [literal(about(m).title) for m in order])
    ax.set(xlabel="test accuracy of a client", ylim=(len(order) - 0.5, -0.5))
    span = data["accuracy"].agg(["min", "max"])
    ax.set_xlim(span["min"] - 0.03 * np.ptp(span), span["max"] + 0.03 * np.ptp(span))
    ax.grid(axis="x", color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def loss_curves(data: Any, *, ax: Axes | None = None) -> Axes:
    """Training loss over rounds, one line per method, with bands of 95 % intervals over seeds (FedFac Fig. 9).

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``round``, ``train_loss``, ``method``, ``seed`` of one setting.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Thick lines are means over seeds, thin ones the seeds (if no more than five). Bands need three seeds; they are
        wide where seeds are few, and cut off at the axes.
    """
    return _curves(_table(data, "loss_curves", summary.curve), "train_loss", "training loss", ax)


def accuracy_curves(data: Any, *, ax: Axes | None = None) -> Axes:
    """Test accuracy over rounds, one line per method, with bands of 95 % intervals over seeds.

    Parameters
    ----------
    data : DataFrame, run, list of runs, or dict of name to run
        ``round``, ``accuracy``, ``method``, ``seed`` of one setting: the rounds that were evaluated.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Thick lines are means over seeds, thin ones the seeds (if no more than five). Bands need three seeds; they are
        wide where seeds are few, and cut off at the axes.
    """
    return _curves(
        _table(data, "accuracy_curves", partial(summary.curve, name="accuracy")), "accuracy", "test accuracy", ax
    )


def _curves(data: pd.DataFrame, name: str, label: str, ax: Axes | None) -> Axes:
    """Means over seeds of one metric by round, in a method's own colour, line style and marker."""
    _needs(data, "round", name, "method", "seed")
    ax, names = given(ax), ordered(data["method"])
    styles, seeds = looks(names), data["seed"].nunique()
    shown = {m: literal(m) for m in names}
    sns.lineplot(
        data.assign(method=data["method"].map(shown)), x="round", y=name, hue="method", style="method",
        hue_order=[*shown.values()], style_order=[*shown.values()],
        palette={shown[m]: own.colour for m, own in styles.items()},
        dashes={shown[m]: own.dashes or "" for m, own in styles.items()},
        errorbar=interval if seeds > 2 else None, err_kws={"alpha": 0.15, "linewidth": 0}, linewidth=1.8, ax=ax,
    )  # fmt: skip
    if 1 < seeds <= _SHOWN:
        for (method, _), own in data.groupby(["method", "seed"]):
            ax.plot(own["round"], own[name], color=styles[str(method)].colour, linewidth=0.6, alpha=0.8)
    low, high = data[name].min(), data[name].max()
    if high > low:
        ax.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
    ax.set(xlabel="round", ylabel=label)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if (legend := ax.get_legend()) is not None:
        handles = [handle for handle in legend.legend_handles if handle is not None]
        ax.legend(handles, [literal(about(m).title) for m in names], frameon=False)
    return ax


def _table(data: Any, figure: str, of_run: Callable[[Any], pd.DataFrame]) -> pd.DataFrame:
    """Table of runs, or the table that was given."""
    found = data if isinstance(data, pd.DataFrame) else over_runs(data, of_run)
    if found is None:
        raise refusal(figure, "a run, a list of runs, {name: run} or a table", data)
    return found


def _needs(data: pd.DataFrame, *columns: str) -> None:
    for column in columns:
        if column not in data.columns:
            check.choice("a column of data", column, [str(c) for c in data.columns])


def differences(
    data: pd.DataFrame | ComparisonResult, *, methods: Sequence[str] = (), margin: float = 0.0, ax: Axes | None = None
) -> Axes:
    """Differences of accuracy from a reference in several settings, with their intervals.

    Parameters
    ----------
    data : DataFrame or ComparisonResult
        ``label``, ``method``, ``difference``, ``low``, ``high``: one row per setting and method. Settings are drawn in
        order of appearance. NaN limits draw no interval. Of a comparison, the simultaneous intervals.
    methods : sequence of str
        Names in the order of their places; by default those of the data. Colours and markers are the methods' own.
    margin : float
        Differences within ± ``margin`` do not matter: a grey band.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Methods of one setting stand side by side.
    """
    if isinstance(data, ComparisonResult):
        columns = {"term": "method", "estimate": "difference", "sim_conf_low": "low", "sim_conf_high": "high"}
        data = data.tidy().rename(columns=columns).assign(label=f"less {data.reference}")
    if not isinstance(data, pd.DataFrame):
        raise refusal("differences", "the result of compare, or a table", data)
    _needs(data, "label", "method", "difference", "low", "high")
    ax = given(ax)
    labels, found = (list(dict.fromkeys(data[name])) for name in ("label", "method"))
    names, styles = list(methods) or found, looks(found)
    for method in found:
        i, own, drawn = names.index(method), data[data["method"] == method], styles[method]
        at = own["label"].map(labels.index) + 0.66 * ((i + 0.5) / len(names) - 0.5)
        _points(own, at, "difference", ax, label=literal(about(method).title), color=drawn.colour, marker=drawn.marker)
    if margin:
        ax.axhspan(-margin, margin, color="0.9", zorder=0)
    ax.axhline(0, color="0.4", linewidth=0.8)
    _settings(ax, labels)
    ax.set_ylabel("difference of test accuracy")
    ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=len(found), columnspacing=1)
    return ax


def shares(data: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Personal share of every layer in several settings, first layer light, last dark.

    Parameters
    ----------
    data : DataFrame
        ``label``, ``layer``, ``place`` (0 for the first layer of the network), ``personal``, ``low``, ``high``: one row
        per setting and layer. NaN limits draw no interval.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
        Layers of one setting stand side by side, in the order of the network, below their names; one half is marked.
        Intervals are cut off at 0 and 1; a share that is estimated below 0 is drawn there.
    """
    if not isinstance(data, pd.DataFrame):
        raise refusal("shares", "a table with the columns label, layer, place, personal, low and high", data,
                      "Of a single run, plot.profile draws the same.")  # fmt: skip
    _needs(data, "label", "layer", "place", "personal", "low", "high")
    ax = given(ax)
    labels, shades = list(dict.fromkeys(data["label"])), sns.color_palette("crest", as_cmap=True)
    for number, label in enumerate(labels):
        own = data[data["label"] == label].sort_values("place")
        own["low"] = own["low"].clip(lower=own["personal"].clip(upper=0))
        own["high"] = own["high"].clip(upper=own["personal"].clip(lower=1))
        for i, name in enumerate(own["layer"]):
            at, one = number + 0.86 * ((i + 0.5) / len(own) - 0.5), own.iloc[[i]]
            colour = shades(i / max(1, len(own) - 1))
            _points(one, pd.Series([at], index=one.index), "personal", ax, color=colour, marker="o")
            ax.text(at, 1.03, literal(name), rotation=90, ha="center", va="bottom", fontsize="x-small", color=colour)
    ax.axhline(0.5, color="0.4", linewidth=0.8, linestyle="--", zorder=0)
    _settings(ax, labels)
    ax.set(ylabel="personal share", yticks=np.arange(0, 1.01, 0.25))
    ax.set_ylim(min(0.0, data["personal"].min()) - 0.03, 1.25)
    return ax


def _points(data: pd.DataFrame, at: pd.Series, value: str, ax: Axes, **look: Any) -> None:
    """Points with intervals where there are any."""
    reach = np.abs(data[["low", "high"]].to_numpy(dtype=float).T - data[value].to_numpy(dtype=float))
    ax.errorbar(at, data[value], yerr=reach, linestyle="none", markersize=4.5, elinewidth=1.2, **look)


def _settings(ax: Axes, labels: list[str]) -> None:
    """Settings below the axis, set apart."""
    ax.set_xticks(range(len(labels)), [literal(label) for label in labels])
    plt.setp(ax.get_xticklabels(), rotation=30, ha="right", rotation_mode="anchor")
    for edge in range(1, len(labels)):
        ax.axvline(edge - 0.5, color="0.92", linewidth=0.8, zorder=0)
    ax.set_xlim(-0.5, len(labels) - 0.5)


def leakage(result: LeakageResult, *, labels: str | None = None, ax: Axes | None = None) -> Axes:
    """PSNR of recovered images by round, with intervals over clients, and the PSNR of the guess without gradients.

    Parameters
    ----------
    result : LeakageResult
    labels : {"given", "inferred"}, optional
        Whether the attacker knows the classes; the first in the result by default.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        One line per run; dashed, in its colour, the mean image of the class that the attacker knows or infers.
    """
    mode = _mode(result, labels, "leakage")
    ax = given(ax)
    table = result.tidy()
    runs = list(dict.fromkeys(table["run"]))
    rounds = np.unique(table["round"])
    step = np.diff(rounds).min() if len(rounds) > 1 else 1
    of_mode = table[table["labels"] == mode]
    guess = of_mode.groupby("round")["guess"].first()
    same = np.allclose(of_mode["guess"], of_mode["round"].map(guess))  # in all runs
    for i, run in enumerate(runs):
        x = table[(table["run"] == run) & (table["labels"] == mode)]
        at = x["round"] + 0.06 * step * (i - (len(runs) - 1) / 2)
        error = np.stack([x["estimate"] - x["conf_low"], x["conf_high"] - x["estimate"]])
        line = ax.errorbar(
            at, x["estimate"], error, marker="o", markersize=4, capsize=2, linewidth=1.2, label=literal(run)
        )[0]
        if not same:
            ax.plot(at, x["guess"], color=line.get_color(), linestyle="--", linewidth=1)
    ax.plot(
        rounds if same else [], guess if same else [], color="0.3", linestyle="--", linewidth=1,
        label="guess, no gradient",
    )  # fmt: skip
    ax.set_xticks(rounds)
    ax.set(xlabel="rounds done", ylabel="PSNR in dB", title=f"labels {mode}")
    ax.legend(frameon=False, fontsize="small")
    return ax


def leakage_grid(result: LeakageResult, *, labels: str | None = None) -> Figure:
    """For every run the original beside the recovered image of the best and the median case, and PSNR by round."""
    mode, runs = _mode(result, labels, "leakage_grid"), list(result.data["run"].values)
    figure = plt.figure(figsize=(11, max(4.0, 1.7 * len(runs) + 0.6)), layout="constrained")
    halves = figure.subfigures(1, 2, width_ratios=(1, 1.15), squeeze=False)
    left, right = halves[0]
    axes = left.subplots(len(runs), 4, squeeze=False)
    for row, run in zip(axes, runs, strict=True):
        part = result.data.sel(run=run, labels=mode).stack(case=("round", "client", "image"))
        order = np.argsort(part["psnr"].to_numpy(), kind="stable")
        for pair, name, at in ((row[:2], "best", order[-1]), (row[2:], "median", order[len(order) // 2])):
            case = part.isel(case=int(at))
            originals = result.data["original"].sel(client=case["client"].item()).isel(image=int(case["image"].item()))
            original = originals.sel(run=run) if "run" in originals.dims else originals
            _draw(pair[0], original.to_numpy(), f"{name}: original")
            recovered = case["recovered"].transpose("channel", "row", "column").to_numpy()
            _draw(pair[1], recovered, f"{float(case['psnr']):.1f} dB")
        row[0].set_ylabel(literal(run))
    leakage(result, labels=mode, ax=right.subplots())
    return figure


def _mode(result: LeakageResult, labels: str | None, figure: str) -> str:
    if not isinstance(result, LeakageResult):
        raise refusal(figure, "the result of fedstat.attack.leakage", result)
    known = [str(mode) for mode in result.data["labels"].values]
    if labels is not None and labels not in known:
        raise ValueError(f"labels must be one of {known}, but got {labels!r}")
    return labels or known[0]


def _draw(ax: Axes, image: np.ndarray, title: str) -> None:
    """An image (channel, row, column), in colours if it has three channels."""
    shown = np.moveaxis(image, 0, -1) if len(image) == 3 else image[0]
    ax.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    ax.set_title(title, fontsize="small")
    ax.set(xticks=[], yticks=[])
