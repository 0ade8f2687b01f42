"""Names of clients and classes: from the data, for every group of a run."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check, labels
from fedstat._utils.lazy import xr
from fedstat.store import Group, to_json


def client_labels(data: xr.Dataset) -> NDArray[Any] | None:
    """Return the labels of the clients, in the order of a run; None for the numbers from 0.

    Parameters
    ----------
    data : Dataset
        Data of :func:`fedstat.fl.train`. If ``client`` has ``attrs["names"]``, its values are indices into these names.

    Returns
    -------
    int64 array or array of str (client,), optional
        Numbers and texts stay what they are; other labels, such as dates, become texts.

    Raises
    ------
    ValueError
        If a label is missing, or if two are equal, or equal as text.

    Examples
    --------
    >>> coords = {"client": ("sample", ["b", "a", "b"])}
    >>> client_labels(xr.Dataset({"x": ("sample", [0.0, 1.0, 2.0])}, coords)).tolist()
    ['a', 'b']
    """
    values = sample_clients(data)
    by_sample = "client" not in data["x"].dims
    values = np.unique(values) if by_sample else values
    names = _names_of(data["client"])
    if names and values.dtype.kind in "iu" and bool(((values >= 0) & (values < len(names))).all()):
        values = _from_texts([names[i] for i in values.tolist()])
    return distinct(values)


def distinct(values: NDArray[Any]) -> NDArray[Any] | None:
    """Return labels of all clients as numbers or texts; None for the numbers from 0; ValueError if two are equal."""
    _require_one_kind(values)
    client_names = _plain(values)
    unique, counts = np.unique(client_names, return_counts=True)
    if len(unique) < len(client_names):
        raise ValueError(
            f"labels of clients must be distinct, but {check.few(map(repr, unique[counts > 1].tolist()))} occurs "
            "several times. Rename these clients, or leave the labels out: clients are then numbered from 0."
        )
    is_plain = client_names.dtype.kind == "i" and np.array_equal(client_names, np.arange(len(client_names)))
    return None if is_plain else client_names


def sample_clients(data: xr.Dataset) -> NDArray[Any]:
    """Return the labels of clients, or of each sample's client; ValueError if one is missing, or if types are mixed."""
    values = labels.complete("client", data["client"], "client" if "client" in data["x"].dims else "sample")
    _require_one_kind(data["client"].to_numpy())
    if values.dtype.kind in "UOT" and (values == "").any():
        raise ValueError("a label of a client is the empty text. Name this client, or remove it.")
    return values


def _require_one_kind(values: NDArray[Any]) -> None:
    if values.dtype.kind == "O":
        first_by_kind = {isinstance(x, Number) and not isinstance(x, bool): x for x in reversed(values.tolist())}
        if len(first_by_kind) > 1:
            raise ValueError(
                "labels of clients must be all numbers or all texts, but got "
                f"{' and '.join(map(repr, first_by_kind.values()))}. Convert them: data.assign_coords(client=...)."
            )


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    """Return labels as int64 numbers, if they are whole, else as texts."""
    if values.dtype.kind == "O" and all(isinstance(x, Number) for x in values.tolist()):
        values = np.array(values.tolist())
    is_whole = values.dtype.kind == "f" and bool(((values == np.floor(values)) & (np.abs(values) < 2**53)).all())
    if is_whole or (values.dtype.kind in "iu" and bool((values <= np.iinfo(np.int64).max).all())):
        return values.astype(np.int64)
    texts = values.tolist() if values.dtype.kind in "UO" else values
    return np.array([str(x) for x in texts], dtype=object)


def _from_texts(names: Sequence[str]) -> NDArray[Any]:
    """Return names as numbers if all are texts of whole numbers, such as "205"."""
    are_numbers = all(len(text) < 19 and text.isascii() and text.isdigit() and str(int(text)) == text for text in names)
    return np.array([int(text) for text in names] if are_numbers else names, dtype=None if are_numbers else object)


def _names_of(array: xr.DataArray) -> list[str]:
    """Return the list of names in the attributes of an array, as texts; [] if it has none."""
    names = array.attrs.get("names")
    return [str(name) for name in names] if isinstance(names, list | tuple | np.ndarray) else []


