"""Labels of clients, units and samples: labeled values are matched by label, and no value may be missing."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.check import few
from fedstat._utils.lazy import pd, xr


def has_labels(values: Any) -> bool:
    """Return True for a mapping, Series, DataFrame or DataArray."""
    return isinstance(values, Mapping) or hasattr(values, "iloc") or check.has_dims(values)


def complete(name: str, values: Any, dim: str, labels: NDArray[Any] | None = None) -> NDArray[Any]:
    """Return values as an array, or raise ValueError if a value is missing.

    Parameters
    ----------
    name : str
        Name of the values in the message.
    values : array, tensor, Series, DataFrame, DataArray or sequence (label, ...)
    dim : str
        Name of the first axis in the message, such as "client".
    labels : array (label,), optional
        Labels for the message; by default, positions.

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
    array = _array(name, values)
    _require_all(name, array, dim, labels)
    return _plain(array, values)


def _require_all(name: str, array: NDArray[Any], dim: str, labels: NDArray[Any] | None) -> None:
    if array.dtype.kind in "iub":
        return
    # NumPy turns NaN among texts into the text "nan".
    gaps = array == "nan" if array.dtype.kind == "U" else pd.isna(array)
    if gaps.any():
        incomplete = gaps.reshape(len(gaps), -1).any(axis=1)
        raise ValueError(
            f"{name} must have a value for each {dim}, but it is missing for "
            f"{few((np.arange(len(gaps)) if labels is None else labels)[incomplete])}. Add these, or leave them out."
        )


def _plain(array: NDArray[Any], values: Any) -> NDArray[Any]:
    """Convert objects to numbers or texts, unless the values were an array of objects or hold tuples; texts to str."""
    if array.dtype.kind == "T":  # StringDType of NumPy
        return np.array(array.tolist())
    if array.dtype.kind != "O" or isinstance(values, np.ndarray) or any(isinstance(x, tuple) for x in array.flat):
        return array
    return np.array(array.tolist())


def require_known(dim: str, labels: NDArray[Any]) -> NDArray[Any]:
    """Return labels; raise ValueError unless they are numbers, texts, bytes, dates, times, intervals or tuples of them.

    Examples
    --------
    >>> require_known("unit", np.array([1, object()], dtype=object))
    Traceback (most recent call last):
    ValueError: labels of unit must be numbers, texts, dates, intervals or tuples of these, but got object. Convert
    them: weights.assign_coords(unit=[str(label) for label in weights["unit"].values]).
    """
    if labels.dtype.kind == "O" and (unknown := [x for x in labels.tolist() if not _is_known(x)]):
        raise ValueError(
            f"labels of {dim} must be numbers, texts, dates, intervals or tuples of these, but got "
            f"{type(unknown[0]).__name__}. Convert them: weights.assign_coords({dim}=[str(label) for label in "
            f'weights["{dim}"].values]).'
        )
    return labels


def _is_known(label: Any) -> bool:
    if isinstance(label, tuple):
        return all(map(_is_known, label))
    if isinstance(label, bool | int | float | complex | str | bytes | np.generic):
        return True
    return isinstance(label, datetime.date | datetime.timedelta | pd.Period | pd.Interval)


