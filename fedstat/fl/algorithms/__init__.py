"""The algorithms, one file each, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any

from fedstat import _check
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.algorithms.fedavg import fedavg
from fedstat.fl.algorithms.fedem import fedem
from fedstat.fl.algorithms.fedfac import fedfac
from fedstat.fl.algorithms.fedper import fedper
from fedstat.fl.algorithms.fedprox import fedprox
from fedstat.fl.algorithms.fedrep import fedrep
from fedstat.fl.algorithms.fedsplit import fedsplit, random_split
from fedstat.fl.algorithms.lg_fedavg import lg_fedavg
from fedstat.fl.algorithms.local import local
from fedstat.fl.wrappers.finetuned import fedavg_plus, fedprox_plus, finetuned
from fedstat.fl.wrappers.private_head import private_head
from fedstat.fl.wrappers.shrunken import shrunken

Constructor = Callable[..., Algorithm]


def _wrapped(make: Constructor, wrap: Constructor) -> Constructor:
    """A constructor that takes the settings of both."""
    own = signature(make).parameters
    more = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in list(signature(wrap).parameters.values())[1:]]

    def made(**settings: Any) -> Algorithm:
        inner = {name: settings.pop(name) for name in own if name in settings}
        return wrap(make(**inner), **settings)

    mine = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own.values() if p.name not in getattr(make, "keywords", {})]
    made.__signature__ = Signature(mine + more)  # type: ignore[attr-defined]
    return made


ALGORITHMS: dict[str, Constructor] = {
    "local": local,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavg+": _wrapped(fedavg, finetuned),
    "fedprox+": _wrapped(fedprox, finetuned),
    "fedavg-shrunken": _wrapped(fedavg, shrunken),
    "fedper": fedper,
    "lg-fedavg": lg_fedavg,
    "fedrep": fedrep,
    "fedem": fedem,
    "fedsplit": fedsplit,
    "fedfac-static": partial(fedfac, dynamic=False, on="weights", warm_start=False),
    "fedfac-dynamic": partial(fedfac, dynamic=True, pretrain_epochs=None),
    "random": partial(random_split, redrawn=False),
    "random-redrawn": partial(random_split, redrawn=True),
}
"""Constructors by the names that runs, grids and tables use; what a partial binds is no setting of its method."""

WRAPPERS: dict[str, Constructor] = {"+": finetuned, "-shrunken": shrunken, "-private-head": private_head}
"""What the end of a name makes of any other method: "fedper+", "random-shrunken"."""


def constructor(name: str) -> Constructor:
    """What makes the algorithm of that name, which stands in the table or is wrapped; ValueError if there is none."""
    known = list(ALGORITHMS)  # a file may name a list or a table, which no key can be
    for end, wrap in WRAPPERS.items():
        base = str(name).removesuffix(end)
        if name not in known and base != name and base in ALGORITHMS and not base.endswith((*WRAPPERS,)):
            return _wrapped(ALGORITHMS[base], wrap)
    return ALGORITHMS[_check.choice("algorithm", name, known)]


def settings_of(name: str) -> list[str]:
    """Names of the settings that an algorithm of the table takes.

    Examples
    --------
    >>> settings_of("fedprox+")
    ['mu', 'epochs', 'rate', 'by', 'held_out']
    """
    make = constructor(name)
    return [setting for setting in signature(make).parameters if setting not in getattr(make, "keywords", {})]


def named(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm of the table.

    Parameters
    ----------
    name : str
        A key of ``ALGORITHMS``, also with an end of ``WRAPPERS``.
    **settings
        Arguments of its constructor.

    Raises
    ------
    ValueError
        If there is no such algorithm, with the nearest names, or it does not take a setting, with those it takes.

    Examples
    --------
    >>> named("fedper", personal_layers=2).settings
    {'personal_layers': 2}
    """
    require_settings(name, settings)
    if name.startswith("fedsplit") and "shared" not in settings:
        raise ValueError("fedsplit needs shared, a mapping from layer to bool per unit, but got none")
    return constructor(name)(**settings)


def require_settings(name: str, settings: Iterable[str]) -> None:
    """ValueError unless the algorithm of that name takes settings of these names."""
    takes = settings_of(name)
    for setting in settings:
        if setting not in takes:
            near = get_close_matches(setting, takes, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} takes {', '.join(takes) or 'no settings'}, but got {setting!r}.{hint}")


__all__ = [
    "ALGORITHMS",
    "WRAPPERS",
    "constructor",
    "fedavg",
    "fedavg_plus",
    "fedem",
    "fedfac",
    "fedper",
    "fedprox",
    "fedprox_plus",
    "fedrep",
    "fedsplit",
    "finetuned",
    "lg_fedavg",
    "local",
    "named",
    "private_head",
    "random_split",
    "settings_of",
    "shrunken",
]
