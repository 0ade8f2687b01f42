"""The aggregators by name, for command lines and grids of settings."""

from __future__ import annotations

from collections.abc import Callable

from fedstat._utils import check
from fedstat.fl.aggregate import Aggregator, median, trimmed_mean, weighted_mean

AGGREGATORS: dict[str, Callable[..., Aggregator]] = {
    "mean": weighted_mean,
    "median": median,
    "trimmed-mean:PROPORTION": trimmed_mean,
}
"""Aggregators of command lines and grids. A function whose name here has a colon takes a number, and names its
aggregator by the text that users write."""


def aggregator_named(given: str | Aggregator) -> Aggregator:
    """Return the aggregator that a name of ``AGGREGATORS`` stands for; return an Aggregator unchanged.

    Raises
    ------
    ValueError
        If there is no such name, or its number is missing, superfluous or out of range.

    Examples
    --------
    >>> aggregator_named("trimmed-mean:0.1").name
    'trimmed-mean:0.1'
    """
    if isinstance(given, Aggregator):
        return given
    name, colon, number = str(given).partition(":")
    makers = {form.partition(":")[:2]: make for form, make in AGGREGATORS.items()}
    try:
        make, numbers = makers[name, colon], [float(number)] if colon else []
    except (KeyError, ValueError):
        raise ValueError(
            f"aggregator must be one of {', '.join(AGGREGATORS)} (for example trimmed-mean:0.1), but got "
            f"{given!r:.200}.{check.did_you_mean(given, AGGREGATORS)}"
        ) from None
    return make(*numbers)
