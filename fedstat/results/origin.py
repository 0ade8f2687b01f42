"""Origin of results: the verb, its arguments and a checksum of its input."""

from __future__ import annotations

import copy
import inspect
import math
import zlib
from collections.abc import Callable, Mapping
from functools import wraps
from os import PathLike, fspath
from typing import Any, ParamSpec, TypeVar

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

from fedstat._utils.lazy import pd, xr
from fedstat.results.base import Result
from fedstat.stats.split import Absolute


def checksum(data: Any) -> str | None:
    """Return the checksum of an array's values, dtype and shape; None if they are not in memory, or are no numbers.

    It is CRC-32 of the dtype, the shape and the values, in row-major order and little-endian. It detects mistakes; a
    forger can find other values with the same checksum.

    Parameters
    ----------
    data : array, tensor, DataArray or DataFrame
        A tensor on a GPU and a DataArray that is not loaded have no checksum. A DataFrame has that of its columns.

    Examples
    --------
    >>> checksum(np.arange(3.0))
    'crc32:5b4e2f1a'
    >>> checksum(np.array(["a"])) is None
    True
    """
    if isinstance(data, pd.DataFrame):
        crc = 0
        for name, column in data.items():
            values = column.to_numpy()
            if values.dtype.kind not in "biufc":
                values = np.frombuffer("\n".join(map(str, values)).encode(errors="surrogatepass"), np.uint8)
            crc = _update(zlib.crc32(f"{name}\n".encode(errors="surrogatepass"), crc), values)
    elif isinstance(data, np.ndarray | xr.DataArray) or is_torch_array(data):
        if (array := _numbers(data)) is None:
            return None
        crc = _update(0, array)
    else:
        return None
    return f"crc32:{crc:08x}"


def _numbers(data: Any) -> NDArray[Any] | None:
    """Return an array of numbers in memory, or None."""
    if isinstance(data, xr.DataArray):
        data = data.values if data.variable._in_memory else None
    elif is_torch_array(data):
        data = data.detach()
        if data.device.type != "cpu" or data.is_sparse:
            return None
        try:
            data = data.numpy()
        except (TypeError, RuntimeError):  # a type that NumPy lacks, such as bfloat16
            return None
    return data if isinstance(data, np.ndarray) and data.dtype.kind in "biufc" else None


def _update(crc: int, array: NDArray[Any]) -> int:
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    crc = zlib.crc32(f"{array.dtype.str} {array.shape}\n".encode(), crc)
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, crc)


_MOST = 20
"""Entries of a list or mapping that are recorded; of a longer one, its length."""

P = ParamSpec("P")
R = TypeVar("R", bound=Result)


def recorded(verb: Callable[P, R]) -> Callable[P, R]:
    """Extend a verb to record the origin of its result; its first argument is the input."""
    signature = inspect.signature(verb)

    @wraps(verb)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = verb(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name)
        return with_origin(result, origin_of(verb, arguments, next(iter(arguments.values()))))

    return call


def origin_of(verb: Callable[..., Any], arguments: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """Return the origin of a result: the verb's name, descriptions of its arguments, and a checksum of its input."""
    package = ".".join(verb.__module__.split(".")[:2]).replace("fedstat.labelled", "fedstat")
    described = {name: describe(value) for name, value in arguments.items() if name != "progress"}
    return {"verb": f"{package}.{verb.__name__}", "arguments": described, "input": checksum(data)}


def with_origin(result: R, origin: dict[str, Any]) -> R:
    """Return a copy of a result with its origin."""
    result = copy.copy(result)
    object.__setattr__(result, "_origin", origin)  # results are frozen
    return result


def describe(value: Any) -> Any:
    """Describe an argument by values that JSON has: numbers, texts, short lists; of arrays, kind, shape and dtype.

    Examples
    --------
    >>> describe({"kappas": (0.5, np.float64(0.75)), "weights": np.zeros((3, 2)), "tau": math.inf})
    {'kappas': [0.5, 0.75], 'weights': 'ndarray (3, 2) float64', 'tau': 'inf'}
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, PathLike):
        return str(fspath(value))
    kind = type(value).__name__
    if kind == "DataTree":  # a run has a title, and a tree few dims of its own
        return f"{kind} {value.root.attrs.get('title', '')}".rstrip()
    if isinstance(sizes := getattr(value, "sizes", None), Mapping):
        return f"{kind} {dict(sizes)}"
    if isinstance(shape := getattr(value, "shape", None), tuple):
        return f"{kind} {tuple(shape)} {getattr(value, 'dtype', '')}".rstrip()
    if isinstance(value, Absolute):
        return f"abs:{value.value}"
    if isinstance(value, list | tuple | Mapping) and len(value) > _MOST:
        return f"{kind} of {len(value)}"
    if isinstance(value, Mapping):
        return {str(name): describe(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [describe(entry) for entry in value]
    return kind
