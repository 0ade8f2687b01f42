"""Plots of clients: clusters, similarity, profiles, and their data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from fedstat import fl
from fedstat._utils import check
from fedstat._utils.check import numpy_of
from fedstat._utils.labels import classes as classes_of
from fedstat.data.targets import strata
from fedstat.labelled.inputs import layers_of, open_if_run
from fedstat.labelled.layer import read_layer
from fedstat.plot._figure import (
    fill,
    get_axes,
    gray,
    legend_above,
    literal,
    measure_of_run,
    name_ticks,
    opened,
    panel_grid,
    plain,
    refusal,
    sequential_colors,
    sole,
    wrap_panels,
)
from fedstat.results import ComponentsResult, LayerResults
from fedstat.results.base import Result
from fedstat.results.between_clients import ClientClustersResult
from fedstat.study import run_metrics

_SEQUENTIAL, _DIVERGING = "viridis", "vlag"


def client_similarity(result: ClientClustersResult, *, vmax: float | None = None, ax: Axes | None = None) -> Axes:
    """Draw a heat map of the similarity of clients in the order of the tree, with clusters and known groups.

    Parameters
    ----------
    result : ClientClustersResult
        Result of :func:`fedstat.client_clusters`.
    vmax : float, optional
        Similarity of the darkest red, for figures that share a scale of colors from -vmax to vmax. By default the
        largest absolute similarity of different clients; if no similarity is negative, the colors instead span the
        similarities.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Frames mark the clusters, a strip on the left the known groups. The diagonal, which is 1, is gray.
    """
    if not isinstance(result := sole(opened(result)), ClientClustersResult):
        raise refusal("client_similarity", "the result of client_clusters", result)
    ax, order = get_axes(ax), result.order
    n = len(order)
    matrix = off_diagonal(result.similarity[np.ix_(order, order)])
    scale = color_scale(matrix, vmax)
    picture = draw_matrix(ax, matrix, scale)
    ax.figure.colorbar(picture, ax=ax, label="cosine similarity", pad=0.02, shrink=0.85)
    edges = np.flatnonzero(np.diff(result.cluster[order])) + 1
    frame = "black" if scale["cmap"] == _DIVERGING else "white"
    for low, high in zip([0, *edges], [*edges, n], strict=True):
        ax.add_patch(Rectangle((low - 0.5, low - 0.5), high - low, high - low, fill=False, color=frame, lw=1.5))
    name_ticks(ax.xaxis, range(n), result.clients[order])
    ax.set_yticks([])
    ax.set(xlabel=fill("client, in the order of the tree; frames: clusters", ax), xlim=(-0.5, n - 0.5))
    if result.groups is not None:
        _draw_groups(ax, result.groups[order])
    return ax


def _draw_groups(ax: Axes, groups: NDArray[Any]) -> None:
    """Draw the group of each row as a strip on the left, with a legend above."""
    names, codes = np.unique(groups, return_inverse=True)
    colours = sns.color_palette("colorblind" if len(names) <= 10 else "viridis", len(names))
    strip = ax.inset_axes((-0.06, 0, 0.04, 1), sharey=ax)
    strip.imshow(
        codes[:, None], cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto",
        extent=(0, 1, len(codes) - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    strip.set_xticks([])
    strip.set_yticks([])
    strip.set_ylabel("known group")
    legend_above(ax, [Patch(color=colour) for colour in colours], [plain(name) for name in names])


def color_scale(values: ArrayLike, vmax: float | None = None) -> dict[str, Any]:
    """Return colors for ``imshow``: diverging and symmetric about 0, if a value is negative or the maximum is given.

    Other values have sequential colors from the smallest to the largest.
    """
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if vmax is None and low >= 0:
        return {"cmap": _SEQUENTIAL, "vmin": low, "vmax": high}
    limit = max(-low, high) if vmax is None else vmax
    return {"cmap": _DIVERGING, "vmin": -limit, "vmax": limit}


def draw_matrix(ax: Axes, matrix: NDArray[Any], scale: Mapping[str, Any]) -> AxesImage:
    """Draw a matrix of clients with a gray diagonal, gray where values are missing."""
    ax.set_facecolor(gray(0.75))
    return ax.imshow(matrix, interpolation="nearest", **scale)


def similarity_over_rounds(
    similarity: xr.DataArray | xr.DataTree, *, rounds: Sequence[int] | None = None, order: Sequence[int] | None = None
) -> Figure:
    """Draw the similarity matrices of clients at several rounds side by side, with one scale of colors.

    Parameters
    ----------
    similarity : DataArray (round, client, other), or a run that holds one such array
        For example a measure of ``run["measures"]``, or ``run["mixing/weight"]``; NaN for clients that were not
        selected.
    rounds : sequence of int, optional
        Rounds to draw; by default up to six evenly spaced rounds with values, from the first to the last.
    order : sequence of int, optional
        Positions of clients, such as ``client_clusters(...).order``; by default the stored order.

    Returns
    -------
    matplotlib Figure
        If a value is negative, colors are symmetric about 0. Missing values are gray, and so are the diagonals,
        which would hide the differences between clients.

    Raises
    ------
    ValueError
        If the dims differ, no round has a value, a round is missing, or ``order`` is no permutation of the clients.
    """
    if isinstance(similarity := opened(similarity), xr.DataTree):
        similarity = measure_of_run(similarity, {"round", "client", "other"})
    if not isinstance(similarity, xr.DataArray):
        raise refusal("similarity_over_rounds", "a DataArray (round, client, other) or a run", similarity)
    if set(similarity.dims) != {"round", "client", "other"}:
        raise ValueError(f"similarity must have the dims round, client, other, but got {similarity.dims}")
    x = similarity.transpose("round", "client", "other")
    stored = x["round"].to_numpy()[np.isfinite(x.to_numpy()).any((1, 2))].tolist()
    if not stored:
        raise ValueError("similarity must have a value in some round, but is NaN in all rounds.")
    if rounds is None:
        index = np.linspace(0, len(stored) - 1, min(6, len(stored))).round().astype(int)
        rounds = [stored[i] for i in np.unique(index)]
    rounds = [check.choice("rounds", number, stored) for number in rounds]
    order = range(x.sizes["client"]) if order is None else order
    positions = np.asarray(order)
    if sorted(positions.tolist()) != list(range(x.sizes["client"])):
        raise ValueError(f"order must hold each of the {x.sizes['client']} positions of clients once, but got {order}")
    matrices = [off_diagonal(x.sel(round=r).to_numpy()[np.ix_(positions, positions)]) for r in rounds]
    figure, axes = panel_grid(wrap_panels(len(rounds), 3 if len(rounds) > 4 else 4), (2.8, 2.7))
    for ax, number, matrix in zip(axes, rounds, matrices, strict=True):
        picture = draw_matrix(ax, matrix, color_scale(matrices))
        ax.set_title(f"round {number}", fontsize="medium")
        ax.set(xticks=[], yticks=[])
    axes[0].set_ylabel("client")
    axes[-1].set_xlabel("other client")
    figure.colorbar(picture, ax=axes, label=_label(similarity), shrink=0.85)
    return figure


def client_lines(measure: xr.DataArray | xr.DataTree, *, ax: Axes | None = None) -> Axes:
    """Draw a measure of each client over rounds as thin lines, with the median and quartiles over clients.

    Parameters
    ----------
    measure : DataArray (round, client), or a run
        For example a measure of ``run["measures"]``; NaN for clients that were not selected. A run stands for the test
        accuracy (or RMSE) of its clients.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Under partial participation, a client's line joins the rounds that selected it. Band and median of a round are
        over its selected clients.

    Raises
    ------
    ValueError
        If the dims differ, or all values are NaN.
    """
    measure = opened(measure)
    if isinstance(measure, xr.DataTree) and "metrics" in measure.children:
        score = run_metrics.score_of(measure)
        measure = measure[f"metrics/{score.name}"].assign_attrs(long_name=f"{score.long_name} of a client")
    if not isinstance(measure, xr.DataArray):
        raise refusal("client_lines", "a DataArray (round, client) or a run of the trainer", measure)
    if set(measure.dims) != {"round", "client"}:
        raise ValueError(f"measure must have the dims round and client, but got {measure.dims}")
    x = measure.transpose("round", "client")
    values, rounds = x.to_numpy(), x["round"].to_numpy()
    has_value = np.isfinite(values).any(1)
    if not has_value.any():
        raise ValueError("measure must have a value in some round, but is NaN in all rounds.")
    ax, colour = get_axes(ax), sns.color_palette("colorblind")[0]
    for by_round in values.T:
        is_finite = np.isfinite(by_round)
        ax.plot(rounds[is_finite], by_round[is_finite], color=gray(0.75), linewidth=0.6, zorder=1)
    low, median, high = np.nanquantile(values[has_value], [0.25, 0.5, 0.75], axis=1)
    ax.fill_between(
        rounds[has_value], low, high, color=colour, alpha=0.25, linewidth=0, label="middle half of clients"
    )  # fmt: skip
    ax.plot(rounds[has_value], median, color=colour, linewidth=1.8, label="median client")
    ax.plot([], [], color=gray(0.75), linewidth=0.8, label="clients")
    ax.set(xlabel="round", ylabel=_label(measure))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize="small")
    sns.despine(ax=ax)
    return ax


def off_diagonal(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """Set the diagonal to NaN, unless the matrix has one row."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix) if len(matrix) > 1 else matrix


