"""Pictures of federated data sets."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator


def partition(fed: xr.Dataset, *, split: str | None = None, ax: Axes | None = None) -> Axes:
    """Samples of each class at each client as dots whose area is their number (FedDecomp Fig. 8, FedCP Figs. 7–11).

    Parameters
    ----------
    fed : xarray.Dataset
        With y (sample) and the coordinate client (sample), as the functions of ``fedstat.data.partition`` give it.
    split : str, optional
        Count only the samples of this split.
    ax : matplotlib Axes, optional
        Axes to draw on; by default new ones.

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        If the data set has no clients, or no samples of that split.

    Examples
    --------
    >>> from fedstat import data
    >>> fed = data.partition.dirichlet(data.load("digits"), clients=20, concentration=0.5)
    >>> partition(fed).get_ylabel()
    'client'
    """
    if "client" not in fed.coords:
        raise ValueError("fed must have the coordinate client, but got none. Partition it first, as by partition.iid.")
    chosen = np.ones(fed.sizes["sample"], dtype=bool) if split is None else fed.split.values == split
    if not chosen.any():
        raise ValueError(f"split must be one of {np.unique(fed.split).tolist()}, but got {split!r}")
    clients, classes = np.unique(fed.client), np.unique(fed.y)
    row = np.searchsorted(clients, fed.client.values[chosen])
    column = np.searchsorted(classes, fed.y.values[chosen])
    count = np.bincount(row * len(classes) + column, minlength=len(clients) * len(classes))
    held = np.flatnonzero(count)
    if ax is None:
        height = min(max(4.0, 0.15 * len(clients)), 20.0)
        ax = plt.figure(figsize=(min(max(4.0, 0.15 * len(classes)), 20.0), height), layout="constrained").subplots()
    # The largest dot fills its cell, so that dots never hide one another.
    cell = min(ax.bbox.width / len(classes), ax.bbox.height / len(clients)) * 72 / ax.figure.dpi
    biggest = min(cell, 15.0) ** 2
    sns.scatterplot(
        x=classes[held % len(classes)],
        y=clients[held // len(classes)],
        size=count[held],
        sizes=(biggest * count[held].min() / count.max(), biggest),  # area in proportion to the number
        color="C3",
        linewidth=0,
        ax=ax,
    )
    ax.set(xlabel="class", ylabel="client")
    ax.invert_yaxis()
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(title="samples", loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    return ax
