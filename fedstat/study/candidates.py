"""Numeric candidates of tuning: the edge at which a value lies, and the next value beyond the edge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal, TypeAlias

from fedstat.fl.algorithms import settings_of
from fedstat.study import federation
from fedstat.study.collect import OF_METHOD
from fedstat.study.run_settings import Settings

Edge: TypeAlias = Literal["smallest", "largest"]
Number: TypeAlias = "int | float"

DIGITS = 3
"""Significant digits of values that tuning adds or draws, so that names of runs stay short."""
_HALVINGS = 5  # of the step, where the next value is invalid
_LARGEST = 1e300


def takes_of(algorithm: str) -> tuple[str, ...]:
    """Return the settings that can be tuned: the algorithm's settings and learning rates."""
    return (*settings_of(algorithm), *OF_METHOD)


def value_of(name: str, settings: Settings) -> Any:
    """Return the value of a setting that can be tuned; None for the method's default."""
    return getattr(settings, name) if name in OF_METHOD else settings.given.get(name)


def shown(name: str, settings: Settings) -> str:
    """Return the value of a setting that can be tuned, as text.

    Examples
    --------
    >>> shown("lr", Settings(lr=0.5)), shown("kappa", Settings())
    ('0.5', 'default (0.85)')
    """
    value = value_of(name, settings)
    if value is not None:
        return federation.text(name, value)
    default = None if name in OF_METHOD else settings_of(settings.algorithm)[name].default
    return "None" if default is None else f"default ({default})"


def is_real(name: str, algorithm: str) -> bool:
    """Return True if a setting takes real numbers, not only integers."""
    return name in OF_METHOD or settings_of(algorithm)[name].number


def number(name: str, settings: Settings) -> Number | None:
    """Return the value of a setting as a number: the method's default for None; None for names, layers, infinity.

    Examples
    --------
    >>> number("mu", Settings(algorithm="fedprox")), number("tau", Settings(options=("tau=mean",)))
    (0.01, None)
    """
    value = value_of(name, settings)
    if name not in OF_METHOD:
        declared = settings_of(settings.algorithm)[name]
        value = declared.default if value is None else value
        if declared.several:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value) if is_real(name, settings.algorithm) else value


def edge_of(value: Number | None, numbers: Iterable[Number]) -> Edge | None:
    """Return the edge of several numbers at which a value lies.

    Examples
    --------
    >>> edge_of(3, [1, 3]), edge_of(1, [1, 3]), edge_of(2, [1, 2, 3]), edge_of(1, [1])
    ('largest', 'smallest', None, None)
    """
    numbers = set(numbers)
    if value is None or len(numbers) < 2:
        return None
    return "largest" if value == max(numbers) else "smallest" if value == min(numbers) else None


def is_geometric(numbers: Iterable[Number]) -> bool:
    """Return True if numbers lie on a log scale.

    They are positive, and cover more than a factor of 10 or have more equal ratios than differences.

    Examples
    --------
    >>> is_geometric([0.01, 0.03, 0.1]), is_geometric([0.25, 0.5, 0.75]), is_geometric([0, 1])
    (True, False, False)
    """
    ordered = sorted(set(numbers))
    if ordered[0] <= 0:
        return False
    ratios = [math.log(b) - math.log(a) for a, b in pairwise(ordered)]
    differences = [b - a for a, b in pairwise(ordered)]
    return ordered[-1] > 10 * ordered[0] or max(ratios) / min(ratios) <= max(differences) / min(differences)


def beyond(numbers: Iterable[Number], edge: Edge, *, geometric: bool) -> Iterator[Number]:
    """Yield values beyond an edge of at least two numbers, from far to near.

    The first value continues the two outermost numbers by their ratio, or by their difference. The step is then halved
    several times. Integers stay integers; other values have three significant digits.

    Examples
    --------
    >>> next(beyond([0.01, 0.1], "largest", geometric=True)), next(beyond([3, 1], "smallest", geometric=False))
    (1.0, -1)
    """
    side = 1 if edge == "largest" else -1
    before, last = sorted(set(numbers), key=lambda x: side * x)[-2:]
    is_integer = isinstance(last, int) and isinstance(before, int)
    for halvings in range(_HALVINGS + 1):
        part = 0.5**halvings
        value = last * (last / before) ** part if geometric else last + part * (last - before)
        if not abs(value) < _LARGEST:
            continue
        value = side * max(side * round(value), side * last + 1) if is_integer else float(f"{value:.{DIGITS}g}")
        if side * value > side * last:
            yield value


def further(
    begun: Sequence[Settings], name: str, numbers: Iterable[Number], edge: Edge, *, geometric: bool
) -> tuple[Settings, ...] | None:
    """Return settings with the next value beyond an edge; None if the edge is the bound of what the setting takes.

    Examples
    --------
    >>> start = [Settings.of(kappa=0.5)]
    >>> [settings.given for settings in further(start, "kappa", [0.5, 0.75], "largest", geometric=True)]
    [{'kappa': 0.919}]
    >>> further(start, "kappa", [0.5, 1.0], "largest", geometric=True)
    """
    for value in beyond(numbers, edge, geometric=geometric):
        with suppress(ValueError):
            return tuple(base.but(**{name: value}) for base in begun)
    return None
