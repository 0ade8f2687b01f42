"""Command lines and TOML files for dataclasses of settings."""

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
_PLURALS = {float: "numbers", int: "integers", str: "strings", Path: "paths"}
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
    nonempty: bool = False,
    aliases: Sequence[str] = (),
    parse: Callable[[str], Any] | None = None,
) -> Any:
    """Declare a setting: a dataclass field with the metadata that commands and :func:`check_fields` need.

    Parameters
    ----------
    default : object
    group : str
        Title under which ``--help`` lists the option.
    help : str
        Meaning of the setting, in a line; ``--help`` appends the default.
    low, high : float
        Smallest and largest value of a number, or of every number in a tuple.
    above, below : float, optional
        Exclusive bounds, in place of ``low`` and ``high``.
    infinite : bool
        If True, infinity is allowed in addition to the interval.
    choices : collection, optional
        All allowed values; a field of type Literal does not need it.
    nonempty : bool
        If True, a tuple must hold at least one value.
    aliases : sequence of str
        Other names of the option, such as "--victims".
    parse : callable (str), optional
        Converts the option's text to a value; by default the type of the field does.
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
            "nonempty": nonempty, "aliases": aliases, "parse": parse,
        },
    )  # fmt: skip


def check_fields(settings: Any) -> None:
    """Check a settings object against the declarations of its fields; convert single values and sequences to tuples.

    Raises
    ------
    ValueError
        If a value has another type, lies outside of its bounds or is not among its choices; if a tuple holds a value
        twice, or is empty though it must not be.
    """
    hints = _hints(settings.__class__)
    for declared in fields(settings):
        name, setting_value = declared.name, getattr(settings, declared.name)
        if setting_value is None and NoneType in get_args(hints[name]):
            continue
        hint = _without_none(hints[name])
        kind, values = hint, (setting_value,)
        if get_origin(hint) is tuple:
            kind = get_args(hint)[0]
            is_single = isinstance(setting_value, str) or np.ndim(setting_value) == 0
            values = (setting_value,) if is_single else tuple(setting_value)
            object.__setattr__(settings, name, values)
            if values or declared.metadata["nonempty"]:
                check.distinct(name, values)
        if options := declared.metadata["choices"] or _literals(kind):
            for value in values:
                check.choice(name, value, options)
        elif kind in (int, float):
            for value in values:
                _check_number(declared, kind, value)
        else:
            require_types({name: getattr(settings, name)}, type(settings))


def _without_none(hint: Any) -> Any:
    """Return a field's type without None: ``float | None`` becomes float."""
    parts = [part for part in get_args(hint) if part is not NoneType] if get_origin(hint) in _UNIONS else []
    return parts[0] if len(parts) == 1 else hint


