"""Plots of FedFac's motivating study (Figs. 1 and 2) and theorems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from sklearn.cluster import KMeans

from fedstat._utils import check
from fedstat.motivation.findings import require_finished
from fedstat.ntk.results import ConvergenceResult, GeneralizationResult
from fedstat.plot._figure import (
    RunOrPath,
    caption,
    get_axes,
    gray,
    interval_of_proportion,
    one_legend,
    opened,
    refusal,
)
from fedstat.plot._styles import ordered, styles_of, title_of
from fedstat.results import EntropyResult

CASE = {"iid": "IID", "one-class": "non-IID (one class per client)"}
_COLOUR = {"iid": "#0072b2", "one-class": "#d55e00"}


def unit_order(outputs: xr.DataArray) -> tuple[np.ndarray, int]:
    """Return the order of units in the heat map: two 2-means clusters, by descending mean output within each.

    Parameters
    ----------
    outputs : DataArray (client, unit)
        Mean output of each unit at each client.

    Returns
    -------
    order : int array (unit,)
        Positions of the units; the cluster with the larger outputs comes first.
    n_first : int
        Size of the first cluster.

    Examples
    --------
    >>> unit_order(xr.DataArray([[0.0, 3.0, 0.1, 4.0], [0.2, 3.0, 0.0, 5.0]], dims=("client", "unit")))
    (array([3, 1, 0, 2]), 2)
    """
    x = outputs.transpose("unit", "client").to_numpy()
    cluster = KMeans(2, n_init=10, random_state=0).fit_predict(x)
    mean = x.mean(axis=1)
    larger = cluster == np.argmax([mean[cluster == c].mean() for c in (0, 1)])
    return np.lexsort((-mean, ~larger)), int(larger.sum())


def heatmap(
    outputs: xr.DataArray, *, label: xr.DataArray | None = None, vmax: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a heat map of the output of each unit (row) for each client (column), as FedFac Fig. 1 does.

    Parameters
    ----------
    outputs : DataArray (client, unit)
        ``mean_output`` of one case and one kind of output.
    label : DataArray (client,), optional
        Class of each client; written below the columns if clients are ordered by class.
    vmax : float, optional
        Maximum of the color scale, for figures that share one; by default the largest output.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        A white line with an arrow at either end separates the clusters.
    """
    if not isinstance(outputs, xr.DataArray):
        hint = "Draw a run of fedstat.motivation with plot.papers.fig1."
        raise refusal("papers.heatmap", "a DataArray (client, unit)", outputs, hint)
    ax = get_axes(ax)
    order, first = unit_order(outputs)
    x = outputs.transpose("unit", "client").to_numpy()[order]
    picture = ax.imshow(
        x, aspect="auto", cmap="viridis", vmin=0, vmax=vmax, interpolation="nearest", extent=(0, x.shape[1], len(x), 0)
    )
    exceeds = vmax is not None and x.max() > vmax
    ax.figure.colorbar(picture, ax=ax, label="mean output", extend="max" if exceeds else "neither", pad=0.02)
    ax.set(xlabel="client", ylabel="unit, by 2-means cluster")
    ax.axhline(first, color="white", linewidth=1.4)
    for x0, end in ((0.0, "right"), (1.0, "left")):
        ax.annotate("◂" if end == "left" else "▸", (x0, first), xycoords=("axes fraction", "data"), ha=end, va="center",
                    fontsize="small", annotation_clip=False)  # fmt: skip
    classes = None if label is None else label.to_numpy()
    if classes is not None and (np.diff(classes) >= 0).all():
        edges = np.concatenate([[0], np.flatnonzero(np.diff(classes)) + 1, [len(classes)]])
        ax.set_xticks((edges[:-1] + edges[1:]) / 2, [str(c) for c in classes[edges[:-1]]])
        ax.vlines(edges[1:-1], 0, len(x), color="white", linewidth=0.4)
        ax.set_xlabel("clients, by class")
    return ax


