"""Functions for data with clients: training and test samples, unseen clients, permuted labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.check import few
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.data.targets import strata

# Fractions such as 1 - 0.9 are below 0.1 by rounding; this is less than a sample of any data set.
_ROUNDING = 1e-9

LEFT_OUT = "left_out"
"""Attribute of a data set, and of its runs: text on the clients that were left out; absent if there are none."""


@check.named_options()
def train_test(
    fed: xr.Dataset,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    in_order: bool = False,
    gap: int = 0,
    short: Literal["error", "drop"] = "error",
    stratify: bool = False,
    seed: int = 0,
) -> xr.Dataset:
    """Divide every client's samples into training, validation and test samples.

    FedFac (§5.1) takes 80 % and 20 % for training and test, FedCP (§4) 75 % and 25 %. A coordinate split of ``fed`` is
    replaced: its samples are divided anew, whatever their subset. To keep it, see :func:`deal_like`.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    test, validation : float
        Fractions of a client's samples. The other samples are training samples. Their number is rounded down, that of
        the test samples up.
    in_order : bool
        False divides at random. True takes the first samples for training and the last for test, as LEAF splits
        Shakespeare in time.
    gap : int
        With ``in_order``, the number of samples left out before validation and before test. With windows of 80
        characters, 79 keeps later windows from overlapping earlier windows.
    short : {"error", "drop"}
        Raise an error if a client has too few samples for one of each, or leave the client out, which
        ``attrs["left_out"]`` names.
    stratify : bool
        Give the test samples of a client the class proportions (in regression, the proportions of the deciles of all
        targets) of the client, rounded to whole samples; and the validation samples those of its other samples. The
        numbers of samples do not change.
    seed : int
        Seed of the random division.

    Returns
    -------
    xarray.Dataset
        With the coordinate split (sample): "train", "validation", "test".

    Raises
    ------
    ValueError
        If the fractions leave no training samples, ``gap`` is set without ``in_order``, ``stratify`` is set with it,
        or a client is too small.

    Warns
    -----
    UserWarning
        If clients are left out.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = train_test(partition.iid(load("digits"), clients=10), test=0.25)
    >>> int((fed.split[fed.client == 0] == "test").sum()), int((fed.client == 0).sum())
    (45, 180)
    """
    client = get_client(fed)
    test = check.real("test", test, low=0.0, high=1.0, open_high=True)
    validation = check.real("validation", validation, low=0.0, high=1.0 - test, open_high=True)
    gap = check.integer("gap", gap, low=0, high=None if in_order else 0)
    check.choice("short", short, ("error", "drop"))
    if in_order:
        check.require_default("stratify", stratify, False, "with in_order=True, which takes samples by their order")
    _, code, size = np.unique(client, return_inverse=True, return_counts=True)
    n_train = np.floor((1 - test - validation) * size + _ROUNDING).astype(np.int64)
    n_later = n_train + np.floor(validation * size + _ROUNDING).astype(np.int64)
    rng = generator(seed, "partition", "train_test")
    split = np.full(len(client), "", dtype=object)
    if stratify:
        y = strata(fed.y)
        is_test = _select(code, size - n_later, rng, y)
        rest = np.flatnonzero(~is_test)
        is_validation = _select(code[rest], n_later - n_train, rng, y[rest])
        split[is_test], split[rest] = "test", np.where(is_validation, "validation", "train")
    else:
        rank = _rank(code, np.arange(len(code)) if in_order else rng.random(len(code)))
        split[rank < n_train[code]] = "train"
        split[(rank >= n_train[code] + gap) & (rank < n_later[code])] = "validation"
        split[rank >= n_later[code] + gap] = "test"
    return _assign_split(fed, split, code, size, {"train": True, "validation": validation > 0, "test": test > 0}, short)


def _rank(code: np.ndarray, *keys: np.ndarray) -> np.ndarray:
    """Return the rank of every sample among its client's samples; they are ordered by the last key first."""
    order, size = np.lexsort((*keys, code)), np.bincount(code)
    rank = np.empty(len(code), dtype=np.int64)
    rank[order] = np.arange(len(code)) - np.repeat(np.cumsum(size) - size, size)
    return rank


def _select(code: np.ndarray, number: np.ndarray, rng: np.random.Generator, y: np.ndarray | None) -> np.ndarray:
    """Draw ``number`` samples of every client at random; return bool (sample,).

    With classes ``y``, the samples of a client are ordered by class, and a systematic sample is drawn: of m of n
    samples that follow one another, m · number / n are selected, rounded down or up.
    """
    if y is None:
        return _rank(code, rng.random(len(code))) < number[code]
    rank, size = _rank(code, rng.random(len(code)), y), np.bincount(code, minlength=len(number))
    offset = rng.integers(np.maximum(size, 1))[code]
    return ((rank + 1) * number[code] + offset) // size[code] > (rank * number[code] + offset) // size[code]


