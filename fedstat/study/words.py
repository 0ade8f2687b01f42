"""Settings given as text on a command line or in a file, and their values."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def strings(name: str, given: Any) -> tuple[str, ...]:
    """A string or integer, or a list of these, as strings: ``[1, "fc2"]`` to ("1", "fc2")."""
    several = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(one, str | Integral) and not isinstance(one, bool) for one in several):
        raise ValueError(f"{name} must be a string or a list of strings, but got {given!r:.200}")
    return tuple(map(str, several))


def options(name: str, given: tuple[str, ...]) -> dict[str, Any]:
    """``("components=2",)`` to {"components": 2}."""
    found = {}
    for option in given:
        key, equals, text = option.partition("=")
        if not equals or ("," in text and "" in text.split(",")):
            raise ValueError(f"{name} must look like NAME=VALUE, but got {option!r:.200}")
        if key in found:
            raise ValueError(f"{name} must name each setting once, but got {key!r:.200} twice")
        found[key] = value(text)
    return found


def value(text: str) -> Any:
    """``"3"`` to 3, ``"true"`` to True, ``"64,32"`` to (64, 32); other text stays."""
    if "," in text:
        return tuple(map(value, text.split(",")))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def text(name: str, given: Any) -> str:
    """3 to ``"3"``, True to ``"true"``, (64, 32) to ``"64,32"``: what :func:`value` reads."""
    if isinstance(given, bool):
        return str(given).lower()
    if isinstance(given, str | Real):
        return str(given)
    if not isinstance(given, list | tuple) or not all(isinstance(one, str | Real) for one in given):
        raise ValueError(f"{name} must be a string, a number, true, false or a list of these, but got {given!r:.200}")
    if not given:
        raise ValueError(f"{name} must hold at least one value, but got {given!r:.200}")
    return ",".join(text(name, one) for one in given)