def entropies(entropy: xr.Dataset | EntropyResult | RunOrPath, *, outputs: str = "own", ax: Axes | None = None) -> Axes:
    """Draw a histogram of the units' entropies for each case (FedFac Fig. 2), with the error of a single entropy.

    Parameters
    ----------
    entropy : Dataset, run of fedstat.motivation.study, EntropyResult, or path
        ``entropy`` and ``std_error`` (case, unit) for one kind of output. An EntropyResult is drawn as one histogram of
        all its series.
    outputs : {"own", "common"}
        Outputs of a run: "own" over the samples of each client, "common" over samples that all clients share.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Bars above the histograms are the median ± the median standard error of one unit's entropy: estimation error
        widens the histograms by about this amount.
    """
    is_result = isinstance(entropy := opened(entropy), EntropyResult)
    data = _entropies(entropy, outputs).dropna(subset="entropy")
    cases = list(dict.fromkeys(map(str, data["case"])))
    names = [CASE.get(c, c) for c in cases]
    data["case"] = data["case"].map(lambda c: CASE.get(c, c))
    ax = get_axes(ax)
    colours = [_COLOUR.get(c, gray(0.4)) for c in cases]
    sns.histplot(
        data, x="entropy", hue="case", hue_order=names, palette=colours, binwidth=0.1, element="step", alpha=0.3, ax=ax
    )
    for hatched in ax.collections[:1]:  # drawn last first
        hatched.set_hatch("////")
    top = ax.get_ylim()[1]
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        units = data[data["case"] == name]
        ax.errorbar(
            units["entropy"].median(), top * (1.04 + 0.05 * i), xerr=units["std_error"].median(), color=colour,
            capsize=3, marker="|",
        )  # fmt: skip
    error = "; bar: median ± median standard error" if data["std_error"].notna().any() else ""
    label = f"entropy (nats){error}" if is_result else "entropy over clients (nats)"
    ax.set(xlabel=label, ylabel="series" if is_result else "units", ylim=(0, top * (1.06 + 0.05 * len(cases))))
    ax.axvline(0, color=gray(0.6), linewidth=0.8, zorder=0)
    words = "median ± standard error of one unit's entropy"
    bar = Line2D([], [], color=gray(0.3), marker="|", markersize=8)
    drawn = legend.legend_handles if (legend := ax.get_legend()) is not None else []
    handles = [*(handle for handle in drawn if handle is not None), bar]
    if not is_result:  # above the axes, where it hides neither histograms nor bars
        ax.legend(handles, [*names, words], frameon=False, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    elif legend is not None:
        legend.remove()
    return ax


def _entropies(entropy: object, outputs: str) -> pd.DataFrame:
    """Return a table with the columns case, entropy and std_error, one row per unit and case."""
    if isinstance(entropy, EntropyResult):
        return entropy.tidy().rename(columns={"estimate": "entropy"}).assign(case="all")
    if isinstance(entropy, xr.DataTree) and "dispersion" in entropy.children:
        dispersion = _study(entropy, "entropies")["dispersion"].to_dataset()
        kinds = dispersion["outputs"].to_numpy().tolist()
        entropy = dispersion.sel(outputs=check.choice("outputs", outputs, kinds))
    if not isinstance(entropy, xr.Dataset):
        raise refusal("entropies", "the result of knn_entropy, a run of fedstat.motivation, or its dispersion", entropy)
    return entropy[["entropy", "std_error"]].to_dataframe().reset_index()


def relation(
    run: RunOrPath, *, case: str, method: str = "pa", outputs: str = "own", on: str = "weights", ax: Axes | None = None
) -> Axes:
    """Draw the rank of each unit's communality against its entropy, with their Spearman correlation.

    Parameters
    ----------
    run : DataTree or path
        Run of :func:`fedstat.motivation.study`.
    case : str
        Partition of the data.
    method : str
        Factoring method of the communality, one of the run's.
    outputs : {"own", "common"}
        Outputs over the samples of each client, or over samples that all clients share.
    on : {"weights", "updates"}
        Arrays whose communality is drawn.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
    """
    run = _study(run, "papers.relation")
    entropy, nu, rho = (run[name].to_dataset() for name in ("dispersion", "split", "relation"))
    check.choice("case", case, entropy["case"].to_numpy().tolist())
    check.choice("method", method, nu["method"].to_numpy().tolist())
    check.choice("outputs", outputs, entropy["outputs"].to_numpy().tolist())
    check.choice("on", on, nu["on"].to_numpy().tolist())
    ax, selection = get_axes(ax), {"case": case, "on": on, "method": method}
    rank = nu["communality"].sel(selection).to_series().rank(pct=True)
    ax.scatter(
        entropy["entropy"].sel(case=case, outputs=outputs), rank, s=18, linewidth=0, alpha=0.7,
        color=_COLOUR.get(case, gray(0.4)),
    )  # fmt: skip
    correlation = float(rho["spearman"].sel(selection).sel(outputs=outputs))
    title = f"{CASE.get(case, case)}\n{method}: Spearman correlation {correlation:+.2f}"
    ax.set(xlabel="entropy over clients (nats)", ylabel=f"rank of communality $\\nu$\nof the {on}")
    ax.set_title(title, fontsize="medium")
    return ax


def fig1(run: RunOrPath, *, outputs: str = "own") -> Figure:
    """Draw the heat maps of all cases side by side with one color scale and a caption (FedFac Fig. 1).

    Parameters
    ----------
    run : DataTree or path
        Run of :func:`fedstat.motivation.study`.
    outputs : {"own", "common"}
        Outputs over the samples of each client, or over samples that all clients share.

    Returns
    -------
    matplotlib Figure
    """
    run = _study(run, "papers.fig1")
    data = run["outputs"].to_dataset().sel(outputs=check.choice("outputs", outputs, ("own", "common")))
    n = data.sizes["case"]
    figure, axes = plt.subplots(1, n, figsize=(5 * n, 5), squeeze=False, layout="constrained")
    for ax, case in zip(axes[0], data["case"].values, strict=True):
        part = data.sel(case=case)
        heatmap(part["mean_output"], label=part["label"], vmax=_vmax(data), ax=ax).set_title(CASE[case])
    samples = "the client's training samples" if outputs == "own" else "an evaluation set that all clients share"
    caption(
        figure,
        f"Output: mean over {samples}. Rows: units in two 2-means clusters by descending mean output, the cluster with "
        "the larger outputs on top; arrows and a white line mark the border.",
        "Columns: clients; if each client has one class, white lines separate the classes. The panels share a color "
        "scale up to the 99.5% quantile; a pointed end means that some outputs exceed it.",
        motivation_origin(run),
    )
    return figure


def fig2(run: RunOrPath) -> Figure:
    """Draw histograms of entropies for outputs over client samples and common samples, with a caption (FedFac Fig. 2).

    Parameters
    ----------
    run : DataTree or path
        Run of :func:`fedstat.motivation.study`.

    Returns
    -------
    matplotlib Figure
        Left, as in the paper, a unit's output is its mean over the client's samples; right, over a common evaluation
        set.
    """
    run = _study(run, "papers.fig2")
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.6), sharey=True, layout="constrained")
    titles = {"own": "the client's samples", "common": "a common evaluation set"}
    for ax, (outputs, title) in zip(axes, titles.items(), strict=True):
        entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=ax).set_title(f"outputs over {title}")
    one_legend(figure, axes)
    caption(
        figure,
        "Each unit has one entropy, that of its mean outputs over clients; an output with entropy below 0 is more "
        "concentrated than a uniform distribution of width 1.",
        "Bars above: median ± median standard error of one unit's entropy; peaks closer than this can be estimation "
        "error.",
        motivation_origin(run),
    )
    return figure