def matched(name: str, values: Any, labels: Mapping[str, NDArray[Any]], *, gaps: bool = False) -> NDArray[Any]:
    """Return values of clients, units or samples as an array in the order of the labels.

    Parameters
    ----------
    name : str
        Name of the argument.
    values : mapping, Series, DataFrame, DataArray, array, tensor or sequence
        The first four types are matched by label; the others must be in order.
    labels : mapping from dim to array
        Labels of each dim that the values may have; the values must have the first dim.
    gaps : bool
        If True, values may be missing.

    Raises
    ------
    ValueError
        If labels differ or occur twice, the shape is wrong, or a value is missing.

    Examples
    --------
    >>> matched("groups", {"k1": "b", "k0": "a"}, {"client": np.array(["k0", "k1"])}).tolist()
    ['a', 'b']
    """
    original, dims, labels_by_dim, is_ordered = values, list(labels), dict[str, list[Any]](), True
    if check.has_dims(check.one_array(name, values)):
        if dims[0] not in values.dims or not set(values.dims) <= set(dims):
            raise ValueError(f"{name} must have the dim {' and perhaps '.join(dims)}, but got {values.dims}")
        labels = {d: labels[d] for d in dims if d in values.dims}
        values = values.transpose(*labels)
        labels_by_dim = {d: values[d].to_numpy().tolist() for d in labels if d in values.coords}
    elif hasattr(values, "iloc"):
        labels_by_dim = {dim: axis.tolist() for dim, axis in zip(dims, values.axes, strict=False)}
    elif isinstance(values, Mapping):
        labels_by_dim, values, is_ordered = {dims[0]: [*values]}, [*values.values()], False
    array = _array(name, values)
    for axis, dim in enumerate(dims[: array.ndim]):
        if dim in labels_by_dim:
            array = array.take(order(name, dim, labels_by_dim[dim], labels[dim].tolist(), has_order=is_ordered), axis)
    expected = tuple(len(of) for of in labels.values())
    if not array.ndim or array.shape != expected[: array.ndim]:
        shapes = " or ".join(str(expected[: n + 1]) for n in range(len(expected)))
        raise ValueError(
            f"{name} must have one value for each of the {expected[0]} {dims[0]}s, shape {shapes}, "
            f"but got {array.shape}"
        )
    _require_all(name, array[:0] if gaps else array, dims[0], labels[dims[0]])
    return _plain(array, original)


def order(name: str, dim: str, labels: list[Any], targets: list[Any], *, has_order: bool = True) -> list[int]:
    """Return the positions that bring labeled values into the order of the target labels.

    If the target labels are mere positions and the labels are not, the order of the values is retained, unless the
    values come from a mapping.

    Parameters
    ----------
    name : str
        Name of the values in the message.
    dim : str
    labels, targets : list
        Labels of the values; labels of the clients, units or samples in order.
    has_order : bool
        False for values of a mapping.

    Raises
    ------
    ValueError
        If the two lists differ in their labels, or a label occurs twice.
    """
    place = {label: i for i, label in enumerate(labels)}
    if len(place) == len(labels) == len(targets) and place.keys() == set(targets):
        return [place[label] for label in targets]
    if has_order and targets == [*range(len(labels))] and place.keys().isdisjoint(targets):
        return targets
    target_set = set(targets)
    problems = {
        "none for": [x for x in dict.fromkeys(targets) if x not in place],
        "values for others,": [x for x in place if x not in target_set],
        "several for": [x for i, x in enumerate(labels) if place[x] != i],
    }
    problem = " and ".join(f"{kind} {few(map(repr, examples))}" for kind, examples in problems.items() if examples)
    raise ValueError(
        f"{name} must have one value for each {dim}, but has {problem or f'one for {dim}s of one label'}. "
        f"Select and name them as the {dim}s are, or pass plain values in their order."
    )


def by_label(name: str, values: NDArray[Any], labels: NDArray[Any], targets: NDArray[Any], dim: str) -> NDArray[Any]:
    """Return values (..., label) in the order of the targets; unchanged if only one list holds mere positions."""
    positions = [*range(len(labels))]
    if positions in (labels.tolist(), targets.tolist()) and set(labels.tolist()) != set(targets.tolist()):
        return values
    return values[..., order(name, dim, labels.tolist(), targets.tolist())]


def axes(values: Any) -> list[tuple[str, list[Any]]]:
    """Return dims and labels of a DataArray or DataFrame, in order; an empty list for other arrays.

    Examples
    --------
    >>> axes(pd.DataFrame([[1, 2]], index=["u"], columns=["a", "b"]))
    [('0', ['u']), ('1', ['a', 'b'])]
    """
    if check.has_dims(values):
        return [(str(d), values[d].to_numpy().tolist() if d in values.coords else []) for d in values.dims]
    return [(str(i), axis.tolist()) for i, axis in enumerate(getattr(values, "axes", ()))]


