"""Who holds which samples: the partitions that the papers use.

Each function takes a sample-major data set (x, y and the coordinate split on the dim ``sample``) and gives it back with
the coordinate ``client`` (sample), the clients numbered from 0; x is not copied, except where a partition leaves
samples out. All samples are dealt, whatever their split: read one split (``load(..., split="train")``) to deal that
alone, or divide every client's samples afterwards (``train_test``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedstat._utils import check, labels
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.data._clients import hold_out, label_table, limit, permute_labels, train_test
from fedstat.data._groups import CIFAR100_DOMAINS, deal, domains, draw_equal, natural, partitioned, share, top_up

__all__ = [
    "CIFAR100_DOMAINS",
    "dirichlet",
    "dirichlet_equal",
    "domains",
    "hold_out",
    "iid",
    "label_table",
    "limit",
    "natural",
    "one_class",
    "pathological",
    "permute_labels",
    "train_test",
]

_REDRAWS = 1000


def iid(data: xr.Dataset, *, clients: int, seed: int = 0) -> xr.Dataset:
    """Samples at random to clients of equal size (FedFac §1, the IID case of Fig. 1).

    Parameters
    ----------
    data : xarray.Dataset
        With y (sample).
    clients : int
        Number of clients; their sizes differ by at most one sample.
    seed : int
        Seed of the deal.

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If there are fewer samples than clients.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = iid(load("digits"), clients=100)
    >>> np.unique(np.bincount(fed.client)).tolist()
    [17, 18]
    """
    n = data.sizes["sample"]
    clients = check.integer("clients", clients, low=1, high=n)
    client = np.empty(n, dtype=np.int64)
    client[generator(seed, "partition", "iid").permutation(n)] = np.arange(n) * clients // n
    return partitioned(data, client, f"iid(clients={clients}, seed={seed})")


def one_class(data: xr.Dataset, *, clients: int, seed: int = 0) -> xr.Dataset:
    """Each class cut into equal shards, a client per shard (FedFac §1, Fig. 1: 100 clients, 10 digits).

    Clients are numbered by class: the first shards are all of the first class.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        At least the number of classes; if it is not a multiple, the first classes are cut into one more shard.

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If there are fewer clients than classes, or fewer samples of a class than its shards.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = one_class(load("digits"), clients=20)
    >>> np.unique(fed.y[fed.client == 5]).tolist()
    [2]
    """
    classes, y = _classes(data)
    clients = check.integer("clients", clients, low=len(classes), high=len(y))
    held = np.zeros((len(classes), clients), dtype=bool)
    held[np.sort(np.arange(clients) % len(classes)), np.arange(clients)] = True
    counts = _shards(held.astype(float), y, classes)
    rng = generator(seed, "partition", "one_class")
    return partitioned(data, deal(y, counts, rng), f"one_class(clients={clients}, seed={seed})")


def pathological(
    data: xr.Dataset,
    *,
    clients: int,
    classes_per_client: int,
    sizes: Literal["equal", "unequal"] = "equal",
    seed: int = 0,
) -> xr.Dataset:
    """Every client holds exactly S classes (FedFac §5.1, S = 5, 10, 30 on CIFAR-100; FedCP §4, 2 or 10 classes).

    Classes are dealt so that each is held by the same number of clients, give or take one, and its samples are divided
    among these. Cutting the samples sorted by class into shards, where this setting comes from, gives clients at most S
    classes.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        Number of clients; clients × S must reach the number of classes.
    classes_per_client : int
        S.
    sizes : {"equal", "unequal"}
        A class is divided in equal parts, or in proportion to weights drawn from U(0.1, 1) (FedCP's unbalanced
        clients).

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If a class would be held by no client, or by more clients than it has samples.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = pathological(load("digits"), clients=15, classes_per_client=2)
    >>> {len(np.unique(fed.y[fed.client == c])) for c in range(15)}
    {2}
    """
    check.choice("sizes", sizes, ("equal", "unequal"))
    classes, y = _classes(data)
    per = check.integer("classes_per_client", classes_per_client, low=1, high=len(classes))
    clients = check.integer("clients", clients, low=-(-len(classes) // per))
    rng = generator(seed, "partition", "pathological")
    held = _hands(clients, per, len(classes), rng)
    weight = rng.uniform(0.1, 1.0, held.shape) if sizes == "unequal" else 1.0
    client = deal(y, _shards(held * weight, y, classes), rng)
    what = f"pathological(clients={clients}, classes_per_client={per}, sizes={sizes!r}, seed={seed})"
    return partitioned(data, client, what)


def dirichlet(
    data: xr.Dataset,
    *,
    clients: int,
    concentration: float,
    min_size: int = 1,
    below: Literal["redraw", "move"] = "redraw",
    seed: int = 0,
) -> xr.Dataset:
    """Each class divided in proportions from a symmetric Dirichlet distribution (FedFac §5.1; FedCP §4).

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        Number of clients.
    concentration : float
        Parameter of the distribution, π of FedFac and β of FedCP: small values give each class to few clients.
    min_size : int
        Fewest samples of a client.
    below : {"redraw", "move"}
        If a client has fewer: draw all proportions again, at most 1000 times; or move samples to it, one by one from
        the largest class of the largest client. The number of samples moved is ``attrs["moved"]``.

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If there are fewer than clients × min_size samples, or no draw gave every client min_size.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = dirichlet(load("digits"), clients=20, concentration=0.5, min_size=10)
    >>> int(np.bincount(fed.client).min()) >= 10
    True
    """
    check.choice("below", below, ("redraw", "move"))
    classes, y = _classes(data)
    clients = check.integer("clients", clients, low=1)
    min_size = check.integer("min_size", min_size, low=1)
    concentration = check.real("concentration", concentration, low=0.0, open_low=True)
    if clients * min_size > len(y):
        raise ValueError(
            f"clients × min_size must be at most the {len(y)} samples, but got {clients} × {min_size}: "
            "choose fewer clients or a smaller min_size"
        )
    rng, supply = generator(seed, "partition", "dirichlet"), np.bincount(y)
    for _ in range(_REDRAWS if below == "redraw" else 1):
        counts = share(supply, rng.dirichlet(np.full(clients, concentration), size=len(classes)))
        if counts.sum(axis=0).min() >= min_size:
            break
    moved = 0
    if counts.sum(axis=0).min() < min_size:
        if below == "redraw":
            raise ValueError(
                f"none of {_REDRAWS} draws gave each of {clients} clients min_size = {min_size} samples; the smallest "
                f'of the last has {counts.sum(axis=0).min()}. Use below="move" or a larger concentration.'
            )
        moved = top_up(counts, min_size)
    what = (
        f"dirichlet(clients={clients}, concentration={concentration}, min_size={min_size}, "
        f"below={below!r}, seed={seed})"
    )
    return partitioned(data, deal(y, counts, rng), what).assign_attrs(moved=moved)


def dirichlet_equal(
    data: xr.Dataset, *, clients: int, concentration: float, n_train: int = 500, n_test: int = 100, seed: int = 0
) -> xr.Dataset:
    """Equal clients whose class proportions are Dirichlet draws (FedDecomp §4.1: 500 train, 100 test).

    A client's training samples come from the training split, its test samples from the test split in the proportions of
    its training samples. Samples that no client gets are left out.

    Parameters
    ----------
    data, clients, seed
        As for ``iid``; with both splits, unless ``n_test`` is 0.
    concentration : float
        Parameter of the distribution, α of FedDecomp: small values give clients few classes.
    n_train, n_test : int
        Samples of each client.

    Returns
    -------
    xarray.Dataset
        The samples dealt, with the coordinate client (sample).

    Raises
    ------
    ValueError
        If a split has fewer than clients × n samples.

    Warns
    -----
    UserWarning
        If a class ran out, so that some clients got other classes in its place; ``attrs["moved"]`` counts the samples.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = dirichlet_equal(load("digits"), clients=10, concentration=1.0, n_train=50, n_test=0)
    >>> np.bincount(fed.client).tolist()
    [50, 50, 50, 50, 50, 50, 50, 50, 50, 50]
    """
    classes, y = _classes(data)
    clients = check.integer("clients", clients, low=1)
    wanted = {"train": check.integer("n_train", n_train, low=1), "test": check.integer("n_test", n_test, low=0)}
    concentration = check.real("concentration", concentration, low=0.0, open_low=True)
    rng = generator(seed, "partition", "dirichlet_equal")
    proportions = rng.dirichlet(np.full(len(classes), concentration), size=clients)
    client, moved = np.full(len(y), -1), 0
    for split, n in wanted.items():
        here = np.flatnonzero(data.split.values == split)
        if len(here) < clients * n:
            raise ValueError(
                f"{clients} clients of {n} {split} samples need {clients * n}, but got {len(here)}. "
                "Use fewer clients or smaller ones; n_test=0 and train_test where there is no test split."
            )
        counts, others = draw_equal(proportions, n, np.bincount(y[here], minlength=len(classes)))
        client[here], moved = deal(y[here], counts.T, rng), moved + others
        proportions = counts / n if n else proportions
    what = (
        f"dirichlet_equal(clients={clients}, concentration={concentration}, n_train={n_train}, "
        f"n_test={n_test}, seed={seed})"
    )
    return partitioned(data, client, what, moved=moved).assign_attrs(moved=moved)


def _classes(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Classes that occur, and for every sample the position of its class among them."""
    classes, y = np.unique(labels.classes("y", data.y), return_inverse=True)
    return classes, y


def _shards(weight: np.ndarray, y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Counts (class, client) in proportion to ``weight``, at least 1 wherever the weight is positive."""
    supply, holders = np.bincount(y), (weight > 0).sum(axis=1)
    short = np.flatnonzero(supply < holders)
    if short.size:
        c = short[0]
        raise ValueError(
            f"class {classes[c]} has {supply[c]} samples, but needs one for each of {holders[c]} clients. Use fewer."
        )
    return (weight > 0) + share(supply - holders, weight / weight.sum(axis=1, keepdims=True))


def _hands(clients: int, per: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Which client holds which class (class, client), dealt from shuffled packs of all classes."""
    held = np.zeros((classes, clients), dtype=bool)
    pack = rng.permutation(classes)
    for client in range(clients):
        hand, pack = pack[:per], pack[per:]
        if len(hand) < per:  # the next pack; classes already in this hand wait at its end
            fresh = rng.permutation(np.setdiff1d(np.arange(classes), hand))
            need = per - len(hand)
            rest = rng.permutation(np.concatenate([fresh[need:], hand]))
            hand, pack = np.concatenate([hand, fresh[:need]]), rest
        held[hand, client] = True
    return held
