"""Data sets that the theory is checked on by name, as Datasets with a split of train and test samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from fedstat import _check, _guard
from fedstat._later import xr
from fedstat._random import generator
from fedstat.ntk.descent import network, predict


def gaussian(*, clients: int = 10, n: int = 20, d: int = 50, n_test: int = 50, seed: int = 0) -> xr.Dataset:
    """Samples uniform on the unit sphere, labelled by the sign of a network of form (4) of width 50.

    As in model (8) of FedFac §4.3, half of the labelling network's units are common and half are each client's own;
    unlike there, all covariates have one distribution, so that Assumption 1 holds as it stands.

    Parameters
    ----------
    clients, n, d, n_test : int
        Clients, training samples of each, features, test samples of each.
    seed : int

    Returns
    -------
    Dataset
        x (client, sample, feature), y (client, sample) in {−1, 1}; split (sample).

    Examples
    --------
    >>> gaussian(clients=2, n=3, d=4, n_test=1).x.shape
    (2, 4, 4)
    """
    clients, n, d = (_check.integer(k, v) for k, v in (("clients", clients), ("n", n), ("d", d)))
    n_test = _check.integer("n_test", n_test, low=0)
    x = generator(seed, "gaussian", "x").normal(size=(clients, n + n_test, d))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    truth = network("fedsplit", clients=clients, features=d, width=50, seed=seed, replicate=-1)
    y = np.where(predict(x, truth.weights, truth.output) >= 0, 1.0, -1.0)
    return _dataset(x, y, n, "unit sphere, labelled by a network of form (4)")


def digits(
    *,
    clients: int = 10,
    n: int = 20,
    n_test: int = 50,
    partition: Literal["one-class", "iid"] = "one-class",
    seed: int = 0,
) -> xr.Dataset:
    """Return scikit-learn's handwritten digits, scaled to unit length; the label is 1 for odd digits, −1 for even ones.

    Parameters
    ----------
    clients, n, n_test : int
        Clients, training and test samples of each.
    partition : {"one-class", "iid"}
        ``"one-class"``: client c holds digits c mod 10 only, hence one label. ``"iid"``: at random.
    seed : int

    Returns
    -------
    Dataset
        As :func:`gaussian`, with 64 features.

    Raises
    ------
    ValueError
        If there are not enough images.

    Examples
    --------
    >>> data = digits(clients=2, n=3, n_test=1)
    >>> data.y.values[:, 0]
    array([-1.,  1.])
    """
    from sklearn.datasets import load_digits

    _check.choice("partition", partition, ("one-class", "iid"))
    clients, n, n_test = (
        _check.integer("clients", clients),
        _check.integer("n", n),
        _check.integer("n_test", n_test, low=0),
    )
    images = load_digits()
    order = generator(seed, "digits").permutation(len(images.target))
    label = images.target[order]
    need = n + n_test
    if partition == "iid":
        parts = [order[c * need : (c + 1) * need] for c in range(clients)]
    else:
        parts = [order[label == c % 10][c // 10 * need : (c // 10 + 1) * need] for c in range(clients)]
    if min(map(len, parts)) < need:
        raise ValueError(
            f"{clients} clients x {need} images ({partition}) are more than there are among 1797 digits "
            f"(about 178 of each class), but got a client with {min(map(len, parts))}. Ask for fewer."
        )
    rows = np.stack(parts)
    x = images.data[rows]
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    y = np.where(images.target[rows] % 2 == 1, 1.0, -1.0)
    return _dataset(x, y, n, f"scikit-learn digits, {partition}, odd against even")


def read(
    path: str | Path, *, n: int | None = None, n_test: int | None = None, clients: int | None = None
) -> xr.Dataset:
    """Read a zarr store with x (client, sample, feature), y (client, sample) and, if there is one, split (sample).

    Labels 0 and 1 become −1 and 1, as squared loss against network (4), whose mean at the start is 0, asks for.

    Parameters
    ----------
    path : path of a zarr store
    n, n_test, clients : int, optional
        Number of training samples, test samples and clients to keep, the first ones.

    Raises
    ------
    ValueError
        If there is no such store, x or y is missing or has other dims, it is damaged or larger than the limit of what
        is read, or it holds no training samples.
    """
    if not str(path) or not _guard.status(path):
        raise ValueError(f"data must be 'gaussian', 'digits' or an existing zarr store, but got {str(path)!r}")
    data = _opened(Path(path)).isel(client=slice(clients))
    try:
        data = data.load()
    except _guard.LimitError:
        raise
    except Exception as error:  # what damaged chunks make zarr raise is not documented
        raise ValueError(f"{path} is damaged: {_guard.reason(error)}. Write it again.") from error
    split = data["split"].values if "split" in data.coords else np.repeat("train", data.sizes["sample"])
    rows = [np.flatnonzero(split == name)[:most] for name, most in (("train", n), ("test", n_test))]
    if not len(rows[0]):
        raise ValueError(f'{path} must hold samples of split "train", but got {np.unique(split)[:8].tolist()}')
    y = data["y"].isel(sample=np.concatenate(rows)).transpose("client", "sample").values.astype(float)
    x = data["x"].isel(sample=np.concatenate(rows)).transpose("client", "sample", "feature").values.astype(float)
    return _dataset(x, 2 * y - 1 if set(np.unique(y)) <= {0.0, 1.0} else y, len(rows[0]), str(Path(path).name))


def _opened(path: Path) -> xr.Dataset:
    """Store whose x and y are numbers of the expected dims, and with all coordinates within the limit; not yet read."""
    from fedstat.store.files import root_group

    try:
        data = root_group(path)
    except _guard.LimitError:
        raise
    except Exception as error:  # zarr and xarray raise many kinds on what is no store
        raise ValueError(f"{path} could not be read as a zarr store: {_guard.reason(error)}") from error
    for name, dims in (("x", ("client", "sample", "feature")), ("y", ("client", "sample"))):
        found = data.data_vars.get(name)
        if found is None or set(found.dims) != set(dims):
            seen = "none" if found is None else found.dims
            raise ValueError(f"{path} must hold {name} of dims {dims}, but got {seen}")
        if found.dtype.kind not in "biuf":
            raise ValueError(f"{path} must hold numbers in {name}, but got {found.dtype}")
    if "split" in data.coords and data["split"].dims != ("sample",):
        raise ValueError(f"{path} must hold split of dims ('sample',), but got {data['split'].dims}")
    data = data[["x", "y"]]
    for key, values in data.variables.items():
        for shape in (values.shape, values.encoding.get("chunks") or ()):
            _guard.size(path, math.prod(shape) * values.dtype.itemsize, f"{key} of shape or chunks {shape}")
    return data


def _dataset(x: np.ndarray, y: np.ndarray, n: int, title: str) -> xr.Dataset:
    split = np.asarray(["train"] * n + ["test"] * (x.shape[1] - n), dtype=object)
    return xr.Dataset(
        {"x": (("client", "sample", "feature"), x), "y": (("client", "sample"), y)},
        coords={"split": ("sample", split)},
        attrs={"title": title},
    )
