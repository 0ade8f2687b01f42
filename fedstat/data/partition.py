"""Who holds which samples: the partitions that the papers use.

Each function takes a sample-major data set (x, y and the coordinate split on the dim ``sample``) and gives it back with
the coordinate ``client`` (sample), the clients numbered from 0; x is not copied, except where a partition leaves
samples out. All samples are dealt, whatever their split: read one split (``load(..., split="train")``) to deal that
alone, or divide every client's samples afterwards (``train_test``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from fedstat._utils import check, labels
from fedstat._utils import labels as _labels
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.data._clients import hold_out, label_table, limit, numbered, permute_labels, train_test

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


def share(supply: np.ndarray, proportion: np.ndarray) -> np.ndarray:
    """Whole numbers nearest to supply × proportion that add up to the supply, row by row.

    Parameters
    ----------
    supply : int array (class,)
    proportion : array (class, client)
        Rows add up to 1.

    Returns
    -------
    int array (class, client)

    Examples
    --------
    >>> share(np.array([10]), np.array([[0.25, 0.25, 0.5]]))
    array([[2, 3, 5]])
    """
    reached = np.cumsum(proportion, axis=1)
    reached *= supply[:, None] / reached[:, -1:]
    return np.diff(np.rint(reached).astype(np.int64), axis=1, prepend=0)


def deal(y: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Client of every sample, −1 for those left over, with ``counts`` (class, client) samples drawn at random.

    Parameters
    ----------
    y : int array (sample,)
        Class of each sample, 0 … class − 1.
    counts : int array (class, client)
        Row sums at most the number of samples of the class.
    rng : numpy.random.Generator
    """
    left = np.bincount(y, minlength=len(counts)) - counts.sum(axis=1)
    holders = np.append(np.arange(counts.shape[1]), -1)
    client = np.empty(len(y), dtype=np.int64)
    by_class = np.lexsort((rng.random(len(y)), y))
    client[by_class] = np.repeat(np.tile(holders, len(counts)), np.column_stack([counts, left]).ravel())
    return client


def top_up(counts: np.ndarray, min_size: int) -> int:
    """Move samples, in place, to clients with fewer than ``min_size``; the number moved."""
    size = counts.sum(axis=0)
    moved = 0
    for poor in np.flatnonzero(size < min_size):
        while size[poor] < min_size:
            rich = int(size.argmax())
            common = int(counts[:, rich].argmax())
            counts[common, rich] -= 1
            counts[common, poor] += 1
            size[rich] -= 1
            size[poor] += 1
            moved += 1
    return moved


