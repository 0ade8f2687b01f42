"""Units' results beside what users know of the same units: the join behind ``augment``."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import is_torch_array

from fedstat import _check
from fedstat._check import few
from fedstat._later import pd, xr


def beside(table: pd.DataFrame, data: Any, *, key: str = "unit") -> Any:
    """The user's data with the columns of a result's table added, row by row.

    Parameters
    ----------
    table : DataFrame
        One row per unit (or client), whose labels are in the column ``key``.
    data : DataFrame, Dataset, DataArray, array, tensor or None
        A DataFrame is matched by its column ``key`` or ``term``, else by its index if that holds the labels, else row
        by row if it has as many rows; a label may come several times. A Dataset or DataArray needs the dim ``key`` and
        is matched by its coordinate, if it has one. An array or tensor holds weights (client, unit, weight...).
    key : str

    Returns
    -------
    DataFrame or Dataset
        A DataFrame where ``data`` is one, with its rows, order and index; else a Dataset. Without data the table.

    Raises
    ------
    ValueError
        If labels are not those of the result, or a name would be there twice.
    TypeError
        If ``data`` is something else.
    """
    if data is None:
        return table
    if isinstance(data, pd.DataFrame):
        return _with_columns(table, data, key)
    if isinstance(data, xr.DataTree):
        data = data.to_dataset()
    if isinstance(data, np.ndarray) or is_torch_array(data):
        data = _named(data)
    if isinstance(data, xr.DataArray):
        data = data.to_dataset(name=data.name or "weights")
    if not isinstance(data, xr.Dataset):
        raise TypeError(
            f"data must be a DataFrame with a column {key!r}, a Dataset or DataArray with the dim {key!r}, or weights "
            f"(client, unit, weight...), but got {type(data).__name__}"
        )
    if key not in data.dims:
        raise ValueError(f"data must have the dim {key!r}, but got {dict(data.sizes)}")
    labels = data[key].to_numpy() if key in data.coords else None
    found = _rows(table, labels, data.sizes[key], key)
    _require_new(found, [str(name) for name in data.variables])
    return data.assign({name: (key, found[name].to_numpy()) for name in found})


def _with_columns(table: pd.DataFrame, data: pd.DataFrame, key: str) -> pd.DataFrame:
    labels: Any = next((data[name] for name in (key, "term") if name in data), None)
    if labels is None and not isinstance(data.index, pd.RangeIndex):
        labels = data.index
    found = _rows(table, None if labels is None else np.asarray(labels), len(data), key)
    _require_new(found, [str(name) for name in data])
    return pd.concat([data, found.set_axis(data.index)], axis=1)


def _rows(table: pd.DataFrame, labels: np.ndarray | None, n: int, key: str) -> pd.DataFrame:
    """Rows of the table for these labels; row by row if there are none, or the table's are just positions."""
    own = table[key].to_numpy()
    positions = np.array_equal(own, np.arange(len(own)))
    if labels is not None and positions and n == len(own) and not np.isin(labels, own).any():
        labels = None
    found = table.drop(columns=key)
    if labels is None:
        if n != len(own):
            raise ValueError(
                f"data must name its {key}s, in a column or coordinate {key!r}, or have a row for each of the "
                f"{len(own)}, but got {n} rows"
            )
        return found
    known = set(own.tolist())
    if strange := list(dict.fromkeys(x for x in labels.tolist() if x not in known)):
        raise ValueError(
            f"the {key}s of data must be those of the result, {few(map(repr, own.tolist()))}, but got "
            f"{few(map(repr, strange))}"
        )
    return found.set_index(own).loc[labels]


def _require_new(found: pd.DataFrame, there: list[str]) -> None:
    if twice := [name for name in found if name in there]:
        raise ValueError(f"data must not have the names that are added, but has {', '.join(twice)}. Rename them.")


def _named(weights: Any) -> xr.DataArray:
    """Weights as a DataArray; its dims are client, unit and weight, weight_1, ..."""
    values = _check.numpy_of(weights)
    if values.ndim < 2:
        raise ValueError(f"weights must be (client, unit, weight...), but got shape {values.shape}")
    others = ["weight"] if values.ndim == 3 else [f"weight_{i + 1}" for i in range(values.ndim - 2)]
    return xr.DataArray(values, dims=("client", "unit", *others), name="weights")
