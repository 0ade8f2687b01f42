"""Command lines and TOML files of settings that are a dataclass."""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedstat._utils import check, guard

_METAVAR = {float: "X", int: "N", str: "NAME"}
_NOUNS = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}
_UNIONS = (Union, UnionType)  # Literal[...] | None is of the first, int | None of the second
_hints = cache(get_type_hints)
_LONGEST_KEY, _LONGEST = 200, 1000  # characters of a key, and of a text


def add_arguments(
    cli: argparse._ActionsContainer,
    settings: type,
    helps: Mapping[str, str],
    choices: Mapping[str, Sequence[Any]],
    groups: Mapping[str, Sequence[str]],
) -> dict[str, argparse._ArgumentGroup]:
    """Give a command line one option for every field of a dataclass of settings, without a default of its own.

    Parameters
    ----------
    cli : argparse.ArgumentParser
    settings : dataclass
        Fields of type int, float, str, tuples of these, or None.
    helps : mapping from field to str
    choices : mapping from field to sequence
        Fields with a fixed set of values.
    groups : mapping from title to sequence of field
        Titles under which ``--help`` lists the options, in this order; every field is in one of them.

    Returns
    -------
    dict from title to argparse group
        For options of the command that belong there, too.
    """
    hints = _hints(settings)
    made = {title: cli.add_argument_group(title) for title in groups}
    of = {name: made[title] for title, names in groups.items() for name in names}
    for field in fields(settings):
        kind, many = _kind(hints[field.name])
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        of[field.name].add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            nargs="+" if many else None,
            choices=choices.get(field.name),
            metavar=_METAVAR[kind],
            help=helps[field.name]
            + (f" (default {' '.join(map(str, values))})" if values not in ((None,), ()) else ""),
        )
    return made


def _kind(hint: Any) -> tuple[type, bool]:
    """Type of one value of a field, and whether it takes several: ``tuple[float, ...] | None`` to (float, True)."""
    if get_origin(hint) in _UNIONS:
        parts = [part for part in get_args(hint) if part is not NoneType]
        hint = next((part for part in parts if get_origin(part) is tuple), parts[0])
    many = get_origin(hint) is tuple
    kind = get_args(hint)[0] if many else hint
    return (kind, many) if kind in _METAVAR else (str, many)


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
        return " or ".join(_described(part) for part in get_args(hint) if part is not NoneType)
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
