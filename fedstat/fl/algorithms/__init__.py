"""The algorithms, one file each, and the table of them."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from inspect import signature
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
from fedstat.fl.algorithms.finetuned import fedavg_plus, fedprox_plus, finetuned
from fedstat.fl.algorithms.lg_fedavg import lg_fedavg
from fedstat.fl.algorithms.local import local

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {
    "local": local,
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedavg+": fedavg_plus,
    "fedprox+": fedprox_plus,
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


def settings_of(name: str) -> list[str]:
    """Names of the settings that an algorithm of the table takes.

    Examples
    --------
    >>> settings_of("fedprox+")
    ['mu', 'epochs']
    """
    make = ALGORITHMS[_check.choice("algorithm", name, ALGORITHMS)]
    return [setting for setting in signature(make).parameters if setting not in getattr(make, "keywords", {})]


def named(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm of the table.

    Parameters
    ----------
    name : str
        A key of ``ALGORITHMS``.
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
    takes = settings_of(name)
    for setting in settings:
        if setting not in takes:
            near = get_close_matches(setting, takes, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{name} takes {', '.join(takes) or 'no settings'}, but got {setting!r}.{hint}")
    if name == "fedsplit" and "shared" not in settings:
        raise ValueError("fedsplit needs shared, a mapping from layer to bool per unit, but got none")
    return ALGORITHMS[name](**settings)


__all__ = [
    "ALGORITHMS",
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
    "random_split",
    "settings_of",
]
