"""Layout of a store: the groups, coordinates and arrays that it has before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedstat._utils.lazy import xr


class Variable(NamedTuple):
    """Layout of one array.

    Attributes
    ----------
    dims : tuple of str
    dtype : str
        float arrays start as NaN, others as 0 or False.
    chunk : mapping from dim to int
        Chunk sizes; dims that are not named are not cut.
    attrs : mapping
        ``long_name``, ``units`` and the like.
    """

    dims: tuple[str, ...]
    dtype: str
    chunk: Mapping[str, int] = {}
    attrs: Mapping[str, Any] = {}


class Group(NamedTuple):
    """Layout of one group: its coordinates (which give the sizes) and its variables."""

    coords: xr.Dataset
    variables: Mapping[str, Variable]

    def __or__(self, other: Group) -> Group:
        """Return the layout of one group with the coordinates and the variables of both."""
        return Group(self.coords.merge(other.coords), {**self.variables, **other.variables})


def group(coords: Mapping[str, Any], chunk: Mapping[str, int] = {}, /, **variables: tuple[Any, ...]) -> Group:
    """Lay out a group.

    Parameters
    ----------
    coords : mapping from name to int, list, range, array or tuple
        n stands for the integers from 0 to n − 1. A tuple is (dims, values[, attrs]), as in xarray. The group leaves
        out the coordinate of a dim that no variable has: several groups can take the same mapping.
    chunk : mapping from dim to int
        Chunk sizes of all arrays that have the dim.
    **variables : tuple
        (dims, dtype[, attrs[, chunk]]) of an array that the run writes, or (dims, values[, attrs]) of a known array.
        ``dims`` is a tuple, or a string such as ``"round client"``; ``attrs`` is a mapping, or the ``long_name``;
        ``chunk`` adds chunk sizes of this array to those of the group.

    Examples
    --------
    >>> metrics = group({"round": range(1, 4), "client": 2}, accuracy=("round client", "float32", "test accuracy"))
    >>> metrics.coords.sizes
    Frozen({'round': 3, 'client': 2})
    >>> metrics.variables["accuracy"].attrs
    {'long_name': 'test accuracy'}
    """
    every = {name: _variable(*parts) for name, parts in variables.items()}
    known = {name: v for name, v in every.items() if isinstance(v, xr.Variable)}
    arrays = {name: v._replace(chunk={**chunk, **v.chunk}) for name, v in every.items() if isinstance(v, Variable)}
    used = {dim for v in every.values() for dim in v.dims}
    axes = {name: _coordinate(name, values) for name, values in coords.items()}
    return Group(xr.Dataset(known, {n: axis for n, axis in axes.items() if n in used or n not in axis.dims}), arrays)


def _variable(
    dims: str | Sequence[str], values: Any, attrs: str | Mapping[str, Any] = {}, chunk: Mapping[str, int] = {}
) -> Variable | xr.Variable:
    """Return the layout of an array, whose ``values`` are a dtype, or the variable of a known array."""
    names = tuple(dims.split() if isinstance(dims, str) else dims)
    texts = {"long_name": attrs} if isinstance(attrs, str) else attrs
    if isinstance(values, str):
        return Variable(names, values, chunk, texts)
    if chunk:
        raise ValueError(f"a known array is written whole, but got the chunk {dict(chunk)}. Leave the chunk out.")
    return xr.Variable(names, values, texts)


def _coordinate(name: str, values: Any) -> xr.Variable:
    """Return the variable of a coordinate; strings become objects, since zarr warns of strings of fixed width."""
    dims, content, *attrs = values if isinstance(values, tuple) else (name, values)
    array = np.arange(content) if isinstance(content, int | np.integer) else np.asarray(content)
    return xr.Variable(dims, array.astype(object) if array.dtype.kind == "U" else array, *attrs)