def motivation_grid(run: RunOrPath, *, outputs: str = "own") -> Figure:
    """Draw heat maps, histograms of entropies, and communality by every method against entropy in one figure.

    Parameters
    ----------
    run : DataTree or path
        Run of :func:`fedstat.motivation.study`.
    outputs : {"own", "common"}
        Outputs over the samples of each client, or over samples that all clients share.

    Returns
    -------
    matplotlib Figure
    """
    run = _study(run, "papers.motivation_grid")
    data = run["outputs"].to_dataset().sel(outputs=check.choice("outputs", outputs, ("own", "common")))
    cases, methods = data["case"].values, run["split"].to_dataset()["method"].values
    figure = plt.figure(figsize=(5.4 * len(cases), 8.5 + 2.8 * len(methods)), layout="constrained")
    grid = figure.add_gridspec(2 + len(methods), len(cases), height_ratios=(1.8, 1.3, *[1] * len(methods)))
    entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=figure.add_subplot(grid[1, :]))
    for i, case in enumerate(cases):
        part = data.sel(case=case)
        ax = figure.add_subplot(grid[0, i])
        heatmap(part["mean_output"], label=part["label"], vmax=_vmax(data), ax=ax).set_title(CASE[case])
        for j, method in enumerate(methods, start=2):
            relation(run, case=case, method=method, outputs=outputs, on="updates", ax=figure.add_subplot(grid[j, i]))
    return figure


