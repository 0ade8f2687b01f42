"""Partitions by the origin of the samples: writers and roles, groups of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstat import _check, _labels
from fedstat._later import xr
from fedstat._random import generator
from fedstat.data._clients import numbered
from fedstat.data._deal import partitioned

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
    min_size = _check.integer("min_size", min_size, low=1)
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
    per = _check.integer("clients_per_domain", clients_per_domain, low=1)
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
