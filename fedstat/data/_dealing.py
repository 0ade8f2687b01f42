"""Numbers of samples by class and client, and the draw of as many samples."""

from __future__ import annotations

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import xr
from fedstat._utils.streams import generator
from fedstat.data._clients import get_client
from fedstat.data.targets import strata


def apportion(supply: np.ndarray, proportion: np.ndarray) -> np.ndarray:
    """Round supply × proportion to integers whose rows add up to the supply.

    Parameters
    ----------
    supply : int array (class,)
    proportion : array (class, client)
        Proportions; rows add up to 1.

    Returns
    -------
    int array (class, client)

    Examples
    --------
    >>> apportion(np.array([10]), np.array([[0.25, 0.25, 0.5]]))
    array([[2, 3, 5]])
    """
    bounds = np.cumsum(proportion, axis=1)
    bounds *= supply[:, None] / bounds[:, -1:]
    return np.diff(np.rint(bounds).astype(np.int64), axis=1, prepend=0)


def deal(y: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw ``counts`` samples of each class for each client at random.

    Parameters
    ----------
    y : int array (sample,)
        Class of each sample, 0 … class − 1.
    counts : int array (class, client)
        Numbers of samples; a row sum is at most the number of samples of the class.
    rng : numpy.random.Generator

    Returns
    -------
    int array (sample,)
        Client of every sample, −1 for samples without a client.
    """
    remainder = np.bincount(y, minlength=len(counts)) - counts.sum(axis=1)
    holders = np.append(np.arange(counts.shape[1]), -1)
    client = np.empty(len(y), dtype=np.int64)
    by_class = np.lexsort((rng.random(len(y)), y))
    client[by_class] = np.repeat(np.tile(holders, len(counts)), np.column_stack([counts, remainder]).ravel())
    return client


def top_up(counts: np.ndarray, min_samples: int) -> int:
    """Move samples, in place, to clients with fewer than ``min_samples``; return the number of samples moved."""
    sizes = counts.sum(axis=0)
    moved = 0
    for receiver in np.flatnonzero(sizes < min_samples):
        while sizes[receiver] < min_samples:
            donor = int(sizes.argmax())
            largest_class = int(counts[:, donor].argmax())
            counts[largest_class, donor] -= 1
            counts[largest_class, receiver] += 1
            sizes[donor] -= 1
            sizes[receiver] += 1
            moved += 1
    return moved


def draw_equal(proportion: np.ndarray, n: int, supply: np.ndarray) -> tuple[np.ndarray, int]:
    """Count n samples per client, by class, near its proportions, from a limited supply.

    Clients draw one after the other. If a class has run out, the client's other classes replace it in proportion; if
    these have run out, any class does.

    Returns
    -------
    counts : int array (client, class)
    moved : int
        Number of samples whose class differs from that of an unlimited supply.
    """
    ideal = apportion(np.full(len(proportion), n), proportion)
    is_supplied = (np.cumsum(ideal, axis=0) <= supply).all(axis=1)
    first = int(np.append(is_supplied, False).argmin())  # the first client that finds a class run out
    counts = ideal * (np.arange(len(ideal)) < first)[:, None]
    supply = supply - counts.sum(axis=0)
    for row, need, p in zip(counts[first:], ideal[first:], proportion[first:], strict=True):
        while need.any():
            take = np.minimum(need, supply)
            row += take
            supply -= take
            p_available = np.where(supply > 0, p, 0.0)
            weight = p_available if p_available.any() else supply.astype(float)
            need = apportion(np.array([n - row.sum()]), weight[None] / weight.sum())[0] if row.sum() < n else need * 0
    return counts, int(np.abs(counts - ideal).sum() // 2)


@check.named_options()
def deal_like(data: xr.Dataset, fed: xr.Dataset, *, seed: int = 0) -> xr.Dataset:
    """Deal samples to clients in the class proportions of samples that the clients hold already.

    Of the samples of a class, a client gets the proportion that it holds of the class in ``fed``, rounded down or up.
    Rounding keeps the numbers of samples of clients near their exact values. Clients of a partition thus train and test
    on one distribution.

    Parameters
    ----------
    data : xarray.Dataset
        Samples to deal, such as the test samples: y (sample), with the classes of ``fed``.
    fed : xarray.Dataset
        Samples with the coordinate client (sample), such as the training samples.
    seed : int
        Seed of the deal.

    Returns
    -------
    xarray.Dataset
        ``data`` with the coordinate client (sample). A client may get no sample if ``data`` has few.

    Raises
    ------
    ValueError
        If ``fed`` has no clients, or they hold no class of ``data``.

    Warns
    -----
    UserWarning
        If no client holds a class of ``data``: its samples are left out.

    Examples
    --------
    >>> import xarray as xr
    >>> from fedstat.data import load, partition
    >>> digits = load("digits")
    >>> train, test = digits.isel(sample=slice(1500)), digits.isel(sample=slice(1500, None))
    >>> fed = partition.pathological(train, clients=15, classes_per_client=2)
    >>> fed = xr.concat([fed, deal_like(test.assign_coords(split=("sample", ["test"] * 297)), fed)], "sample")
    >>> np.unique(fed.y[(fed.client == 3) & (fed.split == "test")]).size
    2
    """
    clients, client = np.unique(get_client(fed), return_inverse=True)
    classes, y = np.unique(strata(fed.y), return_inverse=True)
    held = np.zeros((len(classes), len(clients)), dtype=np.int64)
    np.add.at(held, (y, client), 1)
    y_data = strata(data.y, like=fed.y)
    is_held = np.isin(y_data, classes)
    if not is_held.any():
        raise ValueError("fed must hold classes of data, but has none. Pass samples with the same numbers of classes.")
    if not is_held.all():
        foreign, n = np.unique(y_data[~is_held]), int((~is_held).sum())
        names = data.y.attrs.get("names")
        classes_out = check.few(foreign if names is None else [names[c] for c in foreign])
        check.warn(
            f"{n} sample{'s' if n > 1 else ''} of class {classes_out} left out, because no client holds the class in "
            "training. Add training samples of it, or remove it from the data."
        )
        data, y_data = data.isel(sample=np.flatnonzero(is_held)), y_data[is_held]
    rng = generator(seed, "partition", "deal_like")
    code = np.searchsorted(classes, y_data)
    counts = _round_alike(np.bincount(code, minlength=len(classes)), held, rng)
    return data.assign_coords(client=("sample", clients[deal(code, counts, rng)]))


def _round_alike(supply: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Round supply · held / (sum of held over clients) down or up, with rows that add up to the supply.

    A sample that remains of a class after rounding down goes to the client whose number of samples lacks most.

    Parameters
    ----------
    supply : int array (class,)
    held : int array (class, client)
    rng : numpy.random.Generator
        Orders classes and, if they lack equally, clients.
    """
    total = held.sum(axis=1, keepdims=True)
    counts, remainder = np.divmod(supply[:, None] * held, total)
    lack = np.zeros(held.shape[1])
    for c in rng.permutation(len(supply)):
        lack += remainder[c] / total[c]
        order = np.lexsort((rng.random(len(lack)), -lack.round(9), remainder[c] == 0))
        receivers = order[: supply[c] - counts[c].sum()]
        counts[c, receivers] += 1
        lack[receivers] -= 1
    return counts