def classes(name: str, y: Any, dims: Sequence[str] = ("sample",)) -> NDArray[Any]:
    """Return the classes of samples, numbers or texts, as an array with the dims ``dims``.

    Raises
    ------
    ValueError
        If the classes are real numbers, or have other dims.

    Examples
    --------
    >>> classes("y", np.array([0.37, 1.0]))
    Traceback (most recent call last):
    ValueError: y must hold class numbers 0, 1, ..., but got 0.37. Group real-valued targets into classes, for example
    by numpy.digitize.
    """
    if check.has_dims(y):
        if set(y.dims) != set(dims):
            raise ValueError(
                f"{name} must hold one class for each sample, with the dims {', '.join(dims)}, but has {y.dims}. "
                "For one-hot classes pass .argmax over the last dim; several targets of a sample must be real numbers."
            )
        y = y.transpose(*dims)
    array = _plain(_array(name, y), y)
    if array.dtype.kind in "fc" and (not_integer := ~(np.isfinite(array) & (array == np.round(array)))).any():
        raise ValueError(
            f"{name} must hold class numbers 0, 1, ..., but got {array[not_integer][0]:g}. Group real-valued targets "
            "into classes, for example by numpy.digitize."
        )
    return array


def labelled(values: Any, frame: Sequence[str] = ("unit", "weight"), stack: Sequence[str] = ("client",)) -> Any:
    """Return a DataFrame, or a list of labeled arrays, as one DataArray; return all other values unchanged.

    Parameters
    ----------
    values : any
    frame : sequence of str
        Dims of a DataFrame's rows and columns, whose labels become coordinates.
    stack : sequence of str
        Dims of the list, and of each further level of lists within lists.

    Raises
    ------
    ValueError
        If arrays of a list differ in their dims or labels, or only some of them have labels.

    Warns
    -----
    UserWarning
        If an array has the labels of the first array in another order.
    """
    if hasattr(values, "iloc") and values.ndim == 2:
        are_numbers = all(dtype.kind in "iuf" for dtype in values.dtypes)
        is_nullable = are_numbers and not all(isinstance(dtype, np.dtype) for dtype in values.dtypes)
        numbers = values.to_numpy(float, na_value=math.nan) if is_nullable else values.to_numpy()
        return xr.DataArray(numbers, dict(zip(frame, values.axes, strict=True)), frame)
    if not stack or not isinstance(values, list | tuple):
        return values
    arrays = [labelled(array, ("unit", "weight"), stack[1:]) for array in values]
    return _stack(arrays, stack[0]) if any(isinstance(array, xr.DataArray) for array in arrays) else values


def _stack(arrays: list[Any], dim: str) -> xr.DataArray:
    """Stack labeled arrays in the order of the labels of the first array."""
    first, stacked, reordered_dims = arrays[0], [], {}
    for i, array in enumerate(arrays):
        if not isinstance(array, xr.DataArray) or set(array.dims) != set(first.dims):
            kind = (
                f"the dims {array.dims}" if isinstance(array, xr.DataArray) else f"no labels, as {type(array).__name__}"
            )
            dims = getattr(first, "dims", ())
            raise ValueError(f"{dim} {i} of the list must have the dims {dims}, but has {kind}.")
        for d in map(str, first.dims):
            if (d in array.coords) != (d in first.coords):
                raise ValueError(
                    f"all arrays of the list must have labels of the dim {d}, or none, but {dim} {i} differs"
                )
            if d in array.coords:
                positions = order(f"{dim} {i} of the list", d, *(x[d].to_numpy().tolist() for x in (array, first)))
                if positions != [*range(len(positions))]:
                    array, reordered_dims[i] = array.isel({d: positions}), d
        stacked.append(array.transpose(*first.dims).to_numpy())
    if reordered_dims:
        check.warn(
            f"{dim}(s) {few(reordered_dims)} of the list had the labels of the first in another order, of the dim(s) "
            f"{few(dict.fromkeys(reordered_dims.values()))}. They were put in the order of the first."
        )
    if shapes := [x.shape for x in stacked if x.shape != stacked[0].shape]:
        raise ValueError(f"arrays of the list must have one shape, but got {stacked[0].shape} and {shapes[0]}")
    names = [array.coords[dim].item() for array in arrays if dim in array.coords and not array.coords[dim].ndim]
    coords = {str(d): first[d].to_numpy() for d in first.dims if d in first.coords}
    if len(set(names)) == len(arrays):
        coords[dim] = np.array(names)
    return xr.DataArray(np.stack(stacked), coords, (dim, *first.dims))


def _array(name: str, values: Any) -> NDArray[Any]:
    """Return values on the host; a sequence becomes an array of objects, in which None and NaN stay distinct."""
    check.unmasked(name, values)
    if hasattr(values, "to_numpy"):
        return np.asarray(values.to_numpy())
    return check.numpy_of(values) if hasattr(values, "dtype") else np.array(values, dtype=object)
