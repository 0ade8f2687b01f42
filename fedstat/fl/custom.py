"""Algorithms in users' files, by names such as "path/to/file.py:ditto", and data by "path/to/own.npz" or ".csv"."""

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
    """Return the name without folders; names of algorithms and data sets unchanged.

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


def noted(name: str) -> dict[str, str]:
    """Return what a run stores about its algorithm's file: the name, and the digest (SHA-256) of its content."""
    return {"name": short(name), "sha256": hashlib.sha256(_read_file(name)).hexdigest()}


def constructor(name: str) -> Callable[..., Algorithm]:
    """Return the function that a name stands for, which makes an algorithm.

    If the name stands for an Algorithm itself, the function takes no settings.

    Raises
    ------
    ValueError
        If there is no such file, it cannot be run, or has no such function (similar names are shown).
    """
    file, _, function = name.rpartition(":")
    module = _load_module(str(Path(file).expanduser().absolute()), _read_file(name))
    makers = {n: v for n, v in vars(module).items() if isinstance(v, Algorithm) or _is_maker(v, module)}
    maker = makers.get(function, getattr(module, function, None) if function.isidentifier() else None)
    if not callable(maker) and not isinstance(maker, Algorithm):
        if not makers:
            raise ValueError(f"{file} defines no function that makes an Algorithm, such as {function!r:.200}")
        check.choice(f"what follows {Path(file).name}: in algorithm", function, list(makers))
    return _return_constant(maker) if isinstance(maker, Algorithm) else _validate(maker, name)


def _is_maker(thing: object, module: ModuleType) -> bool:
    return callable(thing) and not isinstance(thing, type) and getattr(thing, "__module__", "") == module.__name__


@cache
def _validate(make: Callable[..., Any], name: str) -> Callable[..., Algorithm]:
    """Return the function, with its signature, and with a check of its result."""

    def make_algorithm(**settings: Any) -> Algorithm:
        try:
            algorithm = make(**settings)
        except (KeyboardInterrupt, ValueError):
            raise
        except BaseException as error:  # sys.exit() too
            raise ValueError(f"{short(name)} failed: {type(error).__name__}: {error}") from error
        if not isinstance(algorithm, Algorithm):
            raise ValueError(
                f"{short(name)} must return a fedstat.fl.algorithm.Algorithm, but got {type(algorithm).__name__}"
            )
        return algorithm

    make_algorithm.__wrapped__ = make  # type: ignore[attr-defined]
    return make_algorithm


def _return_constant(algorithm: Algorithm) -> Callable[..., Algorithm]:
    return lambda: algorithm


def _read_file(name: str) -> bytes:
    file = Path(name.rpartition(":")[0]).expanduser()
    try:
        return guard.content(file, share=guard.SETTINGS)
    except (OSError, ValueError) as error:
        raise ValueError(f"the file of algorithm {name!r} cannot be read: {error}") from None


@cache
def _load_module(path: str, content: bytes) -> ModuleType:
    """Load the file as a module; run it once for each content."""
    name = f"_own_{Path(path).stem}_{hashlib.sha256(path.encode() + content).hexdigest()[:8]}"
    spec = spec_from_file_location(name, path)
    assert spec is not None  # noqa: S101 as the name ends in .py
    assert spec.loader is not None  # noqa: S101
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses need it
    sys.path.insert(0, str(Path(path).parent))  # modules beside the file can be imported, as by python FILE
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
