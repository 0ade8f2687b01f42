"""The algorithms, one file each, and the table of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, NamedTuple, get_args, get_origin

from fedstat._utils import check
from fedstat.fl import custom
from fedstat.fl.algorithm import About, Algorithm
from fedstat.fl.algorithms.clustered_fl import clustered_fl
from fedstat.fl.algorithms.ditto import ditto
from fedstat.fl.algorithms.factorized_fl import factorized_fl
from fedstat.fl.algorithms.fedamp import fedamp
from fedstat.fl.algorithms.fedavg import fedavg, fedavg_plus, local
from fedstat.fl.algorithms.fedbn import fedbn
from fedstat.fl.algorithms.fedcac import fedcac
from fedstat.fl.algorithms.fedcp import fedcp
from fedstat.fl.algorithms.feddecomp import feddecomp
from fedstat.fl.algorithms.fedem import fedem
from fedstat.fl.algorithms.fedfac import fedfac
from fedstat.fl.algorithms.fedfomo import fedfomo
from fedstat.fl.algorithms.fedper import fedper
from fedstat.fl.algorithms.fedphp import fedphp
from fedstat.fl.algorithms.fedprox import fedprox, fedprox_plus
from fedstat.fl.algorithms.fedrep import fedrep
from fedstat.fl.algorithms.fedrod import fedrod
from fedstat.fl.algorithms.fedsplit import fedsplit, random_split
from fedstat.fl.algorithms.lg_fedavg import lg_fedavg
from fedstat.fl.algorithms.per_fedavg import per_fedavg
from fedstat.fl.algorithms.pfedgate import pfedgate
from fedstat.fl.algorithms.pfedme import pfedme
from fedstat.fl.algorithms.pfedpara import pfedpara
from fedstat.fl.algorithms.pfedsd import pfedsd
from fedstat.fl.wrappers.finetuned import finetuned, private_head, shrunken
from fedstat.fl.wrappers.low_rank import low_rank

Constructor = Callable[..., Algorithm]


class Setting(NamedTuple):
    """One setting of a method, from its constructor's signature.

    Attributes
    ----------
    default : object
        ``Parameter.empty`` if it must be given.
    help : str
        A line for command lines, from the parameter's ``Annotated``; empty if it has none.
    of_method : bool
        Whether it belongs to the method itself, not to a wrapper.
    number, several : bool
        Whether it is a float, and whether it may be a sequence.
    """

    default: Any
    help: str
    of_method: bool
    number: bool
    several: bool


def _wrapped(make: Constructor, wrap: Constructor, name: str = "") -> Constructor:
    """A constructor of the wrapped method, which takes the settings of both; ValueError if both have one."""
    custom = _parameters(make)
    more = list(signature(wrap, eval_str=True).parameters.values())[1:]
    if twice := [p.name for p in more if p.name in custom]:
        raise ValueError(f"there is no {name!r}: the method itself has {' and '.join(twice)}. Take it as it is.")

    def made(**settings: Any) -> Algorithm:
        inner = {name: settings.pop(name) for name in custom if name in settings}
        return wrap(make(**inner), **settings)

    both = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in (*custom.values(), *more)]
    made.__signature__ = Signature(both)  # type: ignore[attr-defined]
    made.wraps = make  # type: ignore[attr-defined]
    return made


@cache
def _parameters(make: Constructor) -> dict[str, Parameter]:
    """Parameters of a constructor that are not bound."""
    bound = getattr(make, "keywords", {})
    return {name: p for name, p in signature(make, eval_str=True).parameters.items() if name not in bound}


ALGORITHMS: dict[str, Constructor] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg+": _wrapped(fedavg, finetuned),
    "fedavg-shrunken": _wrapped(fedavg, shrunken),
    "fedprox": fedprox,
    "fedprox+": _wrapped(fedprox, finetuned),
    "per-fedavg": partial(per_fedavg, hessian_free=False, difference=1e-3),
    "per-fedavg-hf": partial(per_fedavg, hessian_free=True),
    "pfedme": pfedme,
    "ditto": ditto,
    "fedper": fedper,
    "lg-fedavg": lg_fedavg,
    "fedbn": fedbn,
    "fedrep": fedrep,
    "fedrod": fedrod,
    "fedphp": fedphp,
    "pfedsd": pfedsd,
    "fedem": fedem,
    "clustered-fl": clustered_fl,
    "fedamp": fedamp,
    "fedfomo": fedfomo,
    "fedcac": fedcac,
    "pfedgate": pfedgate,
    "pfedpara": pfedpara,
    "fedsplit": fedsplit,
    "random": partial(random_split, redrawn=False),
    "random-redrawn": partial(random_split, redrawn=True),
    "fedfac-static": partial(fedfac, dynamic=False, on="weights", warm_start=False),
    "fedfac-dynamic": partial(fedfac, dynamic=True, pretrain_epochs=None),
    "factorized-fl-alpha": partial(factorized_fl, beta=False),
    "factorized-fl-beta": partial(factorized_fl, beta=True),
    "feddecomp": feddecomp,
    "fedcp": fedcp,
}
"""Constructors by the names that runs and grids use, in the order of tables. Bound arguments are no settings."""

WRAPPERS: dict[str, Constructor] = {
    "+": finetuned,
    "-shrunken": shrunken,
    "-private-head": private_head,
    "-low-rank": low_rank,
}
"""Wrappers by the end of a name, for any method: "fedper+", "random-shrunken", "fedavg-private-head".

