"""Federated learning algorithms, one file each, and the table of their names."""

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
from fedstat.fl.wrappers.composed import low_rank
from fedstat.fl.wrappers.finetuned import finetuned, personal_head, shrunken

Constructor = Callable[..., Algorithm]


class Setting(NamedTuple):
    """One setting of an algorithm, from its constructor's signature.

    Attributes
    ----------
    default : object
        ``Parameter.empty`` if the setting is required.
    help : str
        Help text of the command line, from the parameter's ``Annotated``; empty without one.
    of_method : bool
        True if the setting belongs to the algorithm itself, False if to a wrapper.
    number, several : bool
        True if the value may be a float; True if it may be a sequence.
    effect : EffectIf, optional
        Condition without which the setting has no effect.
    """

    default: Any
    help: str
    of_method: bool
    number: bool
    several: bool
    effect: check.EffectIf | None


def _wrap(make: Constructor, wrap: Constructor, name: str = "") -> Constructor:
    """Return a constructor that wraps the algorithm and takes the settings of both.

    Raises
    ------
    ValueError
        If the algorithm and the wrapper have a setting of one name.
    """
    inner = _parameters(make)
    outer = list(signature(wrap, eval_str=True).parameters.values())[1:]
    if duplicates := [p.name for p in outer if p.name in inner]:
        raise ValueError(
            f"{name!r} does not exist: the algorithm itself has {' and '.join(duplicates)}. Use it without the suffix."
        )

    def construct(**settings: Any) -> Algorithm:
        inner_settings = {name: settings.pop(name) for name in inner if name in settings}
        return wrap(make(**inner_settings), **settings)

    parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (*inner.values(), *outer)]
    construct.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    construct.wraps = make  # type: ignore[attr-defined]
    return construct


def _parameters(make: Constructor) -> dict[str, Parameter]:
    """Return the parameters of a constructor that are not bound."""
    bound = getattr(make, "keywords", {})
    return {name: p for name, p in signature(make, eval_str=True).parameters.items() if name not in bound}


ALGORITHMS: dict[str, Constructor] = {
    "local": local,
    "fedavg": fedavg,
    "fedavg+": _wrap(fedavg, finetuned),
    "fedavg-shrunken": _wrap(fedavg, shrunken),
    "fedprox": fedprox,
    "fedprox+": _wrap(fedprox, finetuned),
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
    "fedfac-static": partial(fedfac, dynamic=False, on="weights", warm_start=True),
    "fedfac-dynamic": partial(fedfac, dynamic=True, pretrain_epochs=None),
    "factorized-fl-alpha": partial(factorized_fl, beta=False),
    "factorized-fl-beta": partial(factorized_fl, beta=True),
    "feddecomp": feddecomp,
    "fedcp": fedcp,
}
"""Constructors by the names that runs and grids use, in the order of tables. Bound arguments are not settings."""

WRAPPERS: dict[str, Constructor] = {
    "+": finetuned,
    "-shrunken": shrunken,
    "-personal-head": personal_head,
    "-low-rank": low_rank,
}
"""Wrappers by the suffix of a name, for any algorithm: "fedper+", "random-shrunken", "fedavg-personal-head".

After "-personal-head", one of ``PREDICTION_RULES`` may follow: "fedavg-personal-head+".
"""

PREDICTION_RULES = ("+", "-shrunken")
"""Wrappers that change the prediction rule alone, so that a run without them also yields their predictions."""

_PERSONAL_HEAD = "-personal-head"


def _is_algorithm(thing: object) -> bool:
    return isinstance(thing, Algorithm)


_IN_FILE = custom.Kind("algorithm", "a fedstat.fl.algorithm.Algorithm", _is_algorithm, constant=True)


