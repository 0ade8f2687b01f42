"""Partitions of papers, which divide samples among clients.

Each function takes a sample-major data set: x, y and the coordinate split on the dim ``sample``. It returns the data
set with the coordinate ``client`` (sample), the clients numbered from 0. It copies x only if it leaves samples out.
All functions but ``dirichlet_equal`` deal the samples of all subsets together and keep the coordinate split; classes
of a client may differ between its subsets. ``train_test`` then divides every client's samples anew. To keep the split
of the data, deal the training samples, and then the test samples in the same proportions (``deal_like``). Deciles of
real-valued targets take the place of classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedstat._utils import check
from fedstat._utils import labels as _labels
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.data._clients import (
    hold_out,
    label_table,
    limit,
    note_left_out,
    number_labels,
    permute_labels,
    train_test,
)
from fedstat.data._dealing import apportion, deal, deal_like, draw_equal, top_up
from fedstat.data.targets import strata

__all__ = [
    "CIFAR100_DOMAINS",
    "deal_like",
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


def __dir__() -> list[str]:
    return __all__


def add_clients(data: xr.Dataset, client: np.ndarray, call: str, *, moved: int = 0) -> xr.Dataset:
    """Add the coordinate client, leave out samples of client −1, and record the call in ``attrs["partition"]``."""
    if moved:
        check.warn(
            f"{call}: {moved} sample{'s were' if moved > 1 else ' was'} drawn from other classes because a class ran "
            "out. Use fewer or smaller clients, or a larger concentration."
        )
    is_dealt = client >= 0
    if not is_dealt.all():
        data, client = data.isel(sample=np.flatnonzero(is_dealt)), client[is_dealt]
    return data.assign_coords(client=("sample", client)).assign_attrs(partition=call)


# Factorized-FL §5.1 names five domains of ten classes each, but not the classes. Names of CIFAR-100's superclasses
# identify the classes of all but "Animals". These are the large animals here; others have eight superclasses.
CIFAR100_DOMAINS: dict[str, tuple[str, ...]] = {
    "Household Objects": ("household_electrical_devices", "household_furniture"),
    "Fruits & Foods": ("fruit_and_vegetables", "food_containers"),
    "Trees & Flowers": ("trees", "flowers"),
    "Transport": ("vehicles_1", "vehicles_2"),
    "Animals": ("large_carnivores", "large_omnivores_and_herbivores"),
}
"""Five domains of ten classes each (Factorized-FL §5.1), as groups of CIFAR-100's superclasses by name."""


@check.named_options()
def natural(data: xr.Dataset, *, by: str = "user", min_samples: int = 1) -> xr.Dataset:
    """Make a client of each writer or role (FedFac §5.1: FEMNIST, Shakespeare).

    Parameters
    ----------
    data : xarray.Dataset
        With the coordinate ``by`` (sample).
    by : str
        Coordinate that identifies the clients.
    min_samples : int
        Least number of samples; smaller clients are left out, and named in ``attrs["left_out"]``.

    Returns
    -------
    xarray.Dataset
        With the coordinate client (sample), numbered in the order of ``by``; ``client.attrs["names"]`` holds names.

    Raises
    ------
    ValueError
        If there is no coordinate ``by``, it lacks a value for a sample, or no client is large enough.

    Warns
    -----
    UserWarning
        If clients are left out.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = natural(load("digits").assign_coords(user=("sample", [7, 3, 7] * 599)))
    >>> fed.client.values[:3], fed.client.attrs["names"]
    (array([1, 0, 1]), ['3', '7'])
    """
    if by not in data.coords or data[by].dims != ("sample",):
        raise ValueError(
            f"by must be a coordinate of the samples, but got {by!r}; there are {list(map(str, data.coords))}"
        )
    min_samples = check.integer("min_samples", min_samples, low=1)
    keys, code, size = np.unique(_labels.complete(by, data[by], "sample"), return_inverse=True, return_counts=True)
    is_large = size >= min_samples
    if not is_large.any():
        raise ValueError(
            f"min_samples must be at most {size.max()}, the size of the largest client, but got {min_samples}"
        )
    all_names = data[by].attrs.get("names")
    names = [str(all_names[key] if all_names else key) for key in keys[is_large]]
    number = np.where(is_large, np.cumsum(is_large) - 1, -1)
    fed = add_clients(data, number[code], f"natural(by={by!r}, min_samples={min_samples})")
    fed.client.attrs["names"] = names
    if is_large.all():
        return fed
    reason = f"fewer than {min_samples} samples"
    every_name = [all_names[key] if all_names else key for key in keys]
    return note_left_out(fed, every_name, size, is_large, reason, " Set a smaller min_samples to keep them.")


