"""Results as arrays of a Dataset and JSON, without loss; a result that was read is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from functools import cache
from importlib import import_module
from numbers import Integral
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from zoneinfo import ZoneInfo, available_timezones

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import LayerResults, Result, UnitStatistics
from fedstat.results.origin import with_origin
from fedstat.stats.split import Absolute
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
    "fedstat.study.runs_result": ("RunsResult",),
}  # fmt: skip
"""Classes that are stored, by module. Names in files are looked up here, and nowhere else."""
_MODULE_OF = {name: module for module, names in MODULES.items() for name in names}

_VARIABLE = re.compile(r"(?!\.)[\w.-]{1,100}", re.ASCII)
_DTYPE = re.compile(r"[<>|=](b1|[iu][1248]|f[248]|c8|c16|O|U\d{1,12}|S\d{0,4}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)")

Arrays = dict[str, NDArray[Any]]
Take = Callable[[str, str], NDArray[Any]]
"""Function that returns an array of a file by its name and its dtype."""


def as_dataset(result: Any) -> xr.Dataset:
    """Convert a result to arrays, with its other fields as JSON in the attribute ``result``."""
    rest, arrays = encode(result)
    variables = {
        name: ([f"axis{i}_{n}" for i, n in enumerate(a.shape)], a.astype(object) if a.dtype.kind == "U" else a)
        for name, a in arrays.items()
    }
    return xr.Dataset(variables, attrs={"result": json.dumps(rest), "format": FORMAT})


def from_dataset(data: xr.Dataset, where: object = "the result") -> Any:
    """Rebuild a result from :func:`as_dataset`; nothing in the data is executed."""
    require_version(data.attrs.get("format", 1), FORMAT, where)
    rest = guard.parsed("the result", data.attrs["result"].encode())
    return decode(rest, lambda name: (data[name].size, lambda dtype: data[name].to_numpy().astype(dtype)))


def encode(result: Any) -> tuple[Any, Arrays]:
    """Encode a result, or results by layer, as JSON and arrays by name.

    Arrays have numbers, bools or texts; dates are integers, and tensors become arrays. An object of the JSON has one
    key, its kind, and a list of parts:

    - ``array``: name and dtype of an array;
    - ``labels``: entries of an array of mixed kinds, bytes or complex numbers in row-major order, its shape, and its
      dtype;
    - ``dict``: pairs of key and value;
    - a class of :data:`MODULES`: its fields, and its origin;
    - another kind of :data:`_KINDS`: parts from which it is rebuilt.

    Raises
    ------
    TypeError
        If the result holds an object of another kind; the message names the place.
    """
    arrays: Arrays = {}
    return _encode(result, "", arrays), arrays


def decode(rest: Any, read: Callable[[str], tuple[int, Callable[[str], NDArray[Any]]]]) -> Any:
    """Rebuild what :func:`encode` encoded; nothing is executed.

    Parameters
    ----------
    rest : JSON
    read : callable (name)
        Returns the number of entries of an array, and a function that reads it as a dtype.

    Raises
    ------
    ValueError, LookupError, TypeError, AttributeError, ArithmeticError
        If the JSON or an array is not as :func:`encode` writes them.
    LimitError
        If all arrays together exceed the limit.
    """
    sizes: list[int] = []

    def take(name: str, dtype: str) -> NDArray[Any]:
        n, content = read(name)
        sizes.append(n * _dtype(dtype).itemsize)
        guard.size("the result", sum(sizes), f"{name:.100} as {dtype} and the arrays before it")
        return content(dtype)

    result = _decode(rest, take)
    _require_printable(result)
    return result


def _class(name: str) -> Any:
    return getattr(import_module(_MODULE_OF[name]), name)


def _dtype(text: Any) -> np.dtype[Any]:
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"there is no dtype {text!r:.100} in results")
    return np.dtype(text)


def _zone(stamp: Any) -> str | None:
    """Return the name of a time zone; raise TypeError if it has none."""
    if stamp.tzinfo is None:
        return None
    if str(stamp.tzinfo) not in available_timezones():
        raise TypeError(f"a label with the time zone {stamp.tzinfo}")
    return str(stamp.tzinfo)


def _of_timestamp(text: str, zone: str | None) -> Any:
    stamp = pd.Timestamp(text)
    return stamp if zone is None else stamp.tz_convert(ZoneInfo(zone))


def _of_scalar(value: Any, dtype: str) -> Any:
    guard.size("the result", _dtype(dtype).itemsize)
    return np.array(value, dtype)[()]


def _of_labels(entries: list[Any], shape: list[int], dtype: str) -> NDArray[Any]:
    """Return an array of labels; NumPy would make an axis of labels that are tuples."""
    labels = np.fromiter(entries, object, len(entries)) if _dtype(dtype).kind == "O" else np.array(entries, dtype)
    return labels.reshape(shape)


def _frame_parts(table: pd.DataFrame) -> list[Any]:
    columns = {
        name: column.to_numpy(object) if column.dtype == "str"
        else column.to_numpy() if isinstance(column.dtype, np.dtype) else column.array
        for name, column in table.items()
    }  # fmt: skip
    is_default = table.index.equals(pd.RangeIndex(len(table))) and table.index.name is None
    return [columns, [str(dtype) for dtype in table.dtypes], None if is_default else table.index.to_numpy()]


def _of_frame(columns: dict[Any, NDArray[Any]], dtypes: list[str], index: Any) -> pd.DataFrame:
    index = pd.RangeIndex(max(map(len, columns.values()), default=0)) if index is None else pd.Index(index)
    parts = zip(columns.items(), dtypes, strict=True)
    return pd.DataFrame({name: pd.Series(values, index, dtype=dtype) for (name, values), dtype in parts}, index)


def _dataset_parts(data: xr.Dataset) -> list[Any]:
    """Return variables, coordinates, attributes, and the levels of each index of several levels."""
    levels = {
        dim: [*index.names]
        for dim, index in data.indexes.items()
        if isinstance(index, pd.MultiIndex) and dim in data.dims
    }
    data = data.reset_index([*levels])
    variables, coords = ({name: x.variable for name, x in part.items()} for part in (data.data_vars, data.coords))
    return [variables, coords, data.attrs, levels]


def _variable_parts(variable: xr.Variable) -> list[Any]:
    is_zoned = isinstance(variable, xr.IndexVariable) and isinstance(variable.to_index().dtype, pd.DatetimeTZDtype)
    values = variable.to_index().astype(object).to_numpy() if is_zoned else variable.values
    return [list(variable.dims), values, variable.attrs]


_KINDS: dict[str, tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    "float": (lambda x: [str(x)], float),
    "generic": (lambda x: [(x.astype("i8") if x.dtype.kind in "mM" else x).item(), x.dtype.str], _of_scalar),
    "labels": (lambda x: [x.ravel().tolist(), [*x.shape], x.dtype.str], _of_labels),
    "list": (lambda x: x, lambda *parts: [*parts]),
    "tuple": (lambda x: x, lambda *parts: parts),
    "Absolute": (lambda x: [x.value], Absolute),
    "DataFrame": (_frame_parts, _of_frame),
    "Dataset": (_dataset_parts, lambda *parts: xr.Dataset(*parts[:3]).set_index(parts[3])),
    "DataArray": (
        lambda x: [x.variable, x.coords.to_dataset(), x.name],
        lambda variable, coords, name: xr.DataArray(variable, coords.coords, name=name),
    ),
    "Variable": (_variable_parts, lambda *parts: xr.Variable(*parts)),
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
"""Classes that JSON lacks, by name: functions that return an object's parts, and the object of its parts. The last nine
are classes of labels."""


def _encode(value: Any, path: str, arrays: Arrays) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return {"float": [str(value)]} if isinstance(value, float) and not math.isfinite(value) else value
    name = type(value).__name__
    if name in _MODULE_OF and type(value) is _class(name):
        names = [f.name for f in fields(value)] if is_dataclass(value) else value._fields
        origin = _encode(value.origin, f"{path}.origin", arrays) if isinstance(value, Result) else None
        return {name: [_encode({name: getattr(value, name) for name in names}, path, arrays), origin]}
    kind = next((k.__name__ for k in type(value).__mro__ if k.__name__ in _KINDS), None)
    if kind is None and isinstance(value, Mapping):
        return {"dict": [[_encode(key, path, arrays), _encode(x, f"{path}.{key}", arrays)] for key, x in value.items()]}
    if isinstance(value, np.generic):
        kind = "generic"
    elif kind is None and hasattr(value, "__array__") and not isinstance(value, pd.api.extensions.ExtensionArray):
        try:
            value = np.asarray(value.detach().cpu() if is_torch_array(value) else value)
        except (TypeError, RuntimeError):  # a type that NumPy lacks, such as bfloat16
            raise _refused(f"an array of {value.dtype}", path) from None
        value = np.array(value.tolist(), str) if value.dtype.kind == "T" else value
        kind = "labels" if value.dtype.kind in "OSc" else "array"
    if kind is None or hasattr(value, "_fields"):
        raise _refused(f"a {name}", path)
    if kind in ("generic", "labels", "array") and not _DTYPE.fullmatch(value.dtype.str):
        raise _refused(f"an array or a number of {value.dtype}", path)
    if kind == "array":
        native = value.astype("i8" if value.dtype.kind in "mM" else value.dtype.newbyteorder("="), copy=False)
        return {"array": [_name(path, arrays, native), value.dtype.str]}
    try:
        parts = _KINDS[kind][0](value)
    except TypeError as error:
        raise _refused(str(error), path) from None
    is_sequence = kind in ("list", "tuple")
    return {kind: [_encode(x, f"{path}.{i}" if is_sequence else path, arrays) for i, x in enumerate(parts)]}


def _refused(what: str, path: str) -> TypeError:
    place = f" in {path[1:]}" if path else ""
    return TypeError(
        f"{what} cannot be saved, but the result holds one{place}. Save result.tidy() by pandas, or convert it to "
        "numbers or texts."
    )


def _name(path: str, arrays: Arrays, array: NDArray[Any]) -> str:
    """Add an array under its path, or under a number if the path cannot be the name of a file; return the name."""
    name = path.removeprefix(".")
    if not _VARIABLE.fullmatch(name) or name in arrays:
        name = f"array_{len(arrays)}"
    arrays[name] = array
    return name


def _decode(rest: Any, take: Take) -> Any:
    if not isinstance(rest, dict):
        return rest
    ((kind, parts),) = rest.items()
    if kind == "array":
        return take(*parts)
    if kind == "dict":
        return {_decode(key, take): _decode(value, take) for key, value in parts}
    check.choice("the kind of a stored object", kind, sorted(_MODULE_OF.keys() | _KINDS.keys()))
    parts = [_decode(part, take) for part in parts]
    if kind in _KINDS:
        return _KINDS[kind][1](*parts)
    values, origin = parts
    result = _class(kind)(**values)
    return result if origin is None else with_origin(result, origin)


_LABELS = ("units", "clients", "groups", "group_names")
"""Arrays of names, which may have any dtype."""
_DTYPE_KINDS: dict[Any, str] = {np.float64: "f", np.int64: "iu", np.bool_: "b", np.str_: "U", Any: "biuf"}
_LARGEST = 2**63


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def _require_printable(result: Any) -> None:
    """Raise ValueError, naming the field where possible, if a result that was read cannot be printed or tabled."""
    _require_fields(result)
    for single in result.results.values() if isinstance(result, LayerResults) else [result]:
        try:
            repr(single)
            single.tidy()
        except Exception as error:  # values that do not fit together raise errors of many types
            raise ValueError(
                f"fields of a {type(single).__name__} do not fit together: {guard.reason(error)}"
            ) from error


def _require_fields(record: Any, path: str = "") -> None:
    """Raise ValueError, naming the field, if a field has another type than its class declares."""
    for name, hint in _hints(record.__class__).items():
        value, where = getattr(record, name), path + name
        if not _is_of(value, object if name in _LABELS and isinstance(value, np.ndarray) else hint):
            raise ValueError(f"the field {where} of a {type(record).__name__} cannot be {value!r:.100}")
        for key, part in value.items() if isinstance(value, Mapping) else [("", value)]:
            if hasattr(part, "_fields") or (is_dataclass(part) and not isinstance(part, type)):
                _require_fields(part, f"{where}.{key}." if key else f"{where}.")


def _is_of(value: Any, hint: Any) -> bool:
    """Return True if a value has the type of a field."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, option) for option in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is np.ndarray:
        return isinstance(value, np.ndarray) and value.dtype.kind in _DTYPE_KINDS[get_args(args[1])[0]]
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(part, args[0]) for part in value)
    if origin is not None:  # a mapping
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and _is_of(part, args[1]) for key, part in value.items()
        )
    if isinstance(hint, TypeVar) or hint is UnitStatistics:
        return isinstance(value, Result) and (hint is not UnitStatistics or hasattr(value, "statistic_name"))
    if hint in (int, float):
        is_integer = isinstance(value, Integral) and not isinstance(value, bool) and abs(int(value)) < _LARGEST
        return (is_integer and value >= 0) if hint is int else is_integer or isinstance(value, float | np.floating)
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    return hint is Any or isinstance(value, hint)