def _literals(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check_number(declared: Field[Any], kind: type, value: Any) -> None:
    interval = declared.metadata["interval"]
    if kind is int:
        high = interval["high"]
        check.integer(declared.name, value, low=interval["low"], high=None if math.isinf(high) else high)
    elif not (declared.metadata["infinite"] and isinstance(value, Real) and math.isinf(value)):
        check.real(declared.name, value, **interval)


def add_arguments(cli: argparse._ActionsContainer, settings: type) -> dict[str, argparse._ArgumentGroup]:
    """Add one option per field of a dataclass of settings to a command line; an absent option is None.

    Parameters
    ----------
    cli : argparse.ArgumentParser
    settings : dataclass
        Fields of type int, float, str, bool, Path, tuples of these, or None, each declared by :func:`setting`.

    Returns
    -------
    dict from title to argparse group
        The command may add further options to a group.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for declared in fields(settings):
        title = declared.metadata["group"]
        if title not in groups:
            groups[title] = cli.add_argument_group(title)
        kind, is_many = _kind(_hints(settings)[declared.name])
        values = declared.default if isinstance(declared.default, tuple) else (declared.default,)
        default = "" if values in ((None,), ()) or kind is bool else f" (default {' '.join(map(str, values))})"
        options: dict[str, Any] = {"nargs": "+" if is_many else None}
        if kind is bool:
            options = {"action": "store_true", "default": None}
        elif literals := _literals(kind):
            options |= {"metavar": f"{{{','.join(literals)}}}"}
        else:
            options |= {"type": declared.metadata["parse"] or kind, "metavar": _METAVAR[kind]}
        groups[title].add_argument(
            *declared.metadata["aliases"],
            f"--{declared.name.replace('_', '-')}",
            dest=declared.name,
            help=declared.metadata["help"] + default,
            **options,
        )
    return groups


def _kind(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value and True if there may be several: ``tuple[float, ...] | None``: (float, True)."""
    if get_origin(hint) in _UNIONS:
        parts = [part for part in get_args(hint) if part is not NoneType]
        hint = next((part for part in parts if get_origin(part) is tuple), parts[0])
    is_many = get_origin(hint) is tuple
    return (get_args(hint)[0] if is_many else hint), is_many


def read_arguments(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the settings that the user passed on the command line, by name."""
    values = {field.name: getattr(args, field.name) for field in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}


# A key with more than guard.DEPTH parts: the memory that tomllib takes is quadratic in their number.
_PART = r"""(?>[\w-]+|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*')[ \t]*+"""
_DEEP_KEY = re.compile(rf"(?<![\w\\-])(?:{_PART}\.[ \t]*+){{{guard.DEPTH}}}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file; raise ValueError with the file's name if it cannot be read."""
    try:
        text = guard.content(path, share=guard.SETTINGS).decode()
        if deep_key := _DEEP_KEY.search(text):
            raise ValueError(f"the key {deep_key[0][:60]}... is nested too deep: it has more than {guard.DEPTH} parts")
        content = tomllib.loads(text)
        if long_key := next((key for key in _keys(content) if len(key) > _LONGEST_KEY), None):
            raise ValueError(
                f"the key {long_key[:60]}... has {len(long_key):,} characters, but at most {_LONGEST_KEY} are read"
            )
        return content
    except guard.LimitError:
        raise
    except (OSError, ValueError) as error:  # ValueError also for text that is not UTF-8 or not TOML
        raise ValueError(f"{path} cannot be read: {error!s:.300}") from None
    except RecursionError:
        raise ValueError(f"{path} cannot be read: its values are nested too deep") from None


def _keys(content: Any) -> Iterator[str]:
    """Yield every key in the content of a file."""
    if isinstance(content, dict):
        yield from content
    for value in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _keys(value)


def table(content: Mapping[str, Any], key: str, where: object) -> dict[str, Any]:
    """Return a table of a file's content by name, {} if it is absent; raise ValueError if it is not a table."""
    value = content.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{key} in {where} must be a table, [{key}], but got {value!r:.200}")
    return value


def tables(content: Mapping[str, Any], key: str, where: object) -> list[dict[str, Any]]:
    """Return the tables under [[key]] in a file's content, [{}] if absent; raise ValueError for other values."""
    value = content.get(key, [{}])
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{key} in {where} must be tables, each headed by [[{key}]], but got {value!r:.200}")
    return value


def require_types(values: Mapping[str, Any], settings: type, where: str = "") -> None:
    """Raise ValueError if a value does not have the type of its field; the message appends ``where`` to the name."""
    for key, value in values.items():
        hint = _hints(settings)[key]
        items = value if isinstance(value, tuple) else [value]
        if any(isinstance(item, str) and len(item) > _LONGEST for item in items):
            raise ValueError(f"{key}{where} must have at most {_LONGEST:,} characters, but got {value!r:.100}...")
        if not _fits(hint, value):
            raise ValueError(f"{key}{where} must be {_describe(hint)}, but got {value!r:.200}")


def _fits(hint: Any, value: Any) -> bool:
    if get_origin(hint) in _UNIONS:
        return any(_fits(part, value) for part in get_args(hint))
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return all(_fits(kind, v) for v in value) if isinstance(value, list | tuple) else _fits(kind, value)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    if hint is NoneType:
        return value is None
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    """Return the values of a type in words, such as "a number or a list of numbers"."""
    if get_origin(hint) in _UNIONS:
        texts = [_describe(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(text for text in texts if not any(t.startswith(f"{text} or a list") for t in texts))
    if get_origin(hint) is tuple:
        kind = get_args(hint)[0]
        return f"{_describe(kind)} or a list of {_PLURALS.get(kind, 'such values')}"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return _NOUNS[hint]


def require_known(values: Mapping[str, Any], settings: type, where: str) -> None:
    """Raise ValueError with the nearest names if a key is not a field of the settings."""
    for key in values:
        check.require_setting(key, [field.name for field in fields(settings)], f" in {where}")
