"""What is done to clients once they hold samples: train and test, new clients, permuted labels."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator

# Shares such as 1 - 0.9 fall short of the tenth they stand for; this is less than a sample of any data set.
_ROUNDING = 1e-9


def train_test(
    fed: xr.Dataset,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    in_order: bool = False,
    gap: int = 0,
    short: Literal["error", "drop"] = "error",
    seed: int = 0,
) -> xr.Dataset:
    """Divide every client's samples (FedFac §5.1: 80 % train, 20 % test; FedCP §4: 75 %, 25 %).

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    test, validation : float
        Shares of a client's samples; the training samples are the rest, rounded down, the test samples rounded up.
    in_order : bool
        False: at random. True: the first samples train and the last ones test, as LEAF splits Shakespeare in time.
    gap : int
        With ``in_order``: samples left out before validation and before test. 79 for windows of 80 characters, so that
        no later window overlaps an earlier one.
    short : {"error", "drop"}
        A client with too few samples for one of each is an error, or left out.
    seed : int
        Seed of the random division.

    Returns
    -------
    xarray.Dataset
        With the coordinate split (sample): "train", "validation", "test".

    Raises
    ------
    ValueError
        If the shares leave no training samples, ``gap`` is given without ``in_order``, or a client is too small.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = train_test(partition.iid(load("digits"), clients=10), test=0.25)
    >>> int((fed.split[fed.client == 0] == "test").sum()), int((fed.client == 0).sum())
    (45, 180)
    """
    client = client_of(fed)
    test = check.real("test", test, low=0.0, high=1.0, open_high=True)
    validation = check.real("validation", validation, low=0.0, high=1.0 - test, open_high=True)
    gap = check.integer("gap", gap, low=0, high=None if in_order else 0)
    check.choice("short", short, ("error", "drop"))
    n = len(client)
    key = np.arange(n) if in_order else generator(seed, "partition", "train_test").random(n)
    _, code, size = np.unique(client, return_inverse=True, return_counts=True)
    order = np.lexsort((key, code))
    rank = np.empty(n, dtype=np.int64)
    rank[order] = np.arange(n) - np.repeat(np.cumsum(size) - size, size)
    n_train = np.floor((1 - test - validation) * size + _ROUNDING).astype(np.int64)[code]
    n_later = n_train + np.floor(validation * size + _ROUNDING).astype(np.int64)[code]
    split = np.full(n, "", dtype=object)
    split[rank < n_train] = "train"
    split[(rank >= n_train + gap) & (rank < n_later)] = "validation"
    split[rank >= n_later + gap] = "test"
    return _kept(fed, split, code, size, {"train": True, "validation": validation > 0, "test": test > 0}, short)


def _kept(
    fed: xr.Dataset, split: np.ndarray, code: np.ndarray, size: np.ndarray, needed: dict[str, bool], short: str
) -> xr.Dataset:
    """Data set with its splits, less the samples of the gaps and, if so asked, of clients without one of the splits."""
    whole = np.ones(len(size), dtype=bool)
    for name in (name for name, need in needed.items() if need):
        whole &= np.bincount(code[split == name], minlength=len(size)) > 0
    if not whole.all() and short == "error":
        sizes = [
            f"{c} (of {n} sample{'s' if n > 1 else ''})"
            for c, n in zip(np.unique(fed.client)[~whole], size[~whole], strict=True)
        ]
        raise ValueError(
            f"every client must have samples for each split, but too small are client(s) {few(sizes)}. Use larger "
            'clients (min_size in the partition), other shares, or leave these out by train_test(..., short="drop").'
        )
    kept = (split != "") & whole[code]
    if not kept.all():
        fed, split = fed.isel(sample=np.flatnonzero(kept)), split[kept]
    return fed.assign_coords(split=("sample", split))


def limit(fed: xr.Dataset, *, samples: int, seed: int = 0) -> xr.Dataset:
    """Keep at most this many samples of every client, drawn at random; smaller clients stay as they are.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    samples : int
        Most samples of a client, over all splits.
    seed : int
        Seed of the draw. What a client keeps does not depend on the other clients.

    Returns
    -------
    xarray.Dataset
        The samples that stay, in their order.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = limit(partition.iid(load("digits"), clients=10), samples=30)
    >>> np.bincount(fed.client).tolist()
    [30, 30, 30, 30, 30, 30, 30, 30, 30, 30]
    """
    client = client_of(fed)
    samples = check.integer("samples", samples)
    kept = []
    for c in np.unique(client):
        own = np.flatnonzero(client == c)
        chosen = generator(seed, "partition", "limit", int(c)).permutation(len(own))[:samples]
        kept.append(np.sort(own[chosen]))
    return fed.isel(sample=np.sort(np.concatenate(kept)))


def hold_out(fed: xr.Dataset, *, fraction: float = 0.1, seed: int = 0) -> tuple[xr.Dataset, xr.Dataset]:
    """Set clients apart as new ones, never trained on (FedFac §5.2, Table 3: 10 % of the clients).

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    fraction : float
        Share of the clients, rounded, at least one.
    seed : int
        Seed of the choice.

    Returns
    -------
    fed, new : xarray.Dataset
        The clients to train and the new ones; both keep their numbers.

    Raises
    ------
    ValueError
        If no client would be left to train.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed, new = hold_out(partition.iid(load("digits"), clients=20))
    >>> len(np.unique(fed.client)), len(np.unique(new.client))
    (18, 2)
    """
    client = client_of(fed)
    fraction = check.real("fraction", fraction, low=0.0, high=1.0, open_low=True, open_high=True)
    every = np.unique(client)
    n_new = max(1, round(fraction * len(every)))
    if n_new >= len(every):
        raise ValueError(f"fraction must leave clients to train, but got {fraction} of {len(every)} clients")
    chosen = generator(seed, "partition", "hold_out").choice(every, n_new, replace=False)
    is_new = np.isin(client, chosen)
    return fed.isel(sample=np.flatnonzero(~is_new)), fed.isel(sample=np.flatnonzero(is_new))


def permute_labels(fed: xr.Dataset, *, seed: int = 0) -> xr.Dataset:
    """Every client names the classes in an order of its own, φ_k (Factorized-FL §3.2, label heterogeneity).

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    seed : int
        Seed of the permutations. A client's own depends on its number alone, not on which samples it holds or which
        other clients there are, if ``y.attrs["names"]`` lists the classes; without it, on the classes that occur.

    Returns
    -------
    xarray.Dataset
        With y (sample) permuted, whose ``attrs["names"]`` are numbers now, and the coordinate y_true (sample), the
        label as it was: :func:`label_table` shows φ.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = permute_labels(partition.iid(load("digits"), clients=2))
    >>> np.unique(fed.y[(fed.client == 0) & (fed.y_true == 3)]).size
    1
    """
    client = client_of(fed)
    names = fed.y.attrs.get("names")
    labels = _labels.classes("y", fed.y)
    classes = np.unique(labels) if names is None else np.arange(len(names))
    every, who = np.unique(client, return_inverse=True)
    order = np.array([generator(seed, "partition", "permute_labels", int(c)).permutation(len(classes)) for c in every])
    y = classes[order[who, np.searchsorted(classes, labels)]]
    coords = {} if "y_true" in fed.coords else {"y_true": ("sample", fed.y.values, fed.y.attrs)}
    return fed.assign(y=("sample", y, {} if names is None else numbered(len(names)))).assign_coords(coords)


def numbered(classes: int) -> dict[str, list[str]]:
    """``attrs`` of labels that have no names, or different ones at different clients."""
    return {"names": [str(label) for label in range(classes)]}


def label_table(fed: xr.Dataset) -> xr.DataArray:
    """What each client calls each class: its label y, −1 for a class of which it has no sample.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample); the class is the coordinate y_true (sample), or else y.

    Returns
    -------
    xarray.DataArray
        int64 (client, class), whose ``class`` are the values of y_true and ``client`` those of the clients.

    Raises
    ------
    ValueError
        If a client has two labels for one class.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = permute_labels(partition.iid(load("digits"), clients=2))
    >>> label_table(fed).values
    array([[9, 4, 6, 5, 2, 1, 7, 8, 3, 0],
           [8, 0, 2, 1, 7, 4, 3, 5, 9, 6]])
    """
    y = _labels.classes("y", fed.y)
    clients, who = np.unique(client_of(fed), return_inverse=True)
    classes, what = np.unique(fed["y_true"].values if "y_true" in fed.coords else y, return_inverse=True)
    table = np.full((len(clients), len(classes)), -1, dtype=np.int64)
    table[who, what] = y
    if (other := np.flatnonzero(table[who, what] != y)).size:
        i = other[0]
        raise ValueError(
            f"a client must have one label for a class, but client {clients[who[i]]} has {y[i]} and "
            f"{table[who[i], what[i]]} for the class {classes[what[i]]} of y_true"
        )
    coords = {"client": clients, "class": classes}
    return xr.DataArray(table, coords, ("client", "class"), "label", {"long_name": "a client's label of a class"})


def client_of(fed: xr.Dataset) -> np.ndarray:
    """The coordinate client (sample), or an error that says how to come by it."""
    if "client" not in fed.coords or fed.client.dims != ("sample",):
        raise ValueError(
            f"the data set must have a coordinate client on the dim sample, but got {list(map(str, fed.coords))}. "
            "Partition it first, for example partition.iid(data, clients=100)."
        )
    return _labels.complete("client", fed.client, "sample")