def draw_subset(
    fed: xr.Dataset, name: Literal["validation", "test"], *, fraction: float, stratify: bool = False, seed: int = 0
) -> xr.Dataset:
    """Take a fraction of every client's training samples, at random, for another subset.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinates client (sample) and split (sample).
    name : {"validation", "test"}
        Subset to make; it has a random stream of its own.
    fraction : float
        Fraction of a client's training samples; their number is rounded, and at least 1.
    stratify : bool
        Draw them in the class proportions of the client's training samples.
    seed : int
        Seed of the draw.
    """
    subset = fed["split"].to_numpy().astype(object)
    rows = np.flatnonzero(subset == "train")
    _, code, size = np.unique(get_client(fed)[rows], return_inverse=True, return_counts=True)
    number = np.maximum(1, np.rint(fraction * size).astype(np.int64))
    y = strata(fed.y)[rows] if stratify else None
    subset[rows[_select(code, number, generator(seed, "partition", name), y)]] = name
    return fed.assign_coords(split=("sample", subset))


def _assign_split(
    fed: xr.Dataset, split: np.ndarray, code: np.ndarray, size: np.ndarray, needs: dict[str, bool], short: str
) -> xr.Dataset:
    """Add the coordinate split; leave out samples of gaps and, if ``short`` is "drop", clients that lack a subset."""
    is_complete = np.ones(len(size), dtype=bool)
    for name in (name for name, is_needed in needs.items() if is_needed):
        is_complete &= np.bincount(code[split == name], minlength=len(size)) > 0
    if not is_complete.all() and short == "error":
        sizes = [
            f"client {c} (of {n} sample{'s' if n > 1 else ''})"
            for c, n in zip(np.unique(fed.client)[~is_complete], size[~is_complete], strict=True)
        ]
        raise ValueError(
            f"every client must have samples of each subset, but these are too small: {few(sizes)}. Use larger "
            'clients (min_samples in the partition), other fractions, or leave them out: train_test(..., short="drop").'
        )
    is_retained = (split != "") & is_complete[code]
    clients = np.unique(fed.client)
    if not is_retained.all():
        fed, split = fed.isel(sample=np.flatnonzero(is_retained)), split[is_retained]
    fed = fed.assign_coords(split=("sample", split))
    if is_complete.all():
        return fed
    all_names = fed.client.attrs.get("names")
    names = [c if all_names is None else all_names[c] for c in clients]
    return note_left_out(fed, names, size, is_complete, "too few samples for every subset")


def note_left_out(
    data: xr.Dataset, names: Sequence[Any], size: np.ndarray, is_retained: np.ndarray, reason: str, hint: str = ""
) -> xr.Dataset:
    """Warn that clients were left out, and add this to ``attrs["left_out"]``.

    Parameters
    ----------
    data : xarray.Dataset
        Without the samples of these clients.
    names : sequence (client,)
        Labels of all clients.
    size : int array (client,)
        Their numbers of samples.
    is_retained : bool array (client,)
        False for clients that were left out.
    reason, hint : str
        What these clients have, and how to keep them.
    """
    out = np.flatnonzero(~is_retained).tolist()
    n, n_samples = len(out), int(size[out].sum())
    text = (
        f"{n} of {len(size)} clients with {reason} {'were' if n > 1 else 'was'} left out, of {n_samples} "
        f"sample{'s' * (n_samples != 1)} in all: {few((names[i] for i in out), 5)}"
    )
    check.warn(f"{text}.{hint}")
    return data.assign_attrs({LEFT_OUT: "; ".join([*filter(None, [data.attrs.get(LEFT_OUT)]), text])})


@check.named_options()
def limit(fed: xr.Dataset, *, samples: int, seed: int = 0) -> xr.Dataset:
    """Draw at most ``samples`` samples of every client at random; smaller clients stay unchanged.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    samples : int
        Largest number of samples of a client, over all subsets.
    seed : int
        Seed of the draw. The samples of a client do not depend on other clients.

    Returns
    -------
    xarray.Dataset
        The drawn samples, in their order.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = limit(partition.iid(load("digits"), clients=10), samples=30)
    >>> np.bincount(fed.client).tolist()
    [30, 30, 30, 30, 30, 30, 30, 30, 30, 30]
    """
    client = get_client(fed)
    samples = check.integer("samples", samples)
    indices = []
    for c in np.unique(client):
        client_indices = np.flatnonzero(client == c)
        positions = generator(seed, "partition", "limit", _stream_name(c)).permutation(len(client_indices))[:samples]
        indices.append(np.sort(client_indices[positions]))
    return fed.isel(sample=np.sort(np.concatenate(indices)))


