"""Command lines and TOML files of settings that are a dataclass."""

from __future__ import annotations

import argparse
import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fedstat._utils import check, guard

_METAVAR = {float: "X", int: "N", str: "NAME", Path: "FILE"}
_NOUNS = {float: "a number", int: "an integer", str: "a string", bool: "true or false", Path: "a path"}
_UNIONS = (Union, UnionType)  # Literal[...] | None is of the first, int | None of the second
_hints = cache(get_type_hints)
_LONGEST_KEY, _LONGEST = 200, 1000  # characters of a key, and of a text


def setting(
    default: Any,
    group: str,
    help: str,  # noqa: A002
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    choices: Collection[Any] | None = None,
    distinct: bool = False,
    aliases: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a field of a dataclass of settings, with everything that commands and :func:`check_fields` need.

    Parameters
    ----------
    default : object
    group : str
        Title under which ``--help`` lists the option.
    help : str
        What the setting means, in a line; the default is added.
    low, high : float
        Smallest and largest value of a number, or of every number in a tuple.
    above, below : float, optional
        The same, but the bound itself is not allowed.
    infinite : bool
        Whether infinity is allowed in addition to the interval.
    choices : collection, optional
        All values; those of a field of type Literal need not be repeated.
    distinct : bool
        Whether a tuple must hold at least one value and none twice.
    aliases : sequence of str
        Other names of the option, such as "--victims".
    parse : callable (str), optional
        Makes a value of the option's text, where the type of the field does not.
    """
    interval = {
        "low": low if above is None else above,
        "high": high if below is None else below,
        "open_low": above is not None,
        "open_high": below is not None,
    }
    return field(
        default=default,
        metadata={
            "group": group, "help": help, "interval": interval, "infinite": infinite, "choices": choices,
            "distinct": distinct, "aliases": aliases, "parse": parse,
        },
    )  # fmt: skip


def check_fields(settings: Any) -> None:
    """Check an object of settings by what its fields declare; tuples may be given as one value or any sequence.

    Raises
    ------
    ValueError
        If a value has another type, lies outside of its bounds or is not among its choices; if a tuple that must be
        distinct is empty or holds a value twice.
    """
    hints = _hints(settings.__class__)
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value is None and NoneType in get_args(hints[one.name]):
            continue
        hint = _without_none(hints[one.name])
        kind, values = hint, (value,)
        if get_origin(hint) is tuple:
            kind = get_args(hint)[0]
            values = (value,) if isinstance(value, str) or np.ndim(value) == 0 else tuple(value)
            object.__setattr__(settings, one.name, values)
        if one.metadata["distinct"]:
            check.distinct(one.name, values)
        if options := one.metadata["choices"] or _literals(kind):
            for each in values:
                check.choice(one.name, each, options)
        elif kind in (int, float):
            for each in values:
                _check_number(one, kind, each)
        else:
            require_types({one.name: getattr(settings, one.name)}, type(settings))


def _without_none(hint: Any) -> Any:
    """Type of a field's values that are not None: ``float | None`` to float."""
    parts = [part for part in get_args(hint) if part is not NoneType] if get_origin(hint) in _UNIONS else []
    return parts[0] if len(parts) == 1 else hint


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check_number(one: Field[Any], kind: type, value: Any) -> None:
    interval = one.metadata["interval"]
    if kind is int:
        high = interval["high"]
        check.integer(one.name, value, low=interval["low"], high=None if math.isinf(high) else high)
    elif not (one.metadata["infinite"] and isinstance(value, Real) and math.isinf(value)):
        check.real(one.name, value, **interval)


def add_arguments(cli: argparse._ActionsContainer, settings: type) -> dict[str, argparse._ArgumentGroup]:
    """Give a command line one option for every field of a dataclass of settings, without a default of its own.

    Parameters
    ----------
    cli : argparse.ArgumentParser
    settings : dataclass
        Fields of type int, float, str, bool, Path, tuples of these, or None, each declared by :func:`setting`.

    Returns
    -------
    dict from title to argparse group
        For options of the command that belong there, too.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for one in fields(settings):
        title = one.metadata["group"]
        if title not in groups:
            groups[title] = cli.add_argument_group(title)
        kind, many = _kind(_hints(settings)[one.name])
        values = one.default if isinstance(one.default, tuple) else (one.default,)
        default = "" if values in ((None,), ()) or kind is bool else f" (default {' '.join(map(str, values))})"
        how: dict[str, Any] = {"nargs": "+" if many else None}
        if kind is bool:
            how = {"action": "store_true", "default": None}
        elif options := _literals(kind):
            how |= {"metavar": f"{{{','.join(options)}}}"}
        else:
            how |= {"type": one.metadata["parse"] or kind, "metavar": _METAVAR[kind]}
        groups[title].add_argument(
            *one.metadata["aliases"],
            f"--{one.name.replace('_', '-')}",
            dest=one.name,
            help=one.metadata["help"] + default,
            **how,
        )
    return groups


def _kind(hint: Any) -> tuple[Any, bool]:
    """Type of one value of a field, and whether it takes several: ``tuple[float, ...] | None`` to (float, True)."""
    if get_origin(hint) in _UNIONS:
        parts = [part for part in get_args(hint) if part is not NoneType]
        hint = next((part for part in parts if get_origin(part) is tuple), parts[0])
    many = get_origin(hint) is tuple
    return (get_args(hint)[0] if many else hint), many


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Settings that were given on the command line."""
    found = {field.name: getattr(args, field.name) for field in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if v is not None}


# A key of more parts than are read: tomllib takes memory that is quadratic in their number.
_PART = r"""(?>[\w-]+|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?<![\w\\-])(?:{_PART}\.[ \t]*+){{{guard.DEPTH}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """Contents of a TOML file, or ValueError naming the file."""
    try:
        text = guard.content(path, share=guard.SETTINGS).decode()
        if deep := _DEEP_KEY.search(text):
            raise ValueError(f"the key {deep[0][:60]}... is nested too deep: it has more than {guard.DEPTH} parts")
        content = tomllib.loads(text)
        if long := next((key for key in _keys(content) if len(key) > _LONGEST_KEY), None):
            raise ValueError(
                f"the key {long[:60]}... has {len(long):,} characters, but at most {_LONGEST_KEY} are read"
            )
        return content
    except guard.LimitError:
        raise
    except (OSError, ValueError) as error:  # also for what is not UTF-8, or not TOML
        raise ValueError(f"{path} cannot be read: {error!s:.300}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read: its values are nested too deep") from None


def _keys(content: Any) -> Iterator[str]:
    """Every key in a file's content."""
    if isinstance(content, dict):
        yield from content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _keys(value)


def table(found: Mapping[str, Any], key: str, where: object) -> dict[str, Any]:
    """Table of that name in a file's content, {} if there is none; ValueError if it is not a table."""
    value = found.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{key} in {where} must be a table, [{key}], but got {value!r:.200}")
    return value


def tables(found: Mapping[str, Any], key: str, where: object) -> list[dict[str, Any]]:
    """Tables of that name in a file's content, an empty one if there are none; ValueError if they are not tables."""
    value = found.get(key, [{}])
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise ValueError(f"{key} in {where} must be tables, each headed by [[{key}]], but got {value!r:.200}")
    return value


def require_types(found: Mapping[str, Any], settings: type, where: str = "") -> None:
    """ValueError if a value does not have the type of its field in the settings; ``where`` ends the name."""
    for key, value in found.items():
        hint = _hints(settings)[key]
        if any(
            isinstance(one, str) and len(one) > _LONGEST for one in (value if isinstance(value, tuple) else [value])
        ):
            raise ValueError(f"{key}{where} must have at most {_LONGEST:,} characters, but got {value!r:.100}...")
        if not _fits(hint, value):
            raise ValueError(f"{key}{where} must be {_described(hint)}, but got {value!r:.200}")


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) in _UNIONS:
        return any(_fits(part, value) for part in get_args(hint))
    if get_origin(hint) is tuple:
        each = get_args(hint)[0]
        return all(_fits(each, v) for v in value) if isinstance(value, list | tuple) else _fits(each, value)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is NoneType:
        return value is None
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _described(hint: Any) -> str:
    if get_origin(hint) in _UNIONS:
        parts = [_described(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(one for one in parts if f"{one} or a list of such" not in parts)
    if get_origin(hint) is tuple:
        noun = _described(get_args(hint)[0])
        return f"{noun} or a list of such"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return _NOUNS[hint]


def require_known(found: Mapping[str, Any], settings: type, where: str) -> None:
    """ValueError, with the nearest names, if a key is not a field of the settings."""
    for key in found:
        check.choice(f"a setting of {where}", key, [field.name for field in fields(settings)])
