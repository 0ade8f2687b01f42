"""Algorithms and networks in users' files, such as "path/to/file.py:ditto", and data, "path/to/own.npz" or ".csv"."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from fedstat._utils import check, guard


class Kind(NamedTuple):
    """Kind of object that functions in users' files make.

    Attributes
    ----------
    setting : str
        Setting that names the function, such as "algorithm".
    noun : str
        Noun for an object of the kind, with its article.
    fits : callable (object) -> bool
        Returns True for an object of the kind.
    constant : bool
        If True, the name may stand for the object itself instead of a function.
    """

    setting: str
    noun: str
    fits: Callable[[object], bool]
    constant: bool = False


def is_in_file(name: object) -> bool:
    """Return True if a name consists of a file and a function in it.

    Examples
    --------
    >>> is_in_file("methods/mine.py:ditto"), is_in_file("fedavg")
    (True, False)
    """
    return isinstance(name, str) and re.fullmatch(r".+\.py:[^:]*", name) is not None


def within(name: str, folder: str | Path) -> str:
    """Return the name with an absolute path, relative paths starting from ``folder``; other names unchanged.

    Examples
    --------
    >>> within("mine.py:ditto", "/home/me"), within("own.npz:test", "/home/me"), within("mnist:test", "/home/me")
    ('/home/me/mine.py:ditto', '/home/me/own.npz:test', 'mnist:test')
    """
    file, rest = _split_name(name)
    return f"{(Path(folder) / Path(file).expanduser()).absolute()}{rest}" if file else name


def short(name: str) -> str:
    """Return the name without folders; names of algorithms, networks and data sets unchanged.

    Examples
    --------
    >>> short("/home/me/mine.py:ditto+"), short("fedavg")
    ('mine.py:ditto+', 'fedavg')
    """
    file, rest = _split_name(name)
    return f"{Path(file).name}{rest}" if file else name


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into its path and the rest; both are "" if it names no file."""
    match = re.fullmatch(r"(.+\.py)(:[^:]*)|(.+\.(?:npz|csv))(:[^:]*)?", name) if isinstance(name, str) else None
    return ("", "") if match is None else (match[1] or match[3], match[2] or match[4] or "")


def noted(setting: str, name: str) -> dict[str, str]:
    """Return what a run stores about the file of a setting: the name, and the digest (SHA-256) of its content."""
    return {"name": short(name), "sha256": hashlib.sha256(_read_file(setting, name)).hexdigest()}


def constructor(name: str, kind: Kind) -> Callable[..., Any]:
    """Return the function that a name stands for, with a check of what it makes.

    If the name stands for such a thing itself, the function takes no settings.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be run, or has no such function (similar names are shown).
    """
    file, _, function = name.rpartition(":")
    module = _load_module(str(Path(file).expanduser().absolute()), _read_file(kind.setting, name))
    makers = {n: v for n, v in vars(module).items() if (kind.constant and kind.fits(v)) or _is_maker(v, module)}
    maker = makers.get(function, getattr(module, function, None) if function.isidentifier() else None)
    if kind.fits(maker):
        if kind.constant:
            return _return_constant(maker)
        raise ValueError(f"{short(name)} must be a function that makes {kind.noun}, but is a {type(maker).__name__}")
    if not callable(maker):
        if not makers:
            raise ValueError(f"{file} defines no function that makes {kind.noun}, such as {function!r:.200}")
        check.choice(f"what follows {Path(file).name}: in {kind.setting}", function, list(makers))
    return _validate(maker, name, kind)


def _is_maker(thing: object, module: ModuleType) -> bool:
    return callable(thing) and not isinstance(thing, type) and getattr(thing, "__module__", "") == module.__name__


@cache
def _validate(make: Callable[..., Any], name: str, kind: Kind) -> Callable[..., Any]:
    """Return the function, with its signature, and with a check of its result."""

    def construct(*arguments: Any, **settings: Any) -> Any:
        try:
            thing = make(*arguments, **settings)
        except (KeyboardInterrupt, ValueError):
            raise
        except BaseException as error:  # sys.exit() too
            raise ValueError(f"{short(name)} failed: {type(error).__name__}: {error}") from error
        if not kind.fits(thing):
            raise ValueError(f"{short(name)} must return {kind.noun}, but got {type(thing).__name__}")
        return thing

    construct.__wrapped__ = make  # type: ignore[attr-defined]
    return construct


def _return_constant(thing: Any) -> Callable[..., Any]:
    return lambda: thing


def _read_file(setting: str, name: str) -> bytes:
    file = Path(name.rpartition(":")[0]).expanduser()
    try:
        return guard.content(file, share=guard.SETTINGS)
    except (OSError, ValueError) as error:
        raise ValueError(f"the file of {setting} {name!r} cannot be read: {error}") from None


@cache
def _load_module(path: str, content: bytes) -> ModuleType:
    """Load the file as a module; run it once for each content."""
    name = f"_own_{Path(path).stem}_{hashlib.sha256(path.encode() + content).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 as the name ends in .py
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need it
    sys.path.insert(0, str(Path(path).parent))  # modules beside the file can be imported, as by python FILE
    try:
        # Not by the loader: its bytecode of a file that was edited within a second may be that of the old content.
        exec(compile(content, path, "exec"), vars(module))  # noqa: S102
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() too
        del sys.modules[name]
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(Path(path).parent))
    return module
