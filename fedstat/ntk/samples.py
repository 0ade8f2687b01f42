"""Samples of several clients, from any of the shapes users hold them in, client-major and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedstat._utils import labels as _labels
from fedstat._utils.lazy import xr


class Samples(NamedTuple):
    """All clients' samples, those of one client side by side.

    Attributes
    ----------
    x : array (sample, feature)
    y : array (sample,)
    client : int array (sample,)
        Ascending, from 0.
    names : tuple
        Label of every client.
    """

    x: np.ndarray
    y: np.ndarray
    client: np.ndarray
    names: tuple[Any, ...]

    @property
    def sizes(self) -> list[int]:
        """Number of samples of every client."""
        return np.bincount(self.client, minlength=len(self.names)).tolist()

    def blocks(self, a: np.ndarray) -> list[np.ndarray]:
        """Cut an array over samples into the clients' parts."""
        return np.split(a, np.cumsum(self.sizes)[:-1])

    def stacked(self) -> tuple[np.ndarray, np.ndarray]:
        """Return x (client, sample, feature) and y (client, sample).

        Clients of fewer samples are filled up with x = 0, y = 0: network (4) is 0 there, so they add neither loss nor
        gradient.
        """
        shape = (len(self.names), max(self.sizes))
        x, y = np.zeros((*shape, self.x.shape[1])), np.zeros(shape)
        place = np.arange(len(self.y)) - np.repeat(np.cumsum([0, *self.sizes[:-1]]), self.sizes)
        x[self.client, place], y[self.client, place] = self.x, self.y
        return x, y

    def take(self, keep: np.ndarray) -> Samples:
        """Some of the samples; clients that lose all of theirs are dropped."""
        return gather(self.x[keep], self.y[keep], np.asarray(self.names)[self.client[keep]])

    def recut(self, clients: int) -> Samples:
        """The same samples cut into another number of clients: neighbours are merged, or one client is divided."""
        return self._replace(
            client=np.arange(len(self.y)) * clients // len(self.y), names=tuple(range(clients))
        )  # fmt: skip


def gather(x: Any, y: Any = None, client: Any = None, *, normalize: bool = False) -> Samples:
    """Read samples from arrays, DataArrays or a Dataset.

    Parameters
    ----------
    x : Dataset, DataArray, DataFrame or array
        A Dataset holds ``x`` and ``y``. Dims are (client, sample, feature), or (sample, feature) with ``client`` given
        or a coordinate of that name along sample.
    y : array, Series, DataFrame or DataArray (client, sample) or (sample,), optional
        Targets, matched by label if they have labels; zeros if neither given nor in the Dataset.
    client : array, Series, DataArray (sample,) or mapping from sample, optional
        Client of every sample; without one all belong to a single client. With a client dim: array (client,), names.
    normalize : bool
        Scale every sample to unit length.

    Raises
    ------
    ValueError
        If shapes or labels do not fit each other, there is no sample, a value is not a finite real number, a client is
        missing, or a zero sample is to be normalised.
    """
    x = _labels.labelled(x, ("sample", "feature"))
    if isinstance(x, xr.Dataset):
        if "x" not in x:
            raise ValueError(f"a Dataset of samples must hold x, but got {list(map(str, x.variables))}")
        y = x["y"] if y is None and "y" in x else y
        x = x["x"]
    y, client = by_sample("y", y, x), by_sample("client", client, x, *("client",) if np.ndim(x) == 3 else ("sample",))
    names = None
    if isinstance(x, xr.DataArray):
        if client is None and "client" in x.coords:
            names = x["client"].values
            client = names if x["client"].dims == ("sample",) else None
        dims = ["client", "sample", "feature"] if x.ndim == 3 else ["sample", "feature"]
        if set(x.dims) != set(dims):
            raise ValueError(f"x must have dims {tuple(dims)}, but got {x.dims}. Rename or stack its dims.")
        x = x.transpose(*dims).values
    x = _real("x", x)
    if x.ndim not in (2, 3) or x.size == 0:
        raise ValueError(
            f"x must be (client, sample, feature) or (sample, feature) and not empty, but got shape {x.shape}"
        )
    y = np.zeros(x.shape[:-1]) if y is None else _real("y", y)
    if y.shape != x.shape[:-1]:
        raise ValueError(f"y must have one value per sample, shape {x.shape[:-1]}, but got {y.shape}")
    if x.ndim == 3:
        names = (
            np.arange(len(x))
            if client is None and names is None
            else _labels.complete("client", names if client is None else client, "client")
        )
        if names.shape != (len(x),):
            raise ValueError(f"client must have one label per client, shape ({len(x)},), but got {names.shape}")
        client = np.repeat(names, x.shape[1])
        x, y = x.reshape(-1, x.shape[-1]), y.reshape(-1)
    client = np.zeros(len(x), dtype=int) if client is None else _labels.complete("client", client, "sample")
    if client.shape != (len(x),):
        raise ValueError(f"client must have one label per sample, shape ({len(x)},), but got {client.shape}")
    _finite("x", x)
    _finite("y", y)
    labels, code = np.unique(client, return_inverse=True)
    order = np.argsort(code, kind="stable")
    x = _unit(x) if normalize else x
    return Samples(x[order], y[order], code[order], tuple(labels.tolist()))


def by_sample(name: str, values: Any, x: Any, *dims: str) -> Any:
    """Return values that carry labels in the order of the samples ``x``, or of other dims of it; others as they are."""
    if not _labels.has_labels(values):
        return values
    x = x["x"] if isinstance(x, xr.Dataset) else x
    places = {"client": -3, "sample": -2}
    labels = {
        d: x[d].to_numpy() if isinstance(x, xr.DataArray) and d in x.dims else np.arange(np.shape(x)[places[d]])
        for d in dims or (("client", "sample") if np.ndim(x) == 3 else ("sample",))
    }
    return _labels.matched(name, values, labels, gaps=True)


def _real(name: str, values: Any) -> np.ndarray:
    a = np.asarray(values)
    if a.dtype.kind not in "biuf":
        raise ValueError(f"{name} must hold real numbers, but got {a.dtype}. Convert it first.")
    return a.astype(np.float64, copy=False)


def _finite(name: str, a: np.ndarray) -> None:
    bad = np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(axis=1))
    if bad.size:
        raise ValueError(
            f"{name} must be finite, but got NaN or infinity in {bad.size} sample(s), first {bad[:3].tolist()}. "
            "Drop or impute them."
        )


def _unit(x: np.ndarray) -> np.ndarray:
    norm = np.linalg.norm(x, axis=1)
    if (norm == 0).any():
        raise ValueError(
            f"a zero sample has no direction, but got x = 0 in row(s) {np.flatnonzero(norm == 0)[:3].tolist()}. "
            "Drop them, or pass normalize=False."
        )
    return x / norm[:, None]