def draw_equal(proportion: np.ndarray, n: int, supply: np.ndarray) -> tuple[np.ndarray, int]:
    """Counts (client, class) of n samples per client near its proportions, out of a limited supply.

    Clients draw one after the other. Where a class is used up, the client's other classes fill its place in proportion,
    and where these are used up, any.

    Returns
    -------
    counts : int array (client, class)
    moved : int
        Samples whose class is not the one that unlimited supply would give.
    """
    ideal = share(np.full(len(proportion), n), proportion)
    ahead = (np.cumsum(ideal, axis=0) <= supply).all(axis=1)
    first = int(np.append(ahead, False).argmin())  # the first client for whom a class runs out
    counts = ideal * (np.arange(len(ideal)) < first)[:, None]
    supply = supply - counts.sum(axis=0)
    for got, ask, p in zip(counts[first:], ideal[first:], proportion[first:], strict=True):
        while ask.any():
            take = np.minimum(ask, supply)
            got += take
            supply -= take
            open_p = np.where(supply > 0, p, 0.0)
            weight = open_p if open_p.any() else supply.astype(float)
            ask = share(np.array([n - got.sum()]), weight[None] / weight.sum())[0] if got.sum() < n else ask * 0
    return counts, int(np.abs(counts - ideal).sum() // 2)


def partitioned(data: xr.Dataset, client: np.ndarray, what: str, *, moved: int = 0) -> xr.Dataset:
    """Data set with its clients, less the samples of client −1, that says how it was divided."""
    if moved:
        check.warn(
            f"{what}: {moved} samples are of other classes than drawn, because classes ran out. "
            "Use fewer or smaller clients, or a larger concentration."
        )
    kept = client >= 0
    if not kept.all():
        data, client = data.isel(sample=np.flatnonzero(kept)), client[kept]
    return data.assign_coords(client=("sample", client)).assign_attrs(partition=what)


# Factorized-FL §5.1 names five domains of ten classes each, and not their classes: for all but "Animals" the names of
# CIFAR-100's superclasses leave one choice. Its animals are here the large ones; the others have eight superclasses.
CIFAR100_DOMAINS: dict[str, tuple[str, ...]] = {
    "Household Objects": ("household_electrical_devices", "household_furniture"),
    "Fruits & Foods": ("fruit_and_vegetables", "food_containers"),
    "Trees & Flowers": ("trees", "flowers"),
    "Transport": ("vehicles_1", "vehicles_2"),
    "Animals": ("large_carnivores", "large_omnivores_and_herbivores"),
}
"""Five domains of ten classes each (Factorized-FL §5.1), as groups of CIFAR-100's superclasses by name."""


def natural(data: xr.Dataset, *, by: str = "user", min_size: int = 1) -> xr.Dataset:
    """Each writer or role is a client (FedFac §5.1: FEMNIST, Shakespeare).

    Parameters
    ----------
    data : xarray.Dataset
        With the coordinate ``by`` (sample).
    by : str
        Coordinate that tells the clients apart.
    min_size : int
        Clients with fewer samples are left out.

    Returns
    -------
    xarray.Dataset
        With the coordinate client (sample), numbered in the order of ``by``; ``client.attrs["names"]`` are their names.

    Raises
    ------
    ValueError
        If there is no such coordinate, it lacks a value for a sample, or no client is large enough.

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
    min_size = check.integer("min_size", min_size, low=1)
    keys, code, size = np.unique(_labels.complete(by, data[by], "sample"), return_inverse=True, return_counts=True)
    kept = size >= min_size
    if not kept.any():
        raise ValueError(f"min_size must be at most {size.max()}, the size of the largest client, but got {min_size}")
    known = data[by].attrs.get("names")
    names = [str(known[key] if known else key) for key in keys[kept]]
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    fed = partitioned(data, number[code], f"natural(by={by!r}, min_size={min_size})")
    fed.client.attrs["names"] = names
    return fed


def domains(
    data: xr.Dataset,
    *,
    groups: Mapping[str, Sequence[Any]] = CIFAR100_DOMAINS,
    by: str = "coarse",
    clients_per_domain: int = 4,
    seed: int = 0,
) -> xr.Dataset:
    """Clients that work on different classes of things (Factorized-FL §5.1, domain heterogeneity).

    The samples of each group of classes go at random to that group's clients; labels are numbered within the group.
    Factorized-FL also permutes them: ``permute_labels(domains(data))``. Its five domains, which it names without their
    classes, are taken to be these superclasses of CIFAR-100, five classes each: household electrical devices and
    furniture; fruit and vegetables, and food containers; trees and flowers; vehicles 1 and 2; and of the many
    animals the large ones, large carnivores and large omnivores and herbivores.

    Parameters
    ----------
    data, seed
        As for ``iid``.
    groups : mapping
        Name of each domain to the values of ``by`` in it, or to their names in ``data[by].attrs["names"]``. Samples of
        no group are left out. By default Factorized-FL's five.
    by : str
        Coordinate or variable of the samples: "coarse" (CIFAR-100's superclasses), or "y".
    clients_per_domain : int
        Clients of each domain, numbered one domain after the other.

    Returns
    -------
    xarray.Dataset
        With coordinates client (sample), domain (sample) and y_true (sample), the label as it was.

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
    per = check.integer("clients_per_domain", clients_per_domain, low=1)
    if by not in data.variables or data[by].dims != ("sample",):
        raise ValueError(
            f"by must be a variable of the samples, but got {by!r}; there are {list(map(str, data.variables))}"
        )
    if not groups:
        raise ValueError("groups must name at least one domain, but got none")
    domain = _domain(data[by], groups)
    client, y = np.full(len(domain), -1), _labels.classes("y", data.y).copy()
    for g, name in enumerate(groups):
        here = np.flatnonzero(domain == g)
        if len(here) < per:
            raise ValueError(f"domain {name!r} must have at least {per} samples, one per client, but got {len(here)}")
        rng = generator(seed, "partition", "domains", g)
        client[here[rng.permutation(len(here))]] = g * per + np.arange(len(here)) * per // len(here)
        y[here] = np.unique(y[here], return_inverse=True)[1]
    labels = numbered(int(y[domain >= 0].max()) + 1)
    marked = data.assign(y=("sample", y, labels)).assign_coords(
        domain=("sample", domain, {"names": list(groups)}), y_true=("sample", data.y.values, data.y.attrs)
    )
    return partitioned(marked, client, f"domains({list(groups)}, clients_per_domain={per}, seed={seed})")


def _domain(values: xr.DataArray, groups: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Number of the group of each value, −1 for none."""
    names = {str(name): i for i, name in enumerate(values.attrs.get("names", []))}
    domain = np.full(values.shape, -1)
    for g, (name, members) in enumerate(groups.items()):
        codes = [names.get(m, m) if isinstance(m, str) else m for m in members]
        here = np.isin(values.values, codes)
        absent = [m for m, code in zip(members, codes, strict=True) if not np.any(values.values == code)]
        if absent or (domain[here] >= 0).any():
            problem = f"no sample has {absent[0]!r}" if absent else "it shares values with another group"
            raise ValueError(f"groups must divide the values of {values.name!r}, but got {name!r}: {problem}")
        domain[here] = g
    return domain


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
