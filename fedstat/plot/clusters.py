"""Who is like whom, as pictures: similarity of clients by the tree, over rounds, and a measure's lines over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat import _check
from fedstat.plot._axes import given, plain
from fedstat.plot._inputs import measure_of_run, refusal
from fedstat.results.between_clients import ClientClustersResult

_MAP = "viridis"
_NAMED = 40  # clients whose labels fit an axis


def client_similarity(result: ClientClustersResult, *, ax: Axes | None = None) -> Axes:
    """Heat map of the clients' similarity in the order of the tree, clusters framed, known groups beside it.

    Parameters
    ----------
    result : ClientClustersResult
        What :func:`fedstat.client_clusters` returns.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        Colours span the similarities of different clients; the diagonal, which is 1, is left white.
    """
    if not isinstance(result, ClientClustersResult):
        raise refusal("client_similarity", "the result of client_clusters", result)
    ax, order = given(ax), result.order
    n = len(order)
    picture = ax.imshow(_off_diagonal(result.similarity[np.ix_(order, order)]), cmap=_MAP, interpolation="nearest")
    ax.figure.colorbar(picture, ax=ax, label="cosine similarity", pad=0.02, shrink=0.85)
    edges = np.flatnonzero(np.diff(result.cluster[order])) + 1
    for low, high in zip([0, *edges], [*edges, n], strict=True):
        ax.add_patch(Rectangle((low - 0.5, low - 0.5), high - low, high - low, fill=False, color="white", lw=1.5))
    if n <= _NAMED:
        ax.set_xticks(range(n), [plain(c) for c in result.clients[order]], rotation=90, fontsize="small")
    else:
        ax.set_xticks([])
    ax.set_yticks([])
    ax.set(xlabel="client, in the order of the tree; frames: clusters", xlim=(-0.5, n - 0.5))
    if result.groups is not None:
        _beside(ax, result.groups[order])
    return ax


def _beside(ax: Axes, groups: NDArray[Any]) -> None:
    """A strip of the groups left of the rows, with its legend below."""
    names, codes = np.unique(groups, return_inverse=True)
    colours = sns.color_palette("tab10" if len(names) <= 10 else "husl", len(names))
    strip = ax.inset_axes((-0.06, 0, 0.04, 1), sharey=ax)
    strip.imshow(
        codes[:, None], cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5, aspect="auto",
        extent=(0, 1, len(codes) - 0.5, -0.5), interpolation="nearest",
    )  # fmt: skip
    strip.set_xticks([])
    strip.set_yticks([])
    strip.set_ylabel("known group")
    ax.legend(
        handles=[Patch(color=c, label=plain(name)) for c, name in zip(colours, names, strict=True)], frameon=False,
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=min(len(names), 6), columnspacing=1, handlelength=1,
    )  # fmt: skip


def similarity_over_rounds(
    similarity: xr.DataArray | xr.DataTree, *, rounds: Sequence[int] | None = None, order: Sequence[int] | None = None
) -> Figure:
    """Similarity matrices of clients at several rounds, as small multiples of one colour scale.

    Parameters
    ----------
    similarity : DataArray (round, client, other), or a run that holds one such array
        Such as a measure of ``run["measures"]``, or ``run["mixing/weight"]``; NaN where a client was not active.
    rounds : sequence of int, optional
        Rounds to draw; by default up to six, evenly spaced, of those with any values, with the first and the last.
    order : sequence of int, optional
        Positions of clients, such as ``client_clusters(...).order``; as stored by default.

    Returns
    -------
    matplotlib Figure
        The diagonals, which would hide the differences between clients, are left white, as are missing values.

    Raises
    ------
    ValueError
        If the dims differ, no round has a value, or a round is not there.
    """
    if isinstance(similarity, xr.DataTree):
        similarity = measure_of_run(similarity, {"round", "client", "other"})
    if not isinstance(similarity, xr.DataArray):
        raise refusal("similarity_over_rounds", "a DataArray (round, client, other) or a run", similarity)
    if set(similarity.dims) != {"round", "client", "other"}:
        raise ValueError(f"similarity must have the dims round, client, other, but got {similarity.dims}")
    x = similarity.transpose("round", "client", "other")
    live = x["round"].to_numpy()[np.isfinite(x.to_numpy()).any((1, 2))].tolist()
    if not live:
        raise ValueError("similarity must have a value in some round, but is NaN in all of them")
    every = np.unique(np.linspace(0, len(live) - 1, min(6, len(live))).round().astype(int))
    chosen = [live[i] for i in every] if rounds is None else [_check.choice("rounds", r, live) for r in rounds]
    at = np.arange(x.sizes["client"]) if order is None else np.asarray(order)
    if sorted(at.tolist()) != list(range(x.sizes["client"])):
        raise ValueError(f"order must hold each of the {x.sizes['client']} positions of clients once, but got {order}")
    matrices = [_off_diagonal(x.sel(round=r).to_numpy()[np.ix_(at, at)]) for r in chosen]
    low, high = np.nanmin(matrices), np.nanmax(matrices)
    columns = min(len(chosen), 3 if len(chosen) > 4 else 4)
    rows = math.ceil(len(chosen) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.6 * columns + 0.8, 2.7 * rows), squeeze=False, layout="constrained"
    )
    for ax in axes.flat[len(chosen) :]:
        ax.set_visible(False)
    for ax, number, matrix in zip(axes.flat, chosen, matrices, strict=False):
        picture = ax.imshow(matrix, cmap=_MAP, vmin=low, vmax=high, interpolation="nearest")
        ax.set_title(f"round {number}", fontsize="medium")
        ax.set_xticks([])
        ax.set_yticks([])
    axes[0, 0].set_ylabel("client")
    axes[-1, 0].set_xlabel("other client")
    figure.colorbar(picture, ax=axes, label=_label(similarity), shrink=0.85)
    return figure


def client_lines(measure: xr.DataArray | xr.DataTree, *, ax: Axes | None = None) -> Axes:
    """A measure of every client over rounds: thin lines of clients, their quartiles as a band, their median.

    Parameters
    ----------
    measure : DataArray (round, client), or a run
        Such as a measure of ``run["measures"]``; NaN where a client was not active. Of a run, its clients' test
        accuracy.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    matplotlib Axes
        Under partial participation a client's line joins the rounds in which it was active, and band and median are
        of those active in a round.
    """
    if isinstance(measure, xr.DataTree) and "metrics" in measure.children and "accuracy" in measure["metrics"]:
        measure = measure["metrics/accuracy"].assign_attrs(long_name="test accuracy of a client")
    if not isinstance(measure, xr.DataArray):
        raise refusal("client_lines", "a DataArray (round, client) or a run with metrics/accuracy", measure)
    if set(measure.dims) != {"round", "client"}:
        raise ValueError(f"measure must have the dims round and client, but got {measure.dims}")
    x = measure.transpose("round", "client")
    values, rounds = x.to_numpy(), x["round"].to_numpy()
    live = np.isfinite(values).any(1)
    if not live.any():
        raise ValueError("measure must have a value in some round, but is NaN in all of them")
    ax, colour = given(ax), sns.color_palette("colorblind")[0]
    for own in values.T:
        there = np.isfinite(own)
        ax.plot(rounds[there], own[there], color="0.75", linewidth=0.6, zorder=1)
    low, middle, high = np.nanquantile(values[live], [0.25, 0.5, 0.75], axis=1)
    ax.fill_between(rounds[live], low, high, color=colour, alpha=0.25, linewidth=0, label="middle half of clients")
    ax.plot(rounds[live], middle, color=colour, linewidth=1.8, label="median client")
    ax.plot([], [], color="0.75", linewidth=0.8, label="clients")
    ax.set(xlabel="round", ylabel=_label(measure))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize="small")
    sns.despine(ax=ax)
    return ax


def _off_diagonal(matrix: NDArray[Any]) -> NDArray[np.float64]:
    """The matrix with NaN on its diagonal, unless it has nothing else."""
    return np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix) if len(matrix) > 1 else matrix


def _label(values: xr.DataArray) -> str:
    """What the values are called, with their units."""
    units = values.attrs.get("units", "")
    return str(values.attrs.get("long_name", values.name or "")) + (f" ({units})" if units not in ("", "1") else "")