def motivation_origin(run: RunOrPath) -> str:
    """Return the sizes and the origin of a study in one line, as a caption."""
    attrs = opened(run).attrs
    config: dict[str, Any] = json.loads(attrs["config"])
    scale = f"{config['data']}, C = {config['clients']}, {config['hidden']} hidden units"
    training = f"{config['local_epochs']} epochs, batch {config['batch_size']}, Adam {config['lr']:g}"
    return f"{scale}; {training}, seed {config['seed']}; {attrs['source']} {attrs['revision']}".strip()


def _vmax(data: xr.Dataset) -> float:
    """Return the maximum of a color scale that the cases share and that a few large outputs do not stretch."""
    return float(np.quantile(data["mean_output"], 0.995))


def _study(run: object, figure: str) -> xr.DataTree:
    """Return the study, opened if it is a path; raise an error for anything else, or if it is not finished."""
    run = opened(run)
    if not isinstance(run, xr.DataTree) or not {"outputs", "dispersion"} <= set(run.children):
        raise refusal(figure, "a run of fedstat.motivation", run)
    return require_finished(run)


def _lines(table: pd.DataFrame, names: Mapping[str, str], x: str, *, ax: Axes) -> None:
    """Draw a line for each column in ``names`` on logarithmic axes, with ticks at the values of ``x``.

    With only two values of ``x``, points are not joined, because nothing is known between them. The legend stands below
    the axes.
    """
    table = table.rename(columns=dict(names))
    long = table.melt(id_vars=x, value_vars=list(names.values()), var_name="name", value_name="y")
    joined = table[x].nunique() > 2
    sns.lineplot(
        long, x=x, y="y", hue="name", style="name", markers=["o", "X", "s", "P", "D"], dashes=joined, markersize=6,
        palette="colorblind", linestyle="-" if joined else "none", ax=ax,
    )  # fmt: skip
    ax.set(xscale="log", yscale="log")
    ticks = sorted(set(table[x]))
    ax.set_xticks(ticks, [f"{v:g}" for v in ticks])
    ax.set_xticks([], minor=True)
    if not joined:
        ax.margins(x=0.3)
    sns.move_legend(
        ax, "upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, title=None, frameon=False, fontsize="small"
    )


