"""Labels of clients, units and samples: values that carry labels are matched by them, and none may be missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import pd, xr


def has_labels(values: Any) -> bool:
    """Return True for a mapping, Series, DataFrame or DataArray."""
    return isinstance(values, Mapping) or hasattr(values, "iloc") or hasattr(values, "dims")


def complete(name: str, values: Any, dim: str, labels: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return values as an array, or raise ValueError if one is missing.

    Parameters
    ----------
    name : str
        What the message calls the values.
    values : array, tensor, Series, DataFrame, DataArray or sequence (label, ...)
    dim : str
        What the first axis counts, such as "client".
    labels : array (label,), optional
        Labels for the message; positions if not given.

    Raises
    ------
    ValueError
        If a value is None, NaN, NaT, NA or masked, or the text "nan" in an array of texts.

    Examples
    --------
    >>> complete("groups", ["a", None, "b", float("nan")], "client")
    Traceback (most recent call last):
    ValueError: groups must have a value for each client, but it is missing for 1, 3. Add these, or leave them out.
    """
    held = _array(name, values)
    _require_all(name, held, dim, labels)
    return _plain(held, values)


def _require_all(name: str, held: NDArray[Any], dim: str, labels: NDArray[Any] | None) -> None:
    if held.dtype.kind in "iub":
        return
    # NumPy makes the text "nan" of NaN among texts.
    gaps = held == "nan" if held.dtype.kind == "U" else pd.isna(held)
    if gaps.any():
        where = gaps.reshape(len(gaps), -1).any(axis=1)
        raise ValueError(
            f"{name} must have a value for each {dim}, but it is missing for "
            f"{few((np.arange(len(gaps)) if labels is None else labels)[where])}. Add these, or leave them out."
        )


def _plain(held: NDArray[Any], given: Any) -> NDArray[Any]:
    """Objects that were not given as an array of objects, as numbers or texts."""
    return np.array(held.tolist()) if held.dtype.kind == "O" and not isinstance(given, np.ndarray) else held


def matched(name: str, values: Any, labels: Mapping[str, NDArray[Any]], *, gaps: bool = False) -> NDArray[Any]:
    """Return values of clients, units or samples as an array in the order of their labels.

    Parameters
    ----------
    name : str
        Name of the argument.
    values : mapping, Series, DataFrame, DataArray, array, tensor or sequence
        The first four are matched by label, the others are in order already.
    labels : mapping from dim to array
        Labels of each dim that the values may have; they must have the first.
    gaps : bool
        Whether values may be missing.

    Raises
    ------
    ValueError
        If labels differ or occur twice, the shape does not fit, or a value is missing.

    Examples
    --------
    >>> matched("groups", {"k1": "b", "k0": "a"}, {"client": np.array(["k0", "k1"])}).tolist()
    ['a', 'b']
    """
    given, dims, own, has_order = values, list(labels), dict[str, list[Any]](), True
    if hasattr(check.one_array(name, values), "dims"):
        if dims[0] not in values.dims or not set(values.dims) <= set(dims):
            raise ValueError(f"{name} must have the dim {' and perhaps '.join(dims)}, but got {values.dims}")
        labels = {d: labels[d] for d in dims if d in values.dims}
        values = values.transpose(*labels)
        own = {d: values[d].to_numpy().tolist() for d in labels if d in values.coords}
    elif hasattr(values, "iloc"):
        own = {dim: axis.tolist() for dim, axis in zip(dims, values.axes, strict=False)}
    elif isinstance(values, Mapping):
        own, values, has_order = {dims[0]: [*values]}, [*values.values()], False
    held = _array(name, values)
    for axis, dim in enumerate(dims[: held.ndim]):
        if dim in own:
            held = held.take(order(name, dim, own[dim], labels[dim].tolist(), has_order=has_order), axis)
    expected = tuple(len(of) for of in labels.values())
    if not held.ndim or held.shape != expected[: held.ndim]:
        shapes = " or ".join(str(expected[: n + 1]) for n in range(len(expected)))
        raise ValueError(
            f"{name} must have one value for each of the {expected[0]} {dims[0]}s, shape {shapes}, but got {held.shape}"
        )
    _require_all(name, held[:0] if gaps else held, dims[0], labels[dims[0]])
    return _plain(held, given)


def order(name: str, dim: str, own: list[Any], wanted: list[Any], *, has_order: bool = True) -> list[int]:
    """Return the positions that bring labelled values into the order of the wanted labels.

    Labels that are no positions are ignored where the others are positions alone, unless the values have no order.

    Parameters
    ----------
    name : str
        What the message calls the values.
    dim : str
    own, wanted : list
        Labels of the values, and of what they belong to.
    has_order : bool
        False for values of a mapping.

    Raises
    ------
    ValueError
        If the two do not hold the same labels, or one occurs twice.
    """
    place = {label: i for i, label in enumerate(own)}
    if len(place) == len(own) == len(wanted) and place.keys() == set(wanted):
        return [place[label] for label in wanted]
    if has_order and wanted == [*range(len(own))] and place.keys().isdisjoint(wanted):
        return wanted
    asked = set(wanted)
    problems = {
        "none for": [x for x in dict.fromkeys(wanted) if x not in place],
        "values for others,": [x for x in place if x not in asked],
        "several for": [x for i, x in enumerate(own) if place[x] != i],
    }
    found = " and ".join(f"{what} {few(map(repr, some))}" for what, some in problems.items() if some)
    raise ValueError(
        f"{name} must have one value for each {dim}, but has {found or f'one for {dim}s of one label'}. "
        f"Select and name them as the {dim}s are, or pass plain values in their order."
    )