@check.named_options()
def domains(
    data: xr.Dataset,
    *,
    groups: Mapping[str, Sequence[Any]] = CIFAR100_DOMAINS,
    by: str = "coarse",
    clients_per_domain: int = 4,
    seed: int = 0,
) -> xr.Dataset:
    """Divide groups of classes (domains) among groups of clients (Factorized-FL §5.1, domain heterogeneity).

    The samples of each domain are dealt at random to its clients; labels are numbered within the domain. Factorized-FL
    also permutes labels: ``permute_labels(domains(data))``. It names five domains without their classes. Here they are
    these superclasses of CIFAR-100, of five classes each: household electrical devices and furniture; fruit and
    vegetables, and food containers; trees and flowers; vehicles 1 and 2; and, of the animals, large carnivores, and
    large omnivores and herbivores.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    groups : mapping
        Values of ``by``, or their names in ``data[by].attrs["names"]``, for the name of each domain. Samples of no
        domain are left out. By default, the five domains of Factorized-FL.
    by : str
        Coordinate or variable of the samples: "coarse" (CIFAR-100's superclasses), or "y".
    clients_per_domain : int
        Number of clients of each domain; clients are numbered domain by domain.

    Returns
    -------
    xarray.Dataset
        With coordinates client (sample), domain (sample) and y_true (sample), the original label.

    Raises
    ------
    ValueError
        If a value is unknown or in two groups, or a domain has fewer samples than clients.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = domains(load("digits"), groups={"even": "02468", "odd": "13579"}, by="y", clients_per_domain=2)
    >>> np.unique(fed.y_true[fed.client == 3]).tolist(), np.unique(fed.y[fed.client == 3]).tolist()
    ([1, 3, 5, 7, 9], [0, 1, 2, 3, 4])
    """
    n = check.integer("clients_per_domain", clients_per_domain, low=1)
    if by not in data.variables or data[by].dims != ("sample",):
        raise ValueError(
            f"by must be a variable of the samples, but got {by!r}; there are {list(map(str, data.variables))}"
        )
    if not groups:
        raise ValueError("groups must name at least one domain, but got none")
    domain = _group_values(data[by], groups)
    client, y = np.full(len(domain), -1), _labels.classes("y", data.y).copy()
    for g, name in enumerate(groups):
        indices = np.flatnonzero(domain == g)
        if len(indices) < n:
            raise ValueError(f"domain {name!r} must have at least {n} samples, one per client, but got {len(indices)}")
        rng = generator(seed, "partition", "domains", g)
        client[indices[rng.permutation(len(indices))]] = g * n + np.arange(len(indices)) * n // len(indices)
        y[indices] = np.unique(y[indices], return_inverse=True)[1]
    labels = number_labels(int(y[domain >= 0].max()) + 1)
    data = data.assign(y=("sample", y, labels)).assign_coords(
        domain=("sample", domain, {"names": list(groups)}), y_true=("sample", data.y.values, data.y.attrs)
    )
    return add_clients(data, client, f"domains({list(groups)}, clients_per_domain={n}, seed={seed})")


