"""Pictures of federated data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import seaborn as sns
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fedstat import _labels
from fedstat.plot._axes import given
from fedstat.plot._inputs import refusal


def partition(fed: xr.Dataset | xr.DataTree, *, split: str | None = None, ax: Axes | None = None) -> Axes:
    """Samples of each class at each client as dots whose area is their number (FedDecomp Fig. 8, FedCP Figs. 7–11).

    Parameters
    ----------
    fed : xarray.Dataset, or a run
        With y (sample) and the coordinate client (sample), as the functions of ``fedstat.data.partition`` give it, or
        with y (client, sample). Of a run, the training samples.
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
    clients, classes, count = _counts(fed, split)
    held = np.flatnonzero(count)
    ax = given(ax, (min(max(4.0, 0.15 * len(classes)), 20.0), min(max(4.0, 0.15 * len(clients)), 20.0)))
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


def _counts(fed: object, split: str | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
    """Clients, classes, and the number of samples of each class at each client, client by client."""
    if (
        isinstance(fed, xr.DataTree)
        and "clients" in fed.children
        and "n_train" in fed["clients"]
        and split in (None, "train")
    ):
        held = fed["clients/n_train"].transpose("client", "class")
        return held["client"].to_numpy(), held["class"].to_numpy(), held.to_numpy().ravel()
    if not isinstance(fed, xr.Dataset):
        takes = "a Dataset with y (sample) and the coordinate client (sample), or a run with clients/n_train"
        raise refusal("partition", takes, fed, "A run knows its training samples only." if split else "")
    if "y" in fed and "client" in fed["y"].dims:
        numbers = fed["client"].to_numpy() if "client" in fed.coords else np.arange(fed.sizes["client"])
        y = _labels.classes("y", fed["y"], ("client", "sample"))
        of = np.broadcast_to(numbers[:, None], y.shape).ravel()
        splits = np.tile(fed["split"].to_numpy(), len(numbers)) if "split" in fed else None
        y = y.ravel()
    elif "client" in fed.coords:
        of, y = fed["client"].to_numpy(), _labels.classes("y", fed["y"])
        splits = fed["split"].to_numpy() if "split" in fed else None
    else:
        raise ValueError("fed must have the coordinate client, but got none. Partition it first, as by partition.iid.")
    if split is not None:
        known = [] if splits is None else np.unique(splits).tolist()
        if split not in known:
            raise ValueError(f"split must be one of {known}, but got {split!r}")
        of, y = of[splits == split], y[splits == split]
    clients, classes = np.unique(of), np.unique(fed["y"])
    at = np.searchsorted(clients, of) * len(classes) + np.searchsorted(classes, y)
    return clients, classes, np.bincount(at, minlength=len(clients) * len(classes))
