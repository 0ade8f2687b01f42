"""Checks of arguments, with one message for each mistake, and warnings that point to the user's line."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Number, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from array_api_compat import is_torch_array
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class EffectIf(NamedTuple):
    """Condition, in an argument's ``Annotated``, without which the argument has no effect.

    Attributes
    ----------
    other : str
        Another argument of the function.
    holds : callable (value) -> bool
        True for values of ``other`` with which the argument has an effect.
    """

    other: str
    holds: Callable[[Any], bool]


def effect_of(annotation: Any) -> EffectIf | None:
    """Return the condition in an annotation, if there is one."""
    return next((part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, EffectIf)), None)


def effective(function: F) -> F:
    """Raise ValueError in calls that change an argument that has no effect, by its :class:`EffectIf`."""
    arguments = cache(lambda: inspect.signature(function, eval_str=True).parameters)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        values = {name: p.default for name, p in arguments().items()} | dict(zip(arguments(), args)) | options  # noqa: B905
        for name, p in arguments().items():
            if (condition := effect_of(p.annotation)) and not condition.holds(other := values[condition.other]):
                reason, hint = f"with {condition.other}={other!r}", f". Remove it, or change {condition.other}."
                require_default(name, values[name], p.default, reason, hint=hint)
        return function(*args, **options)

    return call  # type: ignore[return-value]


def require_default(name: str, value: object, default: object, reason: str, *, hint: str = "") -> None:
    """Raise ValueError if an argument that has no effect was changed from its default."""
    if value != default:
        raise ValueError(f"{name} has no effect {reason}, but got {value!r}{hint}")


def integer(name: str, value: object, *, low: int = 1, high: int | None = None) -> int:
    """Return ``value`` as an int in [low, high], or raise ValueError naming the argument."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or int(value) < low or (high is not None and int(value) > high):  # type: ignore[call-overload]
        bounds = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise ValueError(f"{name} must be {bounds}, but got {value!r:.200}")
    return int(value)  # type: ignore[call-overload]


def real(
    name: str,
    value: object,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    hint: str = "",
) -> float:
    """Return ``value`` as a finite float in the interval, or raise ValueError naming the argument."""
    valid = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if valid:
        x = float(value)  # type: ignore[arg-type]
        valid = (x > low if open_low else x >= low) and (x < high if open_high else x <= high)
    if not valid:
        opening, closing = "(" if open_low or math.isinf(low) else "[", ")" if open_high or math.isinf(high) else "]"
        raise ValueError(
            f"{name} must be a finite number in {opening}{low:g}, {high:g}{closing}, but got {value!r:.200}"
            + (f". {hint}" if hint else "")
        )
    return x