After "-private-head", one of ``READOUTS`` may follow: "fedavg-private-head+".
"""

READOUTS = ("+", "-shrunken")
"""Wrappers that change only what clients predict with, so that it can be read out of a run without them."""

_PRIVATE = "-private-head"


def constructor(name: str) -> Constructor:
    """Constructor of the algorithm of that name, in the table, in a file ("file.py:name"), or one of these wrapped.

    Raises
    ------
    ValueError
        If there is none.
    """
    known = list(ALGORITHMS)  # name may be a list or a table from a file, which cannot be a key
    for end, wrap in WRAPPERS.items():
        base = str(name).removesuffix(end)
        plain = base.removesuffix(_PRIVATE) if end in READOUTS else base
        there = (plain in ALGORITHMS or custom.is_own(plain)) and not plain.endswith((*WRAPPERS,))
        if name not in known and base != name and there:
            return _wrapped(constructor(base), wrap, name)
    if custom.is_own(name):
        return custom.constructor(name)
    return ALGORITHMS[check.choice("algorithm", name, known)]


def settings_of(name: str) -> dict[str, Setting]:
    """Settings that an algorithm takes, by name.

    Examples
    --------
    >>> list(settings_of("fedprox+")), settings_of("fedprox+")["mu"].default
    (['mu', 'epochs', 'rate', 'by', 'held_out'], 0.01)
    """
    make = constructor(name)
    inner = _parameters(getattr(make, "wraps", make))
    found = {}
    for setting, p in _parameters(make).items():
        noted = get_origin(p.annotation) is Annotated
        kind, said = get_args(p.annotation)[:2] if noted else (p.annotation, "")
        kinds = (kind, *get_args(kind))
        several = any(get_origin(one) is Sequence for one in kinds)
        found[setting] = Setting(p.default, said, setting in inner, float in kinds, several)
    return found


def about(name: str) -> About:
    """Row of an algorithm, whatever its settings; required ones, such as FedSplit's split, are left empty.

    Examples
    --------
    >>> about("fedfac-dynamic").title, about("fedper+").title, about("fedavg").new_clients
    ('FedFac dynamic', 'FedPer+', ('global',))
    """
    made = constructor(name)(**{key: {} for key, one in settings_of(name).items() if one.default is Parameter.empty})
    return made.about._replace(title=made.about.title or name)


def named(name: str, **settings: Any) -> Algorithm:
    """Make an algorithm of the table.

    Parameters
    ----------
    name : str
        A key of ``ALGORITHMS`` or a function of a file, "path/to/file.py:name", optionally followed by a key of
        ``WRAPPERS``.
    **settings
        Arguments of its constructor.

    Raises
    ------
    ValueError
        If there is no such algorithm (the nearest names are given), it does not take a setting (those it takes are
        given), or a required setting is missing.

    Examples
    --------
    >>> named("fedper", personal_layers=2).settings
    {'personal_layers': 2}
    """
    require_settings(name, settings)
    for setting, one in settings_of(name).items():
        if one.default is Parameter.empty and setting not in settings:
            said = f", {one.help}," if one.help else ","
            raise ValueError(f"{name} needs {setting}{said} but got none")
    return constructor(name)(**settings)


def require_settings(name: str, settings: Iterable[str]) -> None:
    """ValueError unless the algorithm of that name takes settings of these names."""
    takes = settings_of(name)
    for setting in settings:
        if setting not in takes:
            hint = check.did_you_mean(setting, takes)
            raise ValueError(f"{name} takes {', '.join(takes) or 'no settings'}, but got {setting!r:.200}.{hint}")


__all__ = [
    "ALGORITHMS",
    "READOUTS",
    "WRAPPERS",
    "Setting",
    "about",
    "clustered_fl",
    "constructor",
    "ditto",
    "factorized_fl",
    "fedamp",
    "fedavg",
    "fedavg_plus",
    "fedbn",
    "fedcac",
    "fedcp",
    "feddecomp",
    "fedem",
    "fedfac",
    "fedfomo",
    "fedper",
    "fedphp",
    "fedprox",
    "fedprox_plus",
    "fedrep",
    "fedrod",
    "fedsplit",
    "finetuned",
    "lg_fedavg",
    "local",
    "low_rank",
    "named",
    "per_fedavg",
    "pfedgate",
    "pfedme",
    "pfedpara",
    "pfedsd",
    "private_head",
    "random_split",
    "require_settings",
    "settings_of",
    "shrunken",
]
