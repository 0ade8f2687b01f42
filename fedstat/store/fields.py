"""Types and shapes of the fields of stored results, which a changed file may break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedstat._utils import check, guard
from fedstat._utils.lazy import pd, xr
from fedstat.results.base import LayerResults, Result, UnitStatistics
from fedstat.stats.icc import TYPES

SHAPES: dict[str, dict[str, str]] = {
    "AgreementTest": {"unit": "statistic p_value", "client client": "similarity"},
    "BootstrapResult": {
        "sample unit": "communality shared", "sample": "n_factors converged gap", "half unit": "half_samples",
        "group": "group_sizes",
    },
    "ClientClustersResult": {
        "client client": "similarity", "client": "clients cluster order groups", "merge 4": "merges",
    },
    "Coefficients": {"type": "df1 df2"},
    "EntropyResult": {
        "*": "entropy std_error n n_tied conf_low conf_high clustered", "* atom": "atom_mass",
        "* atom ...": "atom_value",
    },
    "FactorResult": {
        "unit": "communality heywood units agreement center scale", "unit factor": "loadings",
        "unit unit": "correlation", "factor factor": "phi",
    },
    "GroupAgreement": {
        "target": "within between", "variance target": "variances", "client": "influence", "3 group": "by_group",
    },
    "GroupIccResult": {"unit": "units constant untrained", "client": "clients group_codes", "group": "group_names"},
    "ComponentsResult": {
        "unit": "components units agreement group_components", "1": "layer_components layer_group_components",
        "group": "groups group_sizes",
    },
    "IccResult": {
        "unit": "mean_squares units reasons errors", "unit type": "coefficients", "type": "layer_coefficients",
        "client": "influence clients", "sample unit type": "replicates", "sample type": "layer_replicates",
    },
    "JackknifeResult": {
        "client": "client_blocks", "block unit": "communality", "block": "n_factors converged gap block_groups",
    },
    "NFactorsResult": {"_": "curves"},
    "PermutationResult": {"permutation unit": "communality"},
    "ShrunkenResult": {"unit": "pooled"},
    "SplitMapResult": {"analysis": "analyses", "analysis unit": "shared", "unit": "constant units"},
    "SplitResult": {"unit": "communality shared conclusion"},
    "StoredSplitResult": {"unit": "shared communality icc units decided"},
}  # fmt: skip
"""Dims of the arrays of results, by class: dims, and the fields that have them. Dims of a field that is a record, such
as ``coefficients``, are those of its arrays. A name has one size in a result and in the results that it holds; "*"
stands for the dims of the first such field, "..." for further dims, "_" for any size."""

_LABELS = ("units", "clients", "groups", "group_names")
"""Arrays of names, which may have any dtype."""
_KINDS: dict[Any, tuple[str, str]] = {
    np.float64: ("f", "floats"), np.int64: ("iu", "integers"), np.bool_: ("b", "bools"), np.str_: ("U", "texts"),
    Any: ("biuf", "numbers"),
}  # fmt: skip
_NOUNS = {int: "an integer >= 0", float: "a number", bool: "a bool", str: "a text", NoneType: "None"}
_LARGEST = 2**63


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def require_sound(result: Any) -> None:
    """Raise ValueError, naming the field where possible, if a result that was read cannot be printed."""
    require_fields(result)
    for single in result.results.values() if isinstance(result, LayerResults) else [result]:
        try:
            repr(single)
        except Exception as error:  # values that do not fit together raise errors of many types
            tables = [name for name, hint in _hints(single.__class__).items() if hint in (pd.DataFrame, xr.Dataset)]
            what = f"the field {tables[0]}" if len(tables) == 1 else f"fields of a {type(single).__name__}"
            raise ValueError(f"{what} cannot be printed: {guard.reason(error)}") from error


def require_fields(record: Any, path: str = "", dims: str = "", sizes: dict[str, Any] | None = None) -> None:
    """Raise ValueError, naming the field, if a field has another type or shape than its class declares.

    Parameters
    ----------
    record : dataclass or NamedTuple
        A result, or a record that it holds.
    path : str
        Prefix of the names of its fields, for messages.
    dims : str
        Dims of its arrays, unless :data:`SHAPES` names them.
    sizes : dict, optional
        Sizes of the dims that are known; the check adds others.
    """
    sizes = {"type": len(TYPES)} if sizes is None else sizes
    rows = SHAPES.get(type(record).__name__, {})
    dims_by_field = {name: names for names, texts in rows.items() for name in texts.split()}
    may_be_empty = {f.name for f in fields(record) if f.default_factory is not MISSING} if is_dataclass(record) else ()
    for name, hint in _hints(record.__class__).items():
        value, where, names = getattr(record, name), path + name, dims_by_field.get(name, dims)
        hint = object if name in _LABELS and isinstance(value, np.ndarray) else hint
        if not _is_of(value, hint) or (hint is Any and names and not _is_numeric(value)):
            raise ValueError(f"the field {where} must be {_describe(hint)}, but is {value!r:.100}")
        if name == "level":
            check.real(f"the field {where}", value, low=0, high=1, open_low=True, open_high=True)
        elif name == "n_obs" and value is not None:
            check.integer(f"the field {where}", value, low=2)
        elif name == "n_factors" and isinstance(value, int) and sizes.setdefault("factor", value) != value:
            raise ValueError(f"the field {where} must be the number of factors, {sizes['factor']}, but is {value}")
        parts = value.items() if isinstance(value, Mapping) else [("", value)]
        for key, part in parts:
            if hasattr(part, "_fields") or (is_dataclass(part) and not isinstance(part, type)):
                require_fields(part, f"{where}.{key}." if key else f"{where}.", names, None if key else sizes)
            elif names and hasattr(part, "shape") and not (0 in part.shape and name in may_be_empty):
                shape = part.shape[:1] if hasattr(part, "columns") else tuple(part.shape)
                if not _has_dims(shape, names, sizes):
                    listed = ", ".join(f"{dim}: {n}" for dim, n in sizes.items() if dim in names.split())
                    raise ValueError(
                        f"the field {where} must have the dims ({names}), but its shape is {shape} ({listed})"
                    )


def _has_dims(shape: tuple[int, ...], dims: str, sizes: dict[str, Any]) -> bool:
    names = dims.split()
    if names[0] == "*":
        first = sizes.setdefault("*", shape)
        if shape[: len(first)] != first:
            return False
        names, shape = names[1:], shape[len(first) :]
    if names[-1:] == ["..."]:
        names.pop()
        shape = shape[: len(names)]
    return len(names) == len(shape) and all(
        name == "_" or (int(name) if name.isdigit() else sizes.setdefault(name, n)) == n
        for name, n in zip(names, shape, strict=True)
    )


def _is_numeric(value: Any) -> bool:
    return hasattr(value, "shape") and np.asarray(value).dtype.kind in _KINDS[Any][0]


def _is_of(value: Any, hint: Any) -> bool:
    """Return True if a value has the type of a field."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(value, option) for option in args)
    if origin is Literal:
        return isinstance(value, str) and value in args
    if origin is np.ndarray:
        return isinstance(value, np.ndarray) and value.dtype.kind in _KINDS[get_args(args[1])[0]][0]
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


def _describe(hint: Any) -> str:
    """Return the type of a field in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_describe, args))
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is np.ndarray:
        return f"an array of {_KINDS[get_args(args[1])[0]][1]}"
    if origin is tuple:
        return "a tuple of texts"
    if origin is not None:
        return f"a mapping to {_describe(args[1])}"
    if hint is Any:
        return f"an array of {_KINDS[Any][1]}"
    return _NOUNS.get(hint, f"of the class {getattr(hint, '__name__', 'Result')}")