def class_labels(y: xr.DataArray, classes: NDArray[Any]) -> NDArray[Any]:
    """Return the names of classes: of ``y.attrs["names"]`` if there are any, else the classes themselves.

    A class beyond the list has its number as its name. A name that two classes have is followed by the class's number.

    Examples
    --------
    >>> class_labels(xr.DataArray([0, 1], attrs={"names": ["cat", "dog"]}), np.arange(3)).tolist()
    ['cat', 'dog', '2']
    """
    names = _names_of(y)
    if not names or classes.dtype.kind not in "iu":
        return classes
    texts = [names[c] if 0 <= c < len(names) else str(c) for c in classes.tolist()]
    if texts == [str(c) for c in classes.tolist()]:
        return classes
    unique = [f"{text} ({c})" if texts.count(text) > 1 else text for text, c in zip(texts, classes, strict=True)]
    return np.array(unique, dtype=object)


def coded(data: Any, unseen: Any = None) -> tuple[Any, Any]:
    """Number classes that are texts, and keep the texts as ``y.attrs["names"]``; return other data unchanged.

    Parameters
    ----------
    data, unseen : Dataset, optional
        Clients that train, and unseen clients. Classes have one number in both: their place in ``y.attrs["names"]`` of
        ``data`` or, without these, in the sorted classes of all its samples.

    Raises
    ------
    ValueError
        If a class is missing, classes are of mixed types, or a class of an unseen client is none of ``data``.

    Examples
    --------
    >>> data, _ = coded(xr.Dataset({"x": ("sample", [0.0, 1.0]), "y": ("sample", ["dog", "cat"])}))
    >>> data.y.values.tolist(), data.y.attrs["names"]
    ([1, 0], ['cat', 'dog'])
    """
    if not isinstance(data, xr.Dataset) or (y := _texts(data)) is None:
        return data, unseen
    names = _names_of(data["y"]) or np.unique(y).tolist()
    of_unseen = _texts(unseen) if isinstance(unseen, xr.Dataset) else None
    if isinstance(unseen, xr.Dataset) and "y" in unseen and of_unseen is None:
        raise ValueError("y of unseen clients must hold texts, as y of the training clients does, but holds numbers")
    return _numbered(data, y, names), unseen if of_unseen is None else _numbered(unseen, of_unseen, names)


def _texts(data: xr.Dataset) -> NDArray[Any] | None:
    """Return y as an array of texts; None if it holds no texts."""
    if "y" not in data or data["y"].dtype.kind not in "UOT":
        return None
    labels.complete("y", data["y"], str(data["y"].dims[0]))
    values = data["y"].to_numpy()
    examples = {isinstance(value, str): value for value in reversed(values.ravel().tolist())}
    if len(examples) > 1:
        raise ValueError(
            f"classes in y must be all numbers or all texts, but got {' and '.join(map(repr, examples.values()))}"
        )
    return values.astype(str) if True in examples else None


def _numbered(data: xr.Dataset, y: NDArray[Any], names: Sequence[str]) -> xr.Dataset:
    order = np.argsort(names)
    place = np.searchsorted(np.asarray(names)[order], y).clip(max=len(names) - 1)
    number = order[place]
    if (unknown := np.unique(y[np.asarray(names)[number] != y])).size:
        raise ValueError(
            f"y holds the class {check.few(map(repr, unknown.tolist()))}, but the classes of the training clients are "
            f"{check.few(map(repr, names), 10)}"
        )
    return data.assign(y=(data["y"].dims, number.astype(np.int64), {**data["y"].attrs, "names": list(names)}))


def named(group: Group, clients: NDArray[Any] | None) -> Group:
    """Return a group of a run with the labels of clients in place of their numbers."""
    coords = group.coords
    for dim in ("client", "other"):
        if clients is not None and dim in coords.coords:
            coordinate = coords[dim].variable
            labelled = clients[coordinate.to_numpy()]
            coords = coords.assign_coords({dim: (coordinate.dims, labelled, coordinate.attrs)})
    return group._replace(coords=coords)


def noted(clients: NDArray[Any] | None, classes: NDArray[Any]) -> dict[str, str]:
    """Return what the settings of a run say about names: the first of them, their number and a digest; {} for numbers.

    A run with other names cannot be continued.
    """
    return {
        key: f"{check.few(names)} ({len(names)}, SHA-256 {sha256(to_json(names.tolist()).encode()).hexdigest()[:12]})"
        for key, names in {"client_names": clients, "class_names": classes}.items()
        if names is not None and (key == "client_names" or names.dtype.kind == "O")
    }
