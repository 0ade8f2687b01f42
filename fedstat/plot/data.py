"""Pictures of federated data sets."""

from __future__ import annotations

import numpy as np
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes


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
        import matplotlib.pyplot as plt

        # One figure size for all would merge the dots of many clients; a row needs a tenth of an inch to be told apart.
        height = min(max(4.0, 0.1 * len(clients)), 20.0)
        ax = plt.figure(figsize=(min(max(4.0, 0.12 * len(classes)), 16.0), height), layout="constrained").subplots()
    cell = min(ax.get_position().width / len(classes) * ax.figure.bbox.width, 0.9 * ax.bbox.height / len(clients))
    biggest = (min(cell, 30.0) * 72 / ax.figure.dpi) ** 2
    sns.scatterplot(
        x=classes[held % len(classes)],
        y=clients[held // len(classes)],
        size=count[held],
        sizes=(biggest * count[held].min() / count.max(), biggest),
        color="C3",
        linewidth=0,
        ax=ax,
    )
    ax.set(xlabel="class", ylabel="client")
    ax.invert_yaxis()
    ax.legend(title="samples", loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    return ax