def convergence(result: ConvergenceResult | RunOrPath, *, width: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw ‖y − h(t)‖² / ‖y − h(0)‖² by round: mean and range over replicates, and Theorem 1's bound.

    Parameters
    ----------
    result : ConvergenceResult, or a stored one as a DataTree or path
    width : int, optional
        Width of the hidden layers; by default the largest of each method.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If the result has no run of this width.
    """
    table = _convergence(result, "convergence").tidy().dropna(subset="loss")
    if width is not None:
        check.choice("width", width, sorted(set(table["width"])))
    ax = get_axes(ax, (5, 4))
    relative = table.groupby(["method", "width", "replicate"])[["loss", "bound"]].transform(lambda v: v / v.iloc[0])
    table = table.assign(loss=relative["loss"], bound=relative["bound"])
    is_replicated = table["replicate"].nunique() > 1
    styles = styles_of(table["method"])
    for method in ordered(table["method"]):
        rows, color = table[table["method"] == method], styles[method].colour
        rows = rows[rows["width"] == (rows["width"].max() if width is None else width)]
        sns.lineplot(
            rows,
            x="round",
            y="loss",
            color=color,
            errorbar=("pi", 100),
            label=title_of(method),
            ax=ax,
        )
        if rows["bound"].notna().any():
            sns.lineplot(rows, x="round", y="bound", color=color, linestyle="--", errorbar=None, ax=ax)
    ax.set(yscale="log", xlabel="round t", ylabel="‖y − h(t)‖² / ‖y − h(0)‖²")
    handles, labels = ax.get_legend_handles_labels()
    key: dict[str, Line2D | Patch] = {"bound of Theorem 1": Line2D([], [], color=gray(0.4), linestyle="--")}
    key |= {"range over replicates": Patch(color=gray(0.6), alpha=0.4)} if is_replicated else {}
    ax.legend(
        [*handles, *key.values()], [*labels, *key], loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2,
        frameon=False, fontsize="small",
    )  # fmt: skip
    return ax


def freezing(result: ConvergenceResult | RunOrPath, *, ax: Axes | None = None) -> Axes:
    """Draw the relative changes of FedSplit's kernels and activation patterns by width.

    Parameters
    ----------
    result : ConvergenceResult, or a stored one as a DataTree or path
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Changes during training, and differences between the kernels at initialization and at infinite width.
    """
    result = _convergence(result, "freezing")
    ax = get_axes(ax, (5, 4))
    names = {
        "gap_shared": "‖H(0)ˢ − H∞ˢ‖ / ‖H∞ˢ‖",
        "gap_personal": "‖H(0)ᵖ − H∞ᵖ‖ / ‖H∞ᵖ‖",
        "drift_shared": "max ‖H(t)ˢ − H(0)ˢ‖ / ‖H∞ˢ‖",
        "drift_personal": "max ‖H(t)ᵖ − H(0)ᵖ‖ / ‖H∞ᵖ‖",
        "flipped": "activation patterns flipped",
    }
    _lines(result.by_setting().query("method == 'fedsplit'"), names, "width", ax=ax)
    ax.set(xlabel="width m1 = m2", ylabel="relative change")
    return ax


def generalization(result: GeneralizationResult | RunOrPath, *, x: str = "clients", ax: Axes | None = None) -> Axes:
    """Draw the bound of Theorem 2, its complexity term and the observed test loss; above 1 (gray) a bound is vacuous.

    Parameters
    ----------
    result : GeneralizationResult, or a stored one as a DataTree or path
    x : {"clients", "n"}
        Number of clients or of samples per client.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        The test loss of the networks has 95% t intervals of the mean over replicates.

    Raises
    ------
    ValueError
        If ``x`` is another name.
    """
    label = {"clients": "clients C", "n": "samples per client n"}[check.choice("x", x, ("clients", "n"))]
    if isinstance(result := opened(result), xr.DataTree):
        result = GeneralizationResult.from_datatree(result)
    if not isinstance(result, GeneralizationResult):
        raise refusal("generalization", "the result of fedstat.ntk.generalization, or a store of it", result)
    ax = get_axes(ax, (5, 4))
    names = {
        "bound": "bound",
        "complexity": "complexity term",
        "test": "test loss, network",
        "test_limit": "test loss, infinite width",
        "zero": "test loss of predicting 0",
    }
    table = result.by_setting()
    _lines(table, names, x, ax=ax)
    tests = result.data["test"].transpose("setting", "replicate").to_numpy()
    limits = [interval_of_proportion(x) if np.isfinite(x).all() else (np.nan, np.nan) for x in tests]
    low, high = np.transpose(limits)
    ax.vlines(table[x], low, high, color=ax.get_lines()[list(names).index("test")].get_color(), linewidth=2, alpha=0.5)
    bottom, top = ax.get_ylim()
    ax.axhspan(1, top, color=gray(0.94), linewidth=0, zorder=0)
    ax.set_ylim(bottom, top)
    ax.text(0.98, 1.06, "bound > 1: vacuous", transform=ax.get_yaxis_transform(), ha="right", va="bottom",
            fontsize="small", color=gray(0.35))  # fmt: skip
    ax.set(xlabel=label, ylabel="loss min(|h − y|, 1), and its bound")
    return ax


def _convergence(result: object, figure: str) -> ConvergenceResult:
    """Return the result, from itself or from its store."""
    result = opened(result)
    if isinstance(result, xr.DataTree):
        return ConvergenceResult.from_datatree(result)
    if not isinstance(result, ConvergenceResult):
        raise refusal(figure, "the result of fedstat.ntk.convergence, or a store of it", result)
    return result