def constructor(name: str) -> Constructor:
    """Return the constructor of an algorithm: of the table or of a file ("file.py:name"), wrapped or not.

    Raises
    ------
    ValueError
        If no algorithm has this name.
    """
    names = list(ALGORITHMS)  # a file may hold a list or a table as the name, which cannot be a key
    for suffix, wrap in WRAPPERS.items():
        base = str(name).removesuffix(suffix)
        plain = base.removesuffix(_PERSONAL_HEAD) if suffix in PREDICTION_RULES else base
        exists = (plain in ALGORITHMS or custom.is_in_file(plain)) and not plain.endswith((*WRAPPERS,))
        if name not in names and base != name and exists:
            return _wrap(constructor(base), wrap, name)
    if custom.is_in_file(name):
        return custom.constructor(name, _IN_FILE)
    if name not in names:
        suffixes = (*WRAPPERS, *(_PERSONAL_HEAD + rule for rule in PREDICTION_RULES))
        wrapped = [base + suffix for base in names if not base.endswith((*WRAPPERS,)) for suffix in suffixes]
        near = check.did_you_mean(name, dict.fromkeys([*names, *wrapped]))
        raise ValueError(
            f"algorithm must be one of {check.few(map(repr, names), 200)}, or one of these followed by "
            f"{', '.join(WRAPPERS)}, but got {name!r:.200}.{near}"
        )
    return ALGORITHMS[name]


def settings_of(name: str) -> dict[str, Setting]:
    """Return the settings that an algorithm takes, by name.

    Examples
    --------
    >>> list(settings_of("fedprox+")), settings_of("fedprox+")["mu"].default
    (['mu', 'epochs', 'rate', 'by', 'held_out'], 0.01)
    """
    return dict(_settings(constructor(name)))


@cache
def _settings(make: Constructor) -> dict[str, Setting]:
    inner = _parameters(getattr(make, "wraps", make))
    settings = {}
    for setting, p in _parameters(make).items():
        is_annotated = get_origin(p.annotation) is Annotated
        kind, text = get_args(p.annotation)[:2] if is_annotated else (p.annotation, "")
        kinds = (kind, *get_args(kind))
        several = any(get_origin(kind) is Sequence for kind in kinds)
        settings[setting] = Setting(
            p.default, text, setting in inner, float in kinds, several, check.effect_of(p.annotation)
        )
    return settings


def about(name: str) -> About:
    """Return an algorithm's row of tables, which does not depend on its settings.

    Required settings, such as FedSplit's split, get an empty mapping.

    Examples
    --------
    >>> about("fedfac-dynamic").title, about("fedper+").title, about("fedavg").unseen_clients
    ('FedFac dynamic', 'FedPer+', ('global',))
    """
    required = [key for key, setting in settings_of(name).items() if setting.default is Parameter.empty]
    row = constructor(name)(**{key: {} for key in required}).about
    return row._replace(title=row.title or name)


def named(name: str, /, **settings: Any) -> Algorithm:
    """Construct an algorithm by its name.

    Parameters
    ----------
    name : str
        A key of ``ALGORITHMS`` or a function of a file, "path/to/file.py:name", optionally followed by a key of
        ``WRAPPERS``.
    **settings
        Arguments of the constructor.

    Raises
    ------
    ValueError
        If the algorithm does not exist (the message gives the nearest names), if it does not take a setting (the
        message lists its settings), or if a required setting is missing.

    Examples
    --------
    >>> named("fedper", personal_layers=2).settings
    {'personal_layers': 2}
    """
    require_settings(name, settings)
    for key, setting in settings_of(name).items():
        if setting.default is Parameter.empty and key not in settings:
            description = f", {setting.help}," if setting.help else ","
            raise ValueError(f"{name} needs {key}{description} but got none")
    return constructor(name)(**settings)


def require_settings(name: str, settings: Iterable[str]) -> None:
    """Raise ValueError unless the algorithm takes all of these settings."""
    takes = settings_of(name)
    for setting in settings:
        if setting not in takes:
            hint = check.did_you_mean(setting, takes)
            raise ValueError(f"{name} takes {', '.join(takes) or 'no settings'}, but got {setting!r:.200}.{hint}")


__all__ = [
    "ALGORITHMS",
    "PREDICTION_RULES",
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
    "personal_head",
    "pfedgate",
    "pfedme",
    "pfedpara",
    "pfedsd",
    "random_split",
    "require_settings",
    "settings_of",
    "shrunken",
]


def __dir__() -> list[str]:
    return __all__