def _label(values: xr.DataArray) -> str:
    """Return the name of the values with their units."""
    units = values.attrs.get("units", "")
    return str(values.attrs.get("long_name", values.name or "")) + (f" ({units})" if units not in ("", "1") else "")


def weights(
    weights: Any,
    *,
    baseline: Literal["mean"] | None = "mean",
    layer: str | None = None,
    checkpoint: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draw a heat map of how far the weights of each unit lie from the mean over clients, in every client.

    A color is the root mean square, over the weights of a unit, of a client's weight minus the mean over clients. A
    unit that is equal in all clients is a dark column, a client that differs in all units a light row. Norms alone
    would hide this: two clients may have equal norms and opposite weights.

    Parameters
    ----------
    weights : array, tensor or DataArray (client, unit, weight...), or an object that holds layers
        As in :func:`fedstat.split`; of a run, as clients predict, after averaging.
    baseline : {"mean"}, optional
        What is subtracted first: the mean over clients, or with None nothing; colors are then the sizes of weights.
    layer : str, optional
        Layer to draw; required if there are several.
    checkpoint : int, optional
        Round of a run; by default the last.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        Clients are rows and units columns, in their order. Rows of clients without weights, as those that were not
        selected, are empty.

    Raises
    ------
    TypeError
        If ``weights`` are a result or a table.
    ValueError
        If there are several layers and ``layer`` is None, or as :func:`fedstat.split`.
    """
    if isinstance(weights, Result | LayerResults | pd.DataFrame):
        raise refusal("weights", "weights (client, unit, weight...), a run, files or state_dicts", weights)
    check.choice("baseline", baseline, ("mean", None))
    weights = open_if_run(weights)
    is_run = isinstance(weights, xr.DataTree) and "weights" in weights.children
    layers = layers_of(weights, layer, checkpoint, "aggregated" if is_run else None).layers
    if len(layers) != 1:
        raise ValueError(f"layer must be one of {', '.join(layers)}, but got {layer!r}. Pass one as layer=.")
    w = read_layer(next(iter(layers.values())))
    clients, units = w.clients, w.units
    mean: Any = 0.0
    if baseline is not None:
        sums = [np.nansum(numpy_of(block), axis=0, dtype=float) for _, block in w.blocks()]
        counts = [np.isfinite(numpy_of(block)).sum(axis=0) for _, block in w.blocks()]
        mean = np.sum(sums, axis=0) / np.maximum(np.sum(counts, axis=0), 1)
    size = np.concatenate([np.sqrt(np.square(numpy_of(block) - mean).mean(axis=2)) for _, block in w.blocks()])
    width, height = (float(np.clip(1.6 + 0.16 * n, 3.2, 13.0)) for n in (len(units) + 8, len(clients)))
    ax = get_axes(ax, (width, height))
    picture = ax.imshow(size, cmap=_SEQUENTIAL, vmin=0, aspect="auto", interpolation="nearest")
    label = "distance from the mean over clients" if baseline else "size of the weights"
    ax.figure.colorbar(picture, ax=ax, label=f"{label} (root mean square)", pad=0.02)
    name_ticks(ax.xaxis, range(len(units)), units)
    name_ticks(ax.yaxis, range(len(clients)), clients)
    ax.set(xlabel="unit", ylabel="client", title=literal(next(iter(layers))))
    return ax


_COLUMNS = ("layer", "round", "reliability", "conf_low", "conf_high")
_LOWEST = -0.5


def profile(table: Any, *, parts: bool = False, units: int = 40, ax: Axes | None = None) -> Axes:
    """Draw the reliability of client differences in each layer with its CI, or the parts of the variance of clients.

    Parameters
    ----------
    table : DataFrame, run, or dict of layer to ComponentsResult
        Table of :func:`fedstat.fl.profile`, or the run itself, or the result of :func:`fedstat.variance_components` for
        each layer. Several rounds are drawn as lines over rounds, from the first layer (light) to the last (dark); one
        round is drawn as points over layers.
    parts : bool
        Draw stacked bars instead: proportions of groups of clients, clients and training noise in the variance of
        clients that are trained on all their data. Bars stand for layers or, of a single ComponentsResult, for units in
        descending order of their reliability. An estimate below 0 is drawn as 0.
    units : int
        Largest number of units; of more units, those of the highest and the lowest reliability are drawn.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes
        The solid line is at 0 (all differences are training noise). Above the dotted line at 0.5, a client's weights
        estimate its true weights with lower expected squared error than the average over clients does. Intervals that
        reach below -0.5 are cut off there.

    Raises
    ------
    ValueError
        If the table lacks a column.
    TypeError
        If ``table`` is another result, or ``parts`` is set for anything but results of variance_components.

    Examples
    --------
    >>> import fedstat
    >>> rng = np.random.default_rng(0)
    >>> w = rng.normal(size=(4, 1, 3, 20)) + rng.normal(size=(4, 2, 3, 20))
    >>> nested = fedstat.variance_components(w, groups=list("aabb"), claim="these groups")
    >>> profile(nested, parts=True).get_ylabel()
    'proportion of the variance of clients'
    """
    check.integer("units", units)
    if parts:
        return _draw_parts(sole(opened(table)), units, ax)
    if isinstance(table := opened(table), xr.DataTree):
        table = fl.profile(table)
    elif isinstance(table, Mapping) and all(isinstance(result, ComponentsResult) for result in table.values()):
        table = pd.concat([result.layer.assign(layer=name, round=0) for name, result in table.items()])
    if not isinstance(table, pd.DataFrame):
        takes = "a run with probe='split-half', the table of fedstat.fl.profile(run) or {layer: ComponentsResult}"
        raise refusal("profile", takes, table)
    if missing := [c for c in _COLUMNS if c not in table]:
        raise ValueError(f"the table must have columns {', '.join(_COLUMNS)}, but lacks {', '.join(missing)}.")
    ax = get_axes(ax)
    table = table.dropna(subset="reliability")
    layers = list(dict.fromkeys(table["layer"]))
    colours = sequential_colors("crest", len(layers))
    over_rounds = table["round"].nunique() > 1
    step = 0.0 if not over_rounds else 0.12 * table["round"].drop_duplicates().sort_values().diff().min()
    for i, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        rows = table[table["layer"] == layer]
        x = rows["round"] + (i - (len(layers) - 1) / 2) * step if over_rounds else pd.Series(i, rows.index)
        low, high = rows["conf_low"].clip(lower=_LOWEST), rows["conf_high"]
        ax.vlines(x, low, high, color=colour, linewidth=1.2, alpha=0.7)
        ax.plot(x, rows["reliability"], "o-", color=colour, markersize=4, linewidth=1.2, label=literal(layer))
    for y, style in ((0, "-"), (0.5, ":")):
        ax.axhline(y, color=gray(0.4), linestyle=style, linewidth=0.9, zorder=0)
    ax.set_ylim(max(_LOWEST, min(-0.05, table["conf_low"].min() - 0.05)), 1.02)
    ax.set_ylabel("reliability of client differences, 95% CI")
    if over_rounds:
        ax.set_xlabel("round")
        ax.set_xticks(rounds) if len(rounds := sorted(table["round"].unique())) <= 12 else None
        legend_above(ax, *ax.get_legend_handles_labels())
    else:
        ax.set_xticks(range(len(layers)), [literal(layer) for layer in layers])
        ax.set_xlabel("layer")
    sns.despine(ax=ax)
    return ax


_PARTS = ("groups", "clients within groups", "training noise")


def _draw_parts(results: Any, units: int, ax: Axes | None) -> Axes:
    """Draw stacked bars of the proportions of groups, clients and noise, by unit or by layer."""
    is_layers = isinstance(results, Mapping)
    if not all(isinstance(result, ComponentsResult) for result in (results.values() if is_layers else [results])):
        raise refusal("profile", "a ComponentsResult or {layer: ComponentsResult} with parts=True", results)
    if is_layers:
        table = pd.concat([result.layer.assign(name=name) for name, result in results.items()])
    else:
        table = results.tidy().rename(columns={"unit": "name"}).sort_values("reliability", ascending=False)
        ends = units - units // 2, units // 2
        table = table if len(table) <= units else pd.concat([table[: ends[0]], table[len(table) - ends[1] :]])
    has_groups = "groups_proportion" in table
    groups = table["groups_proportion"].clip(0, 1).to_numpy() if has_groups else np.zeros(len(table))
    clients = (1 - groups) * table["reliability"].clip(0, 1).to_numpy()
    parts = dict(zip(_PARTS, (groups, clients, 1 - groups - clients), strict=True))
    names = {_PARTS[0]: _PARTS[0], _PARTS[1]: _PARTS[1] if has_groups else "clients", _PARTS[2]: _PARTS[2]}
    ax = get_axes(ax)
    bottom, drawn = np.zeros(len(table)), {}
    for (part, height), colour in zip(parts.items(), (*sns.color_palette("colorblind")[:2], gray(0.8)), strict=True):
        if part != _PARTS[0] or has_groups:
            drawn[names[part]] = ax.bar(range(len(table)), height, 0.8, bottom, color=colour, edgecolor="white")
        bottom = bottom + height
    ax.set(ylim=(0, 1), ylabel="proportion of the variance of clients", xlabel="layer" if is_layers else "unit")
    name_ticks(ax.xaxis, range(len(table)), table["name"])
    legend_above(ax, [*drawn.values()], [*drawn])
    sns.despine(ax=ax)
    return ax


def partition(fed: xr.Dataset | xr.DataTree, *, split: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the number of samples of each class and client as dots of this area (FedDecomp Fig. 8, FedCP Figs. 7–11).

    Parameters
    ----------
    fed : xarray.Dataset, or a run
        Data set with y (sample) and the coordinate client (sample), as the functions of ``fedstat.data.partition``
        return it, or with y (client, sample). A run stands for its training samples.
    split : str, optional
        Subset whose samples are counted; by default all samples.
    ax : matplotlib Axes, optional
        Axes to draw on; by default those of a new figure.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If the data set has no clients, or no samples of this subset.

    Examples
    --------
    >>> from fedstat import data
    >>> fed = data.partition.dirichlet(data.load("digits"), clients=20, concentration=0.5)
    >>> partition(fed).get_ylabel()
    'client'
    """
    fed, has_classes = opened(fed), True
    if isinstance(fed, xr.Dataset) and "y" in fed and fed["y"].dtype.kind == "f" and "client" not in fed["y"].dims:
        fed, has_classes = fed.assign(y=("sample", strata(fed["y"]))), False
    clients, classes, count = _count_samples(fed, split)
    cells = np.flatnonzero(count)
    ax = get_axes(ax, (min(max(4.0, 0.15 * len(classes)), 20.0), min(max(4.0, 0.15 * len(clients)), 20.0)))
    # The largest dot fills its cell, so that dots never hide one another.
    cell = min(ax.bbox.width / len(classes), ax.bbox.height / len(clients)) * 72 / ax.figure.dpi
    biggest = min(cell, 15.0) ** 2
    sns.scatterplot(
        x=_places(classes)[cells % len(classes)],
        y=_places(clients)[cells // len(classes)],
        size=count[cells],
        sizes=(biggest * count[cells].min() / count.max(), biggest),  # area in proportion to the number
        color="C3",
        linewidth=0,
        ax=ax,
    )
    ax.set(xlabel="class" if has_classes else "decile of the target, from 0", ylabel="client")
    ax.invert_yaxis()
    for axis, names in ((ax.xaxis, classes), (ax.yaxis, clients)):
        if names.dtype.kind in "iu":
            axis.set_major_locator(MaxNLocator(integer=True))
        else:
            name_ticks(axis, range(len(names)), names)
    ax.legend(title="samples", loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    return ax


def _places(names: NDArray[Any]) -> NDArray[Any]:
    """Return positions of rows or columns on their axis: numbers have their own, names the numbers from 0."""
    return names if names.dtype.kind in "iu" else np.arange(len(names))


def _count_samples(fed: object, split: str | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Return clients, classes, and the numbers of samples (client × class,), client by client."""
    if (
        isinstance(fed, xr.DataTree)
        and "clients" in fed.children
        and "n_train" in fed["clients"]
        and split in (None, "train")
    ):
        counts = fed["clients/n_train"]
        if "class" not in counts.dims:
            raise ValueError("the run counts no classes, as its targets are real numbers. Pass its data set instead.")
        counts = counts.transpose("client", "class")
        return counts["client"].to_numpy(), counts["class"].to_numpy(), counts.to_numpy().ravel()
    if not isinstance(fed, xr.Dataset):
        takes = "a Dataset with y (sample) and the coordinate client (sample), or a run with clients/n_train"
        raise refusal("partition", takes, fed, "A run stores the counts of training samples only." if split else "")
    if "y" in fed and "client" in fed["y"].dims:
        numbers = fed["client"].to_numpy() if "client" in fed.coords else np.arange(fed.sizes["client"])
        y = classes_of("y", fed["y"], ("client", "sample"))
        client = np.broadcast_to(numbers[:, None], y.shape).ravel()
        splits = np.tile(fed["split"].to_numpy(), len(numbers)) if "split" in fed else None
        y = y.ravel()
    elif "client" in fed.coords:
        client, y = fed["client"].to_numpy(), classes_of("y", fed["y"])
        splits = fed["split"].to_numpy() if "split" in fed else None
    else:
        raise ValueError("fed must have the coordinate client, but lacks it. Partition it first: data.partition.iid.")
    if split is not None:
        names = [] if splits is None else np.unique(splits).tolist()
        if split not in names:
            raise ValueError(f"split must be one of {names}, but got {split!r}.")
        client, y = client[splits == split], y[splits == split]
    clients, classes = np.unique(client), np.unique(fed["y"])
    cells = np.searchsorted(clients, client) * len(classes) + np.searchsorted(classes, y)
    return clients, classes, np.bincount(cells, minlength=len(clients) * len(classes))