def _group_values(values: xr.DataArray, groups: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Return the number of the group of each value, −1 for no group."""
    names = {str(name): i for i, name in enumerate(values.attrs.get("names", []))}
    domain = np.full(values.shape, -1)
    for g, (name, members) in enumerate(groups.items()):
        codes = [names.get(m, m) if isinstance(m, str) else m for m in members]
        is_member = np.isin(values.values, codes)
        unknown = [m for m, code in zip(members, codes, strict=True) if not np.any(values.values == code)]
        if unknown or (domain[is_member] >= 0).any():
            problem = f"no sample has {unknown[0]!r}" if unknown else "it shares values with another group"
            raise ValueError(f"groups must divide the values of {values.name!r}, but got {name!r}: {problem}")
        domain[is_member] = g
    return domain


_REDRAWS = 1000


@check.named_options()
def iid(data: xr.Dataset, *, clients: int, seed: int = 0) -> xr.Dataset:
    """Deal samples at random to clients of equal size (FedFac §1, the IID case of Fig. 1).

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
    return add_clients(data, client, f"iid(clients={clients}, seed={seed})")


@check.named_options()
def one_class(data: xr.Dataset, *, clients: int, seed: int = 0) -> xr.Dataset:
    """Cut each class into equal shards, one per client (FedFac §1, Fig. 1: 100 clients, 10 digits).

    Clients are numbered class by class.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        Number of clients, at least that of classes; if it is not a multiple, the first classes have one more shard.

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
    classes, y = _encode_classes(data)
    clients = check.integer("clients", clients, low=len(classes), high=len(y))
    holds = np.zeros((len(classes), clients), dtype=bool)
    holds[np.sort(np.arange(clients) % len(classes)), np.arange(clients)] = True
    counts = _count_shards(holds.astype(float), y, classes)
    rng = generator(seed, "partition", "one_class")
    return add_clients(data, deal(y, counts, rng), f"one_class(clients={clients}, seed={seed})")


@check.named_options()
def pathological(
    data: xr.Dataset,
    *,
    clients: int,
    classes_per_client: int,
    sizes: Literal["equal", "unequal"] = "equal",
    seed: int = 0,
) -> xr.Dataset:
    """Deal exactly S classes to each client (FedFac §5.1: S = 5, 10, 30 on CIFAR-100; FedCP §4: 2 or 10).

    Numbers of clients per class differ by at most 1, and the samples of a class are divided among its clients. The
    original procedure, which cuts samples sorted by class into shards, gives clients at most S classes.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        Number of clients; clients × S must reach the number of classes.
    classes_per_client : int
        Number of classes of each client, S.
    sizes : {"equal", "unequal"}
        Divide a class in equal parts, or in proportion to weights from U(0.1, 1) (unbalanced clients of FedCP).

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If a class would have no client, or more clients than samples.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = pathological(load("digits"), clients=15, classes_per_client=2)
    >>> {len(np.unique(fed.y[fed.client == c])) for c in range(15)}
    {2}
    """
    check.choice("sizes", sizes, ("equal", "unequal"))
    classes, y = _encode_classes(data)
    n = check.integer("classes_per_client", classes_per_client, low=1, high=len(classes))
    clients = check.integer("clients", clients, low=-(-len(classes) // n))
    rng = generator(seed, "partition", "pathological")
    holds = _deal_classes(clients, n, len(classes), rng)
    weight = rng.uniform(0.1, 1.0, holds.shape) if sizes == "unequal" else 1.0
    client = deal(y, _count_shards(holds * weight, y, classes), rng)
    call = f"pathological(clients={clients}, classes_per_client={n}, sizes={sizes!r}, seed={seed})"
    return add_clients(data, client, call)


@check.named_options()
def dirichlet(
    data: xr.Dataset,
    *,
    clients: int,
    concentration: float,
    min_samples: int = 1,
    below: Literal["redraw", "move"] = "redraw",
    seed: int = 0,
) -> xr.Dataset:
    """Divide each class in proportions from a symmetric Dirichlet distribution (FedFac §5.1; FedCP §4).

    Parameters
    ----------
    data, seed
        As for ``iid``.
    clients : int
        Number of clients.
    concentration : float
        Parameter of the distribution, π of FedFac and β of FedCP: small values give each class to few clients.
    min_samples : int
        Least number of samples of a client.
    below : {"redraw", "move"}
        If a client has fewer samples: draw all proportions again, in at most 1000 draws; or move samples to it, each
        from the largest class of the largest client. The number of samples moved is ``attrs["moved"]``.

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample).

    Raises
    ------
    ValueError
        If there are fewer than clients × min_samples samples, or no draw gave every client min_samples.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = dirichlet(load("digits"), clients=20, concentration=0.5, min_samples=10)
    >>> int(np.bincount(fed.client).min()) >= 10
    True
    """
    check.choice("below", below, ("redraw", "move"))
    classes, y = _encode_classes(data)
    clients = check.integer("clients", clients, low=1)
    min_samples = check.integer("min_samples", min_samples, low=1)
    concentration = check.real("concentration", concentration, low=0.0, open_low=True)
    if clients * min_samples > len(y):
        raise ValueError(
            f"clients × min_samples must be at most the {len(y)} samples, but got {clients} × {min_samples}. "
            "Use fewer clients or a smaller min_samples."
        )
    rng, supply = generator(seed, "partition", "dirichlet"), np.bincount(y)
    for _ in range(_REDRAWS if below == "redraw" else 1):
        counts = apportion(supply, rng.dirichlet(np.full(clients, concentration), size=len(classes)))
        if counts.sum(axis=0).min() >= min_samples:
            break
    moved = 0
    if counts.sum(axis=0).min() < min_samples:
        if below == "redraw":
            raise ValueError(
                f"No draw of {_REDRAWS} gave all {clients} clients min_samples={min_samples} (last minimum: "
                f"{counts.sum(axis=0).min()}). Use below='move' or a larger concentration."
            )
        moved = top_up(counts, min_samples)
    call = (
        f"dirichlet(clients={clients}, concentration={concentration}, min_samples={min_samples}, "
        f"below={below!r}, seed={seed})"
    )
    return add_clients(data, deal(y, counts, rng), call).assign_attrs(moved=moved)


@check.named_options()
def dirichlet_equal(
    data: xr.Dataset, *, clients: int, concentration: float, n_train: int = 500, n_test: int = 100, seed: int = 0
) -> xr.Dataset:
    """Deal equal numbers of samples to clients with Dirichlet class proportions (FedDecomp §4.1: 500 train, 100 test).

    A client's training samples come from the training subset. Its test samples come from the test subset, in the
    proportions of its training samples. Samples without a client are left out.

    Parameters
    ----------
    data, clients, seed
        As for ``iid``; ``data`` needs both subsets, unless ``n_test`` is 0.
    concentration : float
        Parameter of the distribution, α of FedDecomp: small values give clients few classes.
    n_train, n_test : int
        Numbers of training and test samples of each client.

    Returns
    -------
    xarray.Dataset
        The samples of clients, with the coordinate client (sample).

    Raises
    ------
    ValueError
        If a subset has fewer than clients × n samples.

    Warns
    -----
    UserWarning
        If a class ran out and clients got samples of other classes; ``attrs["moved"]`` is their number.

    Examples
    --------
    >>> from fedstat.data import load
    >>> fed = dirichlet_equal(load("digits"), clients=10, concentration=1.0, n_train=50, n_test=0)
    >>> np.bincount(fed.client).tolist()
    [50, 50, 50, 50, 50, 50, 50, 50, 50, 50]
    """
    classes, y = _encode_classes(data)
    clients = check.integer("clients", clients, low=1)
    size_by_split = {"train": check.integer("n_train", n_train, low=1), "test": check.integer("n_test", n_test, low=0)}
    concentration = check.real("concentration", concentration, low=0.0, open_low=True)
    rng = generator(seed, "partition", "dirichlet_equal")
    proportions = rng.dirichlet(np.full(len(classes), concentration), size=clients)
    client, moved = np.full(len(y), -1), 0
    for split, n in size_by_split.items():
        indices = np.flatnonzero(data.split.values == split)
        if len(indices) < clients * n:
            raise ValueError(
                f"{clients} clients of {n} {split} samples need {clients * n}, but got {len(indices)}. "
                "Use fewer or smaller clients. Without a test subset, use n_test=0 and train_test."
            )
        counts, n_moved = draw_equal(proportions, n, np.bincount(y[indices], minlength=len(classes)))
        client[indices], moved = deal(y[indices], counts.T, rng), moved + n_moved
        proportions = counts / n if n else proportions
    call = (
        f"dirichlet_equal(clients={clients}, concentration={concentration}, n_train={n_train}, "
        f"n_test={n_test}, seed={seed})"
    )
    return add_clients(data, client, call, moved=moved).assign_attrs(moved=moved)


def _encode_classes(data: xr.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes that occur (in regression, deciles of the target), and the index of each sample's class."""
    classes, y = np.unique(strata(data.y), return_inverse=True)
    return classes, y


def _count_shards(weight: np.ndarray, y: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Count samples (class, client) in proportion to ``weight``, at least 1 if the weight is positive."""
    supply, holders = np.bincount(y), (weight > 0).sum(axis=1)
    short = np.flatnonzero(supply < holders)
    if short.size:
        c = short[0]
        raise ValueError(
            f"class {classes[c]} has {supply[c]} samples, but needs one for each of {holders[c]} clients. Use fewer."
        )
    return (weight > 0) + apportion(supply - holders, weight / weight.sum(axis=1, keepdims=True))


def _deal_classes(clients: int, hand_size: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """Deal classes to clients from shuffled packs of all classes; return bool (class, client)."""
    holds = np.zeros((classes, clients), dtype=bool)
    pack = rng.permutation(classes)
    for client in range(clients):
        hand, pack = pack[:hand_size], pack[hand_size:]
        if len(hand) < hand_size:  # take the rest from the next pack; move classes of this hand to its end
            next_pack = rng.permutation(np.setdiff1d(np.arange(classes), hand))
            need = hand_size - len(hand)
            rest = rng.permutation(np.concatenate([next_pack[need:], hand]))
            hand, pack = np.concatenate([hand, next_pack[:need]]), rest
        holds[hand, client] = True
    return holds
