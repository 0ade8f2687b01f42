"""Algorithms in users' own files, by names such as "path/to/file.py:ditto"; data are files by "path/to/own.npz"."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fedstat._utils import check, guard
from fedstat.fl.algorithm import Algorithm


def is_own(name: object) -> bool:
    """Whether a name is that of a file and of a function in it.

    Examples
    --------
    >>> is_own("methods/mine.py:ditto"), is_own("fedavg")
    (True, False)
    """
    return isinstance(name, str) and re.fullmatch(r".+\.py:[^:]*", name) is not None


def within(name: str, folder: str | Path) -> str:
    """The name with its path made absolute, relative ones from ``folder``; other names as they are.

    Examples
    --------
    >>> within("mine.py:ditto", "/home/me"), within("own.npz:test", "/home/me"), within("mnist:test", "/home/me")
    ('/home/me/mine.py:ditto', '/home/me/own.npz:test', 'mnist:test')
    """
    file, rest = _parts(name)
    return f"{(Path(folder) / Path(file).expanduser()).absolute()}{rest}" if file else name


def short(name: str) -> str:
    """The name without folders; that of an algorithm or a data set as it is.

    Examples
    --------
    >>> short("/home/me/mine.py:ditto+"), short("fedavg")
    ('mine.py:ditto+', 'fedavg')
    """
    file, rest = _parts(name)
    return f"{Path(file).name}{rest}" if file else name


def _parts(name: str) -> tuple[str, str]:
    """The path, and what follows it; "" where the name is of no file."""
    found = re.fullmatch(r"(.+\.py)(:[^:]*)|(.+\.npz)(:[^:]*)?", name) if isinstance(name, str) else None
    return ("", "") if found is None else (found[1] or found[3], found[2] or found[4] or "")


def noted(name: str) -> dict[str, str]:
    """What a run notes of its algorithm's file: its name, and the digest (SHA-256) of its content."""
    return {"name": short(name), "sha256": hashlib.sha256(_content(name)).hexdigest()}


def constructor(name: str) -> Callable[..., Algorithm]:
    """The function of that name, which makes an algorithm; one that stands there ready-made takes no settings.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be run, or has no such function (the nearest are given).
    """
    file, _, function = name.rpartition(":")
    module = _loaded(str(Path(file).expanduser().absolute()), _content(name))
    there = {n: v for n, v in vars(module).items() if isinstance(v, Algorithm) or _makes(v, module)}
    found = there.get(function, getattr(module, function, None) if function.isidentifier() else None)
    if not callable(found) and not isinstance(found, Algorithm):
        if not there:
            raise ValueError(f"{file} defines no function that makes an Algorithm, such as {function!r:.200}")
        check.choice(f"what follows {Path(file).name}: in algorithm", function, list(there))
    return _ready(found) if isinstance(found, Algorithm) else _checked(found, name)


def _makes(thing: object, module: ModuleType) -> bool:
    return callable(thing) and not isinstance(thing, type) and getattr(thing, "__module__", "") == module.__name__


@cache
def _checked(make: Callable[..., Any], name: str) -> Callable[..., Algorithm]:
    """The function itself, for all that its signature says, with a check of what it returns."""

    def made(**settings: Any) -> Algorithm:
        try:
            found = make(**settings)
        except (KeyboardInterrupt, ValueError):
            raise
        except BaseException as error:  # sys.exit() too
            raise ValueError(f"{short(name)} failed: {type(error).__name__}: {error}") from error
        if not isinstance(found, Algorithm):
            raise ValueError(
                f"{short(name)} must return a fedstat.fl.algorithm.Algorithm, but got {type(found).__name__}"
            )
        return found

    made.__wrapped__ = make  # type: ignore[attr-defined]
    return made


def _ready(algorithm: Algorithm) -> Callable[..., Algorithm]:
    return lambda: algorithm


def _content(name: str) -> bytes:
    file = Path(name.rpartition(":")[0]).expanduser()
    try:
        return guard.content(file, share=guard.SETTINGS)
    except (OSError, ValueError) as error:
        raise ValueError(f"the file of algorithm {name!r} cannot be read: {error}") from None


@cache
def _loaded(path: str, content: bytes) -> ModuleType:
    """The file as a module, run once for each content."""
    name = f"_own_{Path(path).stem}_{hashlib.sha256(path.encode() + content).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 as the name ends in .py
    assert spec.loader is not None  # noqa: S101
    module = module_from_spec(spec)
    sys.modules[name] = module  # as dataclasses need it
    sys.path.insert(0, str(Path(path).parent))  # files beside it can be imported, as by python FILE
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() too
        del sys.modules[name]
        raise ValueError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(Path(path).parent))
    return module
