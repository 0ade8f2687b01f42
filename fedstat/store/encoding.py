"""Results as arrays and JSON, without loss."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from functools import partial
from importlib import import_module
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, torch, xr
from fedstat.results.base import Result
from fedstat.results.origin import with_origin
from fedstat.stats.split import Absolute
from fedstat.store.fields import require_sound
from fedstat.store.origin import require_version

FORMAT = 3
"""Version of the encoding; results of another version are refused."""

MODULES = {
    "fedstat.results": (
        "BootstrapResult", "ClientClustersResult", "ComparisonResult", "ComponentsResult", "EffectiveRankResult",
        "EntropyResult", "FactorResult", "GroupIccResult", "IccResult", "JackknifeResult", "LayerResults",
        "LeakageResult", "NFactorsResult", "PermutationResult", "SensitivityResult", "ShrunkenResult", "SplitMapResult",
        "SplitResult",
        "StoredSplitResult",
    ),
    "fedstat.stats.group_icc": ("Agreement", "GroupAgreement"),
    "fedstat.stats.icc": ("Coefficients", "MeanSquares"),
    "fedstat.stats.icc_resampling": ("Errors", "Influence"),
    "fedstat.stats.icc_tests": ("AgreementTest",),
    "fedstat.stats.nested": ("GroupComponents",),
    "fedstat.stats.pooling": ("Pooled",),
    "fedstat.stats.variance_components": ("Components",),
    "fedstat.ntk.results": ("ConvergenceResult", "ExtremeEigenvalues", "GeneralizationResult"),
    "fedstat.study.compare": ("RunsResult",),
}  # fmt: skip
"""Classes that are stored, by module. Names in files are looked up here, and nowhere else."""
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names}

_VARIABLE = re.compile(r"(?!\.)[\w.-]{1,100}", re.ASCII)
_DTYPE = re.compile(r"[<>|=][biufU]\d{1,12}|[<>|=][mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?")
_EXTENSIONS = ("str", "string", "boolean", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64",
               "Float32", "Float64")  # fmt: skip
"""Columns of pandas that are no arrays of NumPy."""

Arrays = dict[str, NDArray[Any]]
Take = Callable[[str, np.dtype[Any]], NDArray[Any]]
"""Function that returns an array of a file by its name and its dtype."""


def as_dataset(result: Any) -> xr.Dataset:
    """Convert a result to arrays, with its other fields as JSON in the attribute ``result``."""
    rest, arrays = encode(result)
    variables = {
        name: ([f"axis{i}_{n}" for i, n in enumerate(a.shape)], a.astype(object) if a.dtype.kind == "U" else a)
        for name, a in arrays.items()
    }
    return xr.Dataset(variables, attrs={"result": json.dumps(rest), "format": FORMAT})


def from_dataset(data: xr.Dataset) -> Any:
    """Rebuild a result from :func:`as_dataset`; nothing in the data is executed."""
    require_version(data.attrs.get("format", 1), FORMAT, "the result")

    def read(name: str, dtype: np.dtype[Any]) -> tuple[int, Callable[[], NDArray[Any]]]:
        return data[name].size, lambda: data[name].to_numpy().astype(dtype)

    return decode(guard.parsed("the result", data.attrs["result"].encode()), read)


def encode(result: Any) -> tuple[Any, Arrays]:
    """Encode a result, or results by layer, as JSON and arrays by name.

    Arrays have numbers, bools or texts; dates are integers. An object of the JSON has one key that tells what it is:

    - ``array``: name of the array, with its ``dtype``; ``scalar``: a NumPy scalar, with its ``dtype``;
    - ``tensor``: name of the array of a tensor of torch, with its ``dtype``;
    - ``labels``: entries of an array of mixed kinds, bytes or complex numbers in row-major order, with its ``shape``
      and, for the last two, its ``dtype``;
    - ``bytes``, ``complex``, ``date``, ``datetime``, ``timedelta``, ``Timestamp``, ``Timedelta``, ``Period``,
      ``Interval``: parts of a label of this kind;
    - ``float``: "nan", "inf" or "-inf"; ``list``, ``tuple``: entries; ``dict``: values by name; ``items``: pairs;
    - ``absolute``: value of an absolute threshold;
    - ``frame``: columns of a table, each with its name, and the ``index``, null for positions;
    - ``dataset``, ``dataarray``: names and variables, of which ``coords`` lists the coordinates; the ``attrs`` of the
      dataset; the ``name`` and the ``values`` of the DataArray; ``levels``, names of the levels of an index by dim;
    - ``of``: name of a class, ``with`` its fields, and the ``origin`` of a result where it is known.

    Raises
    ------
    TypeError
        If the result holds an object of another kind.
    """
    arrays: Arrays = {}
    return _encode(result, "", arrays), arrays


def decode(rest: Any, read: Callable[[str, np.dtype[Any]], tuple[int, Callable[[], NDArray[Any]]]]) -> Any:
    """Rebuild what :func:`encode` encoded; nothing is executed.

    Parameters
    ----------
    rest : JSON
    read : callable (name, dtype)
        Returns the number of entries of an array, and a function that reads it.

    Raises
    ------
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError
        If the JSON or an array is not as :func:`encode` writes them.
    LimitError
        If all arrays together exceed the limit.
    """
    sizes: dict[str, int] = {}

    def take(name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        if name in sizes:
            raise ValueError(f"the array {name!r:.100} is used twice")
        n, content = read(name, dtype)
        sizes[name] = n * dtype.itemsize
        guard.size("the result", sum(sizes.values()), f"{name:.100} as {dtype} and the arrays before it")
        return content()

    result = _decode(rest, take)
    require_sound(result)
    return result


def _class(name: Any) -> Any:
    check.choice("the kind of a stored result", name, sorted(_MODULE_OF))
    return getattr(import_module(_MODULE_OF[name]), name)


def _of_timestamp(text: str, zone: str | None) -> Any:
    stamp = pd.Timestamp(text)
    return stamp if zone is None else stamp.tz_convert(ZoneInfo(zone))


def _zone(stamp: Any) -> str | None:
    """Return the name of a time zone; raise TypeError if it has none."""
    if stamp.tzinfo is None:
        return None
    if str(stamp.tzinfo) not in available_timezones():
        raise TypeError(f"a label with the time zone {stamp.tzinfo} cannot be saved. Convert it to UTC.")
    return str(stamp.tzinfo)


_LABELS: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "bytes": (lambda x: [x.decode("latin-1")], lambda text: text.encode("latin-1")),
    "complex": (lambda x: [x.real, x.imag], complex),
    "date": (lambda x: [x.isoformat()], date.fromisoformat),
    "datetime": (lambda x: [x.isoformat()], datetime.fromisoformat),
    "timedelta": (lambda x: [x.days, x.seconds, x.microseconds], timedelta),
    "Timestamp": (lambda x: [x.isoformat(), _zone(x)], _of_timestamp),
    "Timedelta": (lambda x: [x.isoformat()], lambda text: pd.Timedelta(text)),
    "Period": (lambda x: [x.ordinal, x.freqstr], lambda ordinal, freq: pd.Period(ordinal=ordinal, freq=freq)),
    "Interval": (lambda x: [x.left, x.right, x.closed], lambda *parts: pd.Interval(*parts)),
}
"""Labels of coordinates that JSON lacks: their parts, and the label of these parts."""
_LABEL_DTYPES = ("S", "<c8", "<c16")
_MOST_BYTES = {"S": 10_000, "c": 16}


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    kind = next((k.__name__ for k in type(value).__mro__ if k.__name__ in _LABELS), None)
    if kind is not None:
        return {kind: [_encode(part, path, arrays) for part in _LABELS[kind][0](value)]}
    if isinstance(value, np.generic):
        dtype = value.dtype.str
        item = value.astype("i8").item() if value.dtype.kind in "mM" else value.item()
        return {"scalar": _encode(item, path, arrays), "dtype": dtype}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Absolute):
        return {"absolute": _encode(value.value, path, arrays)}
    if isinstance(value, list) or type(value) is tuple:
        return {type(value).__name__: [_encode(x, f"{path}.{i}", arrays) for i, x in enumerate(value)]}
    if type(value).__name__ in _MODULE_OF and type(value) is _class(type(value).__name__):
        return _encode_fields(value, path, arrays)
    if isinstance(value, pd.DataFrame):
        return _encode_frame(value, path, arrays)
    if isinstance(value, xr.Dataset | xr.DataArray):
        return _encode_labelled(value, path, arrays)
    if isinstance(value, Mapping):
        if all(type(name) is str for name in value):
            return {"dict": {name: _encode(x, f"{path}.{name}", arrays) for name, x in value.items()}}
        return {"items": [[_encode(name, path, arrays), _encode(x, path, arrays)] for name, x in value.items()]}
    if is_torch_array(value):
        return {"tensor": _name(path, arrays, value.detach().cpu().numpy()), "dtype": str(value.dtype)}
    if hasattr(value, "__array__"):
        return _encode_array(np.asarray(value), path, arrays)
    raise TypeError(
        f"a {type(value).__name__} cannot be saved, but the result holds one{f' in {path[1:]}' if path else ''}. Save "
        "result.tidy() by pandas instead."
    )


def _encode_fields(value: Any, path: str, arrays: Arrays) -> dict[str, Any]:
    names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
    rest = {
        "of": type(value).__name__,
        "with": {name: _encode(getattr(value, name), f"{path}.{name}", arrays) for name in names},
    }
    origin = value.origin if isinstance(value, Result) else None
    return rest if origin is None else rest | {"origin": _encode(origin, f"{path}.origin", arrays)}


def _encode_array(array: NDArray[Any], path: str, arrays: Arrays) -> dict[str, Any]:
    if array.dtype.kind == "O":  # labels of mixed kinds
        labels = [_encode(x, path, arrays) for x in array.ravel().tolist()]
        return {"labels": labels, "shape": list(array.shape)}
    if array.dtype.kind == "T":  # StringDType of NumPy
        array = np.array(array.tolist(), dtype=str)
    if array.dtype.kind in "Sc" and array.itemsize <= _MOST_BYTES[array.dtype.kind]:
        labels = [_encode(x, path, arrays) for x in array.ravel().tolist()]
        dtype = "S" if array.dtype.kind == "S" else f"<c{array.itemsize}"
        return {"labels": labels, "shape": list(array.shape), "dtype": dtype}
    dtype = array.dtype.str
    if not _DTYPE.fullmatch(dtype) or (array.dtype.kind == "f" and array.itemsize > 8):
        raise TypeError(f"an array of {array.dtype} cannot be saved, but the result holds one in {path[1:]}.")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return {"array": _name(path, arrays, native.view("i8") if array.dtype.kind in "mM" else native), "dtype": dtype}


def _name(path: str, arrays: Arrays, array: NDArray[Any]) -> str:
    """Add an array under its path, or under a number if the path cannot be the name of a file; return the name."""
    name = path.removeprefix(".")
    if not _VARIABLE.fullmatch(name) or name in arrays:
        name = f"array_{len(arrays)}"
    arrays[name] = array
    return name


def _encode_frame(table: pd.DataFrame, path: str, arrays: Arrays) -> dict[str, Any]:
    columns = [_encode_column(table.iloc[:, i], f"{path}.{name}", arrays) for i, name in enumerate(table)]
    is_default = table.index.equals(pd.RangeIndex(len(table))) and table.index.name is None
    return {
        "frame": columns,
        "columns": _encode_index(table.columns, f"{path}.columns", arrays),
        "index": None if is_default else _encode_index(table.index, f"{path}.index", arrays),
        "rows": len(table),
    }


def _encode_index(index: pd.Index, path: str, arrays: Arrays) -> Any:
    if isinstance(index, pd.MultiIndex):
        raise TypeError(f"an index of several levels cannot be saved, but the result holds one in {path[1:]}.")
    return {"values": _encode_column(index.to_series(), path, arrays), "name": _encode(index.name, path, arrays)}


def _encode_column(column: pd.Series[Any], path: str, arrays: Arrays) -> Any:
    if isinstance(column.dtype, np.dtype):
        return _encode_array(column.to_numpy(), path, arrays)
    if isinstance(column.dtype, pd.CategoricalDtype):
        return {
            "categorical": _encode_array(column.cat.codes.to_numpy(), path, arrays),
            "categories": _encode_index(column.cat.categories, f"{path}.categories", arrays),
            "ordered": bool(column.cat.ordered),
        }
    values = column.astype(object).where(column.notna(), None).to_numpy()
    return {"column": _encode_array(values, path, arrays), "dtype": str(column.dtype)}


def _encode_labelled(data: xr.Dataset | xr.DataArray, path: str, arrays: Arrays) -> dict[str, Any]:
    levels = {
        dim: [*index.names]
        for dim, index in data.indexes.items()
        if isinstance(index, pd.MultiIndex) and dim in data.dims
    }
    variables = {name: variable.variable for name, variable in data.coords.items() if name not in levels}
    rest: dict[str, Any] = {"coords": _encode([*variables], path, arrays)}
    if levels:
        rest["levels"] = _encode(levels, path, arrays)
    if isinstance(data, xr.Dataset):
        variables = {**variables, **{name: variable.variable for name, variable in data.data_vars.items()}}
        rest |= {"attrs": _encode(data.attrs, path, arrays)}
    else:
        rest |= {"name": _encode(data.name, path, arrays), "values": _encode_variable(data.variable, path, arrays)}
    pairs = [
        [_encode(name, path, arrays), _encode_variable(variable, f"{path}.{name}", arrays)]
        for name, variable in variables.items()
    ]
    return {"dataset" if isinstance(data, xr.Dataset) else "dataarray": pairs, **rest}


def _encode_variable(variable: xr.Variable, path: str, arrays: Arrays) -> dict[str, Any]:
    is_zoned = isinstance(variable, xr.IndexVariable) and isinstance(variable.to_index().dtype, pd.DatetimeTZDtype)
    values = variable.to_index().astype(object).to_numpy() if is_zoned else variable.values
    return {
        "dims": _encode([*variable.dims], path, arrays),
        "data": _encode_array(values, path, arrays),
        "attrs": _encode(variable.attrs, f"{path}.attrs", arrays),
    }


def _decode(rest: Any, take: Take) -> Any:
    if not isinstance(rest, dict):
        return rest
    (kind,) = _DECODERS.keys() & rest.keys()
    return _DECODERS[kind](rest, take)


def _decode_fields(rest: dict[str, Any], take: Take) -> Any:
    kind = _class(rest["of"])
    result = kind(**{name: _decode(x, take) for name, x in rest["with"].items()})
    if "origin" in rest and isinstance(result, Result):
        return with_origin(result, _decode(rest["origin"], take))
    return result


def _dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"there is no dtype {text!r:.100} in results")
    return np.dtype(text)


def _decode_array(rest: dict[str, Any], take: Take) -> NDArray[Any]:
    return take(rest["array"], _dtype(rest["dtype"]))


def _decode_scalar(rest: dict[str, Any], take: Take) -> Any:
    return np.array(_decode(rest["scalar"], take), _dtype(rest["dtype"]))[()]


def _decode_tensor(rest: dict[str, Any], take: Take) -> Any:
    dtype = torch.empty(0, dtype=getattr(torch, check.choice("a dtype", rest["dtype"], _TENSORS)[6:])).numpy().dtype
    return torch.from_numpy(np.array(take(rest["tensor"], dtype)))


_TENSORS = [f"torch.{name}" for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32",
                                         "float64")]  # fmt: skip


def _decode_label(kind: str, rest: dict[str, Any], take: Take) -> Any:
    return _LABELS[kind][1](*(_decode(part, take) for part in rest[kind]))


def _decode_labels(rest: dict[str, Any], take: Take) -> NDArray[Any]:
    entries = rest["labels"]
    labels = np.empty(len(entries), object)
    for i, entry in enumerate(entries):
        labels[i] = _decode(entry, take)
    if "dtype" in rest:
        labels = np.array(labels.tolist(), dtype=check.choice("a dtype", rest["dtype"], _LABEL_DTYPES))
    return labels.reshape(rest["shape"])


def _decode_frame(rest: dict[str, Any], take: Take) -> pd.DataFrame:
    columns = [_decode_column(column, take) for column in rest["frame"]]
    if wrong := [len(column) for column in columns if len(column) != rest["rows"]]:
        raise ValueError(f"a table of {rest['rows']!r:.100} rows has a column of {wrong[0]}")
    index = pd.RangeIndex(guard.size("the table", rest["rows"], share=32, unit="rows"))
    table = pd.DataFrame(dict(enumerate(columns)), index=index)
    table.columns = _decode_index(rest["columns"], take)
    return table if rest["index"] is None else table.set_axis(_decode_index(rest["index"], take), axis="index")


def _decode_index(rest: dict[str, Any], take: Take) -> pd.Index:
    values = _decode_column(rest["values"], take)
    return pd.Index(values, dtype=values.dtype, name=_decode(rest["name"], take))


def _decode_column(rest: dict[str, Any], take: Take) -> Any:
    if "categorical" in rest:
        codes, categories = _decode(rest["categorical"], take), _decode_index(rest["categories"], take)
        return pd.Categorical.from_codes(codes, categories, ordered=rest["ordered"])
    if "column" in rest:
        return pd.array(_decode(rest["column"], take), dtype=check.choice("a dtype", rest["dtype"], _EXTENSIONS))
    return _decode(rest, take)


def _decode_labelled(rest: dict[str, Any], take: Take) -> xr.Dataset | xr.DataArray:
    pairs = rest["dataset"] if "dataset" in rest else rest["dataarray"]
    variables = {_decode(name, take): _decode_variable(variable, take) for name, variable in pairs}
    names = _decode(rest["coords"], take)
    coords = {name: variables.pop(name) for name in names}
    for dim, level_names in _decode(rest.get("levels"), take).items() if "levels" in rest else ():
        columns = [coords.pop(name).values for name in level_names]
        index = pd.MultiIndex.from_arrays(columns, names=level_names)
        coords |= xr.Coordinates.from_pandas_multiindex(index, dim).variables
    if "dataset" in rest:
        return xr.Dataset(variables, coords, _decode(rest["attrs"], take))
    data = _decode_variable(rest["values"], take)
    return xr.DataArray(data, coords, name=_decode(rest["name"], take))


def _decode_variable(rest: dict[str, Any], take: Take) -> xr.Variable:
    return xr.Variable(_decode(rest["dims"], take), _decode(rest["data"], take), _decode(rest["attrs"], take))


def _decode_dict(rest: dict[str, Any], take: Take) -> dict[str, Any]:
    return {name: _decode(x, take) for name, x in rest["dict"].items()}


_DECODERS: dict[str, Callable[[dict[str, Any], Take], Any]] = {
    "of": _decode_fields,
    "array": _decode_array,
    "scalar": _decode_scalar,
    "tensor": _decode_tensor,
    **{kind: partial(_decode_label, kind) for kind in _LABELS},
    "labels": _decode_labels,
    "float": lambda rest, _: float(rest["float"]),
    "absolute": lambda rest, take: Absolute(_decode(rest["absolute"], take)),
    "list": lambda rest, take: [_decode(x, take) for x in rest["list"]],
    "tuple": lambda rest, take: tuple(_decode(x, take) for x in rest["tuple"]),
    "dict": _decode_dict,
    "items": lambda rest, take: {_decode(name, take): _decode(x, take) for name, x in rest["items"]},
    "frame": _decode_frame,
    "dataset": _decode_labelled,
    "dataarray": _decode_labelled,
}