def in_bytes(name: str, value: object) -> int:
    """Return a size such as "2GiB", "500MB" or a number of bytes as an int, or raise ValueError naming the argument.

    Examples
    --------
    >>> in_bytes("memory", "2GiB"), in_bytes("memory", "1.5 MB"), in_bytes("memory", 1000)
    (2147483648, 1500000, 1000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kMGT])(i?))?B?\s*", str(value), re.IGNORECASE)
    size = 0.0
    if match and isinstance(value, str | int):
        size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper())
    if not 1 <= size < math.inf:
        raise ValueError(f"{name} must be a size such as '2GiB', '500MB' or a number of bytes, but got {value!r:.200}")
    return int(size)


def choice(name: str, value: Any, options: Collection[Any]) -> Any:
    """Return ``value`` if it is one of ``options``, or raise ValueError offering the nearest names."""
    if value not in options:
        near = did_you_mean(value, options)
        raise ValueError(f"{name} must be one of {few(map(repr, options), 200)}, but got {value!r:.200}.{near}")
    return value


def require_setting(name: str, options: Collection[str], where: str = "") -> None:
    """Raise ValueError with the three nearest names unless a setting has one of many names."""
    if name not in options:
        near = did_you_mean(name, options, cutoff=0, most=3)
        raise ValueError(f"there is no setting {name!r:.200}{where}.{near}")


def did_you_mean(value: Any, options: Iterable[Any], *, cutoff: float = 0.4, most: int = 2) -> str:
    """Return a sentence that offers the nearest names, after a space; "" if no name is near.

    Names that begin with the value are nearest. ``cutoff`` is the smallest similarity of another name that is offered,
    from 0 to 1. Raise it if there are many names. At most ``most`` names are offered.

    Examples
    --------
    >>> did_you_mean("fc1.wieght", ["fc1.weight", "scale"])
    " Did you mean 'fc1.weight'?"
    >>> did_you_mean("fedfac", ["fedcac", "fedfac-static", "fedfac-dynamic"])
    " Did you mean 'fedfac-static' or 'fedfac-dynamic'?"
    """
    text, names = str(value)[:200], [str(option) for option in islice(options, 10_000)]
    longer = [name for name in names if len(text) > 2 and name.startswith(text)]
    near = longer[:most] or get_close_matches(text, names, n=most, cutoff=cutoff)
    return f" Did you mean {', '.join(map(repr, near[:-1]))}{' or ' * (len(near) > 1)}{near[-1]!r}?" if near else ""


def named_options(*sources: Callable[..., Any]) -> Callable[[F], F]:
    """Have a function name the nearest of its options for a misspelled one, as Python does from version 3.13 on.

    Parameters
    ----------
    *sources : callable
        Functions whose parameters are options, too: those that take the ``**`` options of the function.

    Examples
    --------
    >>> @named_options()
    ... def split(weights, *, kappa=0.85): ...
    >>> split(0, kapa=0.5)
    Traceback (most recent call last):
    TypeError: split() got an unexpected keyword argument 'kapa'. Did you mean 'kappa'?
    """

    def decorate(function: F) -> F:
        functions: tuple[Callable[..., Any], ...] = (function, *sources)
        parameters = [p for of in functions for p in inspect.signature(of).parameters.values()]
        options = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)

        @wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            __tracebackhide__ = True
            if not keywords.keys() <= options.keys():
                raise unknown_option(function.__name__, keywords, options)
            return function(*args, **keywords)

        return cast("F", call)

    return decorate


def unknown_option(function: str, keywords: Iterable[str], options: Collection[str]) -> TypeError:
    """Return the error of a function for the first keyword that is none of its options; it offers the nearest."""
    name = next(name for name in keywords if name not in options)
    near = did_you_mean(name, options, cutoff=0.6) or f" It takes {few(options, 40)}."
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}.{near}")


def few(labels: Iterable[Any], most: int = 3) -> str:
    """Return the first labels and the number of further labels, for a message; cut each label after 200 characters.

    Examples
    --------
    >>> few(["fc1", "fc2", "fc3", "fc4"])
    'fc1, fc2, fc3 and 1 more'
    """
    labels = [f"{x!s:.200}" for x in labels]
    return ", ".join(labels[:most]) + (f" and {len(labels) - most} more" if len(labels) > most else "")


def kind(value: object) -> str:
    """Return the type of a value with its article, for a message.

    Examples
    --------
    >>> kind([]), kind(array), kind(1), kind(None)
    ('a list', 'a function', 'an int', 'None')
    """
    name = type(value).__name__
    has_vowel = name[0] in "AEIOaeio" or name == "ndarray"
    return "None" if value is None else f"{'an' if has_vowel else 'a'} {name}"


def distinct(name: str, values: Collection[Any]) -> Any:
    """Return ``values`` if there are any and no two are equal, or raise ValueError naming the argument."""
    if not values or len({*map(str, values)}) < len(values):
        raise ValueError(f"{name} must hold at least one value and none twice, but got {values!r:.200}")
    return values


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called the package: the first line up the stack that is outside of it.

    Lines of contextlib are no user's: they stand between a context manager of the package and the ``with`` of its user.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def has_dims(values: object) -> bool:
    """Return True for a DataArray or Dataset; attributes ``dims`` of other objects, such as h5py's, name no axes."""
    return isinstance(getattr(values, "dims", None), tuple | Mapping)


