"""Types of the fields of stored results, which a changed file may break."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache
from numbers import Integral
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedstat._utils import guard
from fedstat.results.base import LayerResults, Result, UnitStatistics

_LABELS = ("units", "clients", "groups", "group_names")
"""Arrays of names, which may have any dtype."""
_KINDS: dict[Any, str] = {np.float64: "f", np.int64: "iu", np.bool_: "b", np.str_: "U", Any: "biuf"}
_LARGEST = 2**63


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is not ClassVar}


def require_sound(result: Any) -> None:
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
        return isinstance(value, np.ndarray) and value.dtype.kind in _KINDS[get_args(args[1])[0]]
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