@check.named_options()
def hold_out(fed: xr.Dataset, *, fraction: float = 0.1, seed: int = 0) -> tuple[xr.Dataset, xr.Dataset]:
    """Divide clients into training clients and unseen clients (FedFac §5.2, Table 3: 10 % unseen).

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    fraction : float
        Fraction of unseen clients; their number is rounded, and at least 1.
    seed : int
        Seed of the draw.

    Returns
    -------
    fed, unseen : xarray.Dataset
        Training clients and unseen clients; both keep their numbers.

    Raises
    ------
    ValueError
        If no training client is left.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed, unseen = hold_out(partition.iid(load("digits"), clients=20))
    >>> len(np.unique(fed.client)), len(np.unique(unseen.client))
    (18, 2)
    """
    client = get_client(fed)
    fraction = check.real("fraction", fraction, low=0.0, high=1.0, open_low=True, open_high=True)
    clients = np.unique(client)
    n_unseen = max(1, round(fraction * len(clients)))
    if n_unseen >= len(clients):
        raise ValueError(f"fraction must leave clients to train, but got {fraction} of {len(clients)} clients")
    unseen = generator(seed, "partition", "hold_out").choice(clients, n_unseen, replace=False)
    is_unseen = np.isin(client, unseen)
    return fed.isel(sample=np.flatnonzero(~is_unseen)), fed.isel(sample=np.flatnonzero(is_unseen))


@check.named_options()
def permute_labels(fed: xr.Dataset, *, seed: int = 0) -> xr.Dataset:
    """Permute the labels of each client, φ_k, independently (Factorized-FL §3.2, label heterogeneity).

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample).
    seed : int
        Seed of the permutations. A client's permutation depends only on its number if ``y.attrs["names"]`` lists the
        classes, else also on the classes that occur. It does not depend on other clients or on samples.

    Returns
    -------
    xarray.Dataset
        With permuted y (sample), whose ``attrs["names"]`` are numbers, and the coordinate y_true (sample), the original
        label. :func:`label_table` shows φ.

    Examples
    --------
    >>> from fedstat.data import load, partition
    >>> fed = permute_labels(partition.iid(load("digits"), clients=2))
    >>> np.unique(fed.y[(fed.client == 0) & (fed.y_true == 3)]).size
    1
    """
    client = get_client(fed)
    names = fed.y.attrs.get("names")
    labels = _labels.classes("y", fed.y)
    classes = np.unique(labels) if names is None else np.arange(len(names))
    clients, client_index = np.unique(client, return_inverse=True)
    streams = [generator(seed, "partition", "permute_labels", _stream_name(c)) for c in clients]
    phi = np.array([stream.permutation(len(classes)) for stream in streams])
    y = classes[phi[client_index, np.searchsorted(classes, labels)]]
    coords = {} if "y_true" in fed.coords else {"y_true": ("sample", fed.y.values, fed.y.attrs)}
    return fed.assign(y=("sample", y, {} if names is None else number_labels(len(names)))).assign_coords(coords)


def _stream_name(client: Any) -> int | str:
    """Return a client's number, or its label as text, which names its random stream."""
    return str(client) if isinstance(client, str) else int(client)


def number_labels(classes: int) -> dict[str, list[str]]:
    """Return the ``attrs`` of labels that have no names, or names that differ between clients."""
    return {"names": [str(label) for label in range(classes)]}


def label_table(fed: xr.Dataset) -> xr.DataArray:
    """Return each client's label y of each class, or −1 if the client has no sample of the class.

    Parameters
    ----------
    fed : xarray.Dataset
        With the coordinate client (sample). The class is the coordinate y_true (sample), or else y.

    Returns
    -------
    xarray.DataArray
        int64 (client, class); ``class`` holds the values of y_true, ``client`` the numbers of the clients.

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
    clients, client_index = np.unique(get_client(fed), return_inverse=True)
    classes, class_index = np.unique(fed["y_true"].values if "y_true" in fed.coords else y, return_inverse=True)
    table = np.full((len(clients), len(classes)), -1, dtype=np.int64)
    table[client_index, class_index] = y
    if (conflicts := np.flatnonzero(table[client_index, class_index] != y)).size:
        i = conflicts[0]
        raise ValueError(
            f"a client must have one label for a class, but client {clients[client_index[i]]} has {y[i]} and "
            f"{table[client_index[i], class_index[i]]} for the class {classes[class_index[i]]} of y_true"
        )
    coords = {"client": clients, "class": classes}
    return xr.DataArray(table, coords, ("client", "class"), "label", {"long_name": "a client's label of a class"})


def get_client(fed: xr.Dataset) -> np.ndarray:
    """Return the coordinate client (sample); raise ValueError, with advice, if there is none."""
    if "client" not in fed.coords or fed.client.dims != ("sample",):
        raise ValueError(
            f"the data set must have a coordinate client on the dim sample, but got {list(map(str, fed.coords))}. "
            "Partition it first, for example partition.iid(data, clients=100)."
        )
    return _labels.complete("client", fed.client, "sample")