def by_label(name: str, values: NDArray[Any], own: NDArray[Any], wanted: NDArray[Any], dim: str) -> NDArray[Any]:
    """Return values (..., label) in the order of other labels; as they are where either labels are positions alone."""
    positions = [*range(len(own))]
    if positions in (own.tolist(), wanted.tolist()) and set(own.tolist()) != set(wanted.tolist()):
        return values
    return values[..., order(name, dim, own.tolist(), wanted.tolist())]


def axes(values: Any) -> list[tuple[str, list[Any]]]:
    """Return dims and labels of a DataArray or DataFrame, in order; none of other arrays.

    Examples
    --------
    >>> axes(pd.DataFrame([[1, 2]], index=["u"], columns=["a", "b"]))
    [('0', ['u']), ('1', ['a', 'b'])]
    """
    if hasattr(values, "dims"):
        return [(str(d), values[d].to_numpy().tolist() if d in values.coords else []) for d in values.dims]
    return [(str(i), axis.tolist()) for i, axis in enumerate(getattr(values, "axes", ()))]


def classes(name: str, y: Any, dims: Sequence[str] = ("sample",)) -> NDArray[Any]:
    """Return the classes of samples, numbers or texts, as an array with the given dims.

    Raises
    ------
    ValueError
        If the targets are real numbers, or have other dims.

    Examples
    --------
    >>> classes("y", np.array([0.37, 1.0]))
    Traceback (most recent call last):
    ValueError: y must hold class numbers 0, 1, ..., but got 0.37. Targets that are real numbers are not supported.
    Group them into classes, for example by numpy.digitize.
    """
    if hasattr(y, "dims"):
        if set(y.dims) != set(dims):
            raise ValueError(
                f"{name} must hold one class for each sample, with the dims {', '.join(dims)}, but has {y.dims}. "
                "Several targets of a sample are not supported; of one-hot classes pass .argmax over the last dim."
            )
        y = y.transpose(*dims)
    held = _plain(_array(name, y), y)
    if held.dtype.kind in "fc" and (odd := ~(np.isfinite(held) & (held == np.round(held)))).any():
        raise ValueError(
            f"{name} must hold class numbers 0, 1, ..., but got {held[odd][0]:g}. Targets that are real numbers are "
            "not supported. Group them into classes, for example by numpy.digitize."
        )
    return held


def labelled(values: Any, frame: Sequence[str] = ("unit", "weight"), stack: Sequence[str] = ("client",)) -> Any:
    """Return a DataFrame, or a list of labelled arrays, as one DataArray; everything else as it is.

    Parameters
    ----------
    values : any
    frame : sequence of str
        Dims of a DataFrame's rows and columns, whose labels become coordinates.
    stack : sequence of str
        Dims that lists count: one, or one more for each list within a list.

    Raises
    ------
    ValueError
        If arrays of a list do not have the same dims and labels, or only some of them have labels.

    Warns
    -----
    UserWarning
        If an array had the labels of the first in another order.
    """
    if hasattr(values, "iloc") and values.ndim == 2:
        return xr.DataArray(values.to_numpy(), dict(zip(frame, values.axes, strict=True)), frame)
    if not stack or not isinstance(values, list | tuple):
        return values
    parts = [labelled(one, ("unit", "weight"), stack[1:]) for one in values]
    return _stacked(parts, stack[0]) if any(isinstance(one, xr.DataArray) for one in parts) else values


def _stacked(parts: list[Any], dim: str) -> xr.DataArray:
    """One array of labelled arrays, put in the order of the labels of the first."""
    first, found, moved = parts[0], [], {}
    for i, one in enumerate(parts):
        if not isinstance(one, xr.DataArray) or set(one.dims) != set(first.dims):
            seen = f"the dims {one.dims}" if isinstance(one, xr.DataArray) else f"no labels, as {type(one).__name__}"
            raise ValueError(f"{dim} {i} of the list must have the dims {getattr(first, 'dims', ())}, but has {seen}.")
        for d in map(str, first.dims):
            if (d in one.coords) != (d in first.coords):
                raise ValueError(
                    f"all arrays of the list must have labels of the dim {d}, or none, but {dim} {i} differs"
                )
            if d in one.coords:
                at = order(f"{dim} {i} of the list", d, *(x[d].to_numpy().tolist() for x in (one, first)))
                if at != [*range(len(at))]:
                    one, moved[i] = one.isel({d: at}), d
        found.append(one.transpose(*first.dims).to_numpy())
    if moved:
        check.warn(
            f"{dim}(s) {few(moved)} of the list had the labels of the first in another order, of the dim(s) "
            f"{few(dict.fromkeys(moved.values()))}. They were put in the order of the first."
        )
    if shapes := [x.shape for x in found if x.shape != found[0].shape]:
        raise ValueError(f"arrays of the list must have one shape, but got {found[0].shape} and {shapes[0]}")
    names = [one.coords[dim].item() for one in parts if dim in one.coords and not one.coords[dim].ndim]
    coords = {str(d): first[d].to_numpy() for d in first.dims if d in first.coords}
    if len(set(names)) == len(parts):
        coords[dim] = np.array(names)
    return xr.DataArray(np.stack(found), coords, (dim, *first.dims))


def _array(name: str, values: Any) -> NDArray[Any]:
    """Return values on the host; a sequence becomes an array of objects, which keeps None and NaN apart."""
    check.unmasked(name, values)
    if hasattr(values, "to_numpy"):
        return np.asarray(values.to_numpy())
    return check.numpy_of(values) if hasattr(values, "dtype") else np.array(values, dtype=object)
