"""Command lines and TOML files of settings that are a dataclass."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fedstat import _check

_METAVAR = {float: "X", int: "N", str: "NAME"}


def add_arguments(
    cli: argparse._ActionsContainer, settings: type, helps: Mapping[str, str], choices: Mapping[str, Sequence[Any]]
) -> None:
    """Give a command line one option for every field of a dataclass of settings, without a default of its own.

    Parameters
    ----------
    cli : argparse.ArgumentParser or group
    settings : dataclass
        Fields of type int, float, str, tuples of these, or None.
    helps : mapping from field to str
    choices : mapping from field to sequence
        Fields with a fixed set of values.
    """
    hints = get_type_hints(settings)
    for field in fields(settings):
        kind, many = _kind(hints[field.name])
        values = field.default if isinstance(field.default, tuple) else (field.default,)
        cli.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            nargs="+" if many else None,
            choices=choices.get(field.name),
            metavar=_METAVAR[kind],
            help=helps[field.name]
            + (f" (default {' '.join(map(str, values))})" if values not in ((None,), ()) else ""),
        )


def _default(values: tuple[Any, ...]) -> str:
    return "" if values in ((None,), ()) else f" (default {' '.join(map(str, values))})"


def _kind(hint: Any) -> tuple[type, bool]:
    """Type of one value of a field, and whether it takes several: ``tuple[float, ...] | None`` to (float, True)."""
    if isinstance(hint, UnionType):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    many = get_origin(hint) is tuple
    kind = get_args(hint)[0] if many else hint
    return (kind, many) if kind in _METAVAR else (str, many)


def given(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Settings that were given on the command line."""
    found = {field.name: getattr(args, field.name) for field in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items() if v is not None}


def read_toml(path: Path) -> dict[str, Any]:
    """Contents of a file of settings, or ValueError naming the file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from None


def require_known(found: Mapping[str, Any], settings: type, where: str) -> None:
    """ValueError, with the nearest names, if there is a key that is no field of the settings."""
    for key in found:
        _check.choice(f"a setting of {where}", key, [field.name for field in fields(settings)])