def one_array(name: str, values: Any) -> Any:
    """Return ``values``, or raise ValueError naming the argument if they hold several arrays, as a run does."""
    if has_dims(values) and not hasattr(values, "dtype"):
        raise ValueError(
            f"{name} must be one array, but got {kind(values)}. Choose a layer's weights from a run: "
            "fedstat.fl.client_weights(run, 'fc1'), or a factor of them, client_weights(run, 'fc1', 'v')."
        )
    return values


def refuse_sources(name: str, values: Any) -> None:
    """Raise ValueError if values are results, files, state_dicts or modules, or a list of them, and no array."""
    first = values[0] if isinstance(values, list | tuple) and values else values
    got = kind(values) if first is values else f"a list of {type(first).__name__}"
    if hasattr(first, "tidy"):
        raise ValueError(f"{name} must be an array of numbers, but got {got}. Pass the weights behind it.")
    if first is not values and isinstance(first, str) and not Path(first).suffix:
        return  # labels, and no names of files
    if (isinstance(first, str | os.PathLike | Mapping) and not has_dims(first)) or hasattr(first, "state_dict"):
        raise ValueError(
            f"{name} must be one array, tensor or DataArray of numbers, but got {got}. Choose a layer first: "
            "fedstat.fl.client_weights(run, 'fc1') of a run, fedstat.read_weights(files)['fc1']['w'] of files and "
            "state_dicts."
        )


def array(name: str, values: Any) -> NDArray[Any]:
    """Return values as a NumPy array, or raise ValueError naming the argument if they are results or other objects."""
    refuse_sources(name, values)
    result = np.asarray(values)
    if result.dtype.kind == "O" and not result.ndim and not (hasattr(values, "toarray") or isinstance(values, Number)):
        raise ValueError(f"{name} must be an array, tensor or DataArray of numbers, but got {kind(values)}.")
    return result


def unmasked(name: str, values: Any) -> None:
    """Raise ValueError if some values of an array, or of the arrays of a list, are masked."""
    if isinstance(values, list | tuple):
        for array in values:
            if isinstance(array, list | tuple | np.ma.MaskedArray):
                unmasked(name, array)
    if np.ma.is_masked(values):
        raise ValueError(
            f"{name} must hold a value everywhere, but got a masked array with {np.ma.count_masked(values)} masked "
            "values. Leave out clients or units with masked values, or pass values.filled(...)."
        )


def numbers(name: str, values: Any) -> Any:
    """Return an array or tensor of real, unmasked numbers, or raise ValueError naming the argument.

    All but tensors and labeled arrays (arrays with ``dims``) become NumPy arrays. Lazy values are not read.
    """
    unmasked(name, values)
    if is_torch_array(values):
        if values.is_meta:
            raise ValueError(
                f'{name} holds no numbers, only a shape (device="meta"). Pass the model once it has weights.'
            )
        values = values.resolve_neg()  # NumPy does not read .imag of conjugated values
        sparse = str(values.layout) != "torch.strided"
        real_numbers = not (sparse or values.is_complex() or str(values.dtype) == "torch.bool")
        hint = "Pass .to_dense()." if sparse else "Pass .real, .imag or .abs() of complex, .double() of bool values."
        got = f"{values.layout} {values.dtype}"
    else:
        values = one_array(name, values) if has_dims(values) else array(name, values)
        real_numbers, got = values.dtype.kind in "fiu", f"dtype {values.dtype}"
        hint = "Pass .real, .imag or abs() of complex, .astype(float) of other, .toarray() of sparse values."
    if not real_numbers:
        raise ValueError(f"{name} must hold real numbers in a dense array, but got {got}. {hint}")
    return values


def numpy_of(values: Any) -> Any:
    """Return an array or tensor as an array on the host; types that NumPy lacks, such as bfloat16, become float32."""
    if not is_torch_array(values):
        return np.asarray(values)
    host = values.detach().cpu().resolve_conj().resolve_neg()
    in_numpy = not host.is_floating_point() or str(host.dtype) in ("torch.float64", "torch.float32", "torch.float16")
    return (host if in_numpy else host.float()).numpy()
