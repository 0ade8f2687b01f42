"""How numbers are printed: the one place for a number, with its error, with its interval, and for a p-value."""

from __future__ import annotations

import math
from collections.abc import Iterable

NONE = "–"
"""Printed where there is no number."""


def number(x: float | None, digits: int = 4, *, none: str = NONE) -> str:
    """Print a number, or a dash where there is none.

    Examples
    --------
    >>> number(0.5), number(None), number(math.nan, none="-"), number(-math.inf, 2)
    ('0.5000', '–', '-', '-inf')
    """
    return none if x is None or math.isnan(x) else f"{x:.{digits}f}"


def coefficient(x: float, digits: int = 2, *, none: str = "-") -> str:
    """Print a number as :func:`number` does, and what rounds to 0 without a sign.

    Examples
    --------
    >>> coefficient(-0.001), number(-0.001, 2)
    ('0.00', '-0.00')
    """
    return number(round(x, digits) + 0.0, digits, none=none)


def plus_minus(mean: float, error: float, digits: int = 4) -> str:
    """Mean ± standard error; the mean alone where there is no error.

    Examples
    --------
    >>> plus_minus(0.5, 0.0123, 3), plus_minus(0.5, math.nan), plus_minus(math.nan, math.nan)
    ('0.500 ± 0.012', '0.5000', '–')
    """
    text = number(mean, digits)
    return f"{text} ± {error:.{digits}f}" if math.isfinite(error) and math.isfinite(mean) else text


def interval(middle: float, low: float, high: float, digits: int = 4, *, sign: bool = True, equal: str = "") -> str:
    """Estimate with its interval, signed unless told otherwise; without one, the estimate alone or why there is none.

    Parameters
    ----------
    middle, low, high : float
    digits : int
    sign : bool
    equal : str
        Where all values behind the estimate are equal, what they are of: "replicates", "clients".

    Examples
    --------
    >>> interval(0.01, -0.02, 0.04), interval(0.01, math.nan, math.nan), interval(0.5, 0.4, 0.6, 2, sign=False)
    ('+0.0100 [-0.0200, +0.0400]', '+0.0100', '0.50 [0.40, 0.60]')
    >>> interval(0.0, math.nan, math.nan, equal="replicates")
    '+0.0000, equal in all replicates'
    """
    if not math.isfinite(middle):
        return NONE
    form = f"{'+' if sign else ''}.{digits}f"
    around = f" [{low:{form}}, {high:{form}}]" if math.isfinite(low) else f", equal in all {equal}" if equal else ""
    return f"{middle:{form}}{around}"


def p_value(p: float) -> str:
    """Print a p-value to four places.

    Examples
    --------
    >>> p_value(0.01234), p_value(1e-6), p_value(math.nan)
    ('0.0123', '<0.0001', '–')
    """
    return NONE if not math.isfinite(p) else "<0.0001" if p < 1e-4 else f"{p:.4f}"


def p_equals(p: float) -> str:
    """Print a p-value as text has it: three decimals below 0.1, two above.

    Examples
    --------
    >>> p_equals(0.00004), p_equals(0.0061), p_equals(0.01), p_equals(0.2), p_equals(math.nan)
    ('p < 0.001', 'p = 0.006', 'p = 0.01', 'p = 0.20', 'p –')
    """
    if not math.isfinite(p):
        return f"p {NONE}"
    return "p < 0.001" if p < 1e-3 else f"p = {p:.2f}" if p >= 0.1 else f"p = {f'{p:.3f}'.rstrip('0')}"


def decimals(errors: Iterable[float]) -> int:
    """Decimal places that show two digits of the smallest standard error: 3, or more.

    Examples
    --------
    >>> decimals([0.011, math.nan]), decimals([2e-6, 3e-5]), decimals([])
    (3, 7, 3)
    """
    known = [x for x in errors if math.isfinite(x) and x > 0]
    return max(3, 1 - math.floor(math.log10(min(known)))) if known else 3


def count(n: int, noun: str) -> str:
    """Print a count with its noun.

    Examples
    --------
    >>> count(1, "unit"), count(2, "unit")
    ('1 unit', '2 units')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def megabytes(n: float) -> str:
    """Bytes in MB; in kB if they are fewer than a tenth of one.

    Examples
    --------
    >>> megabytes(1_794_000), megabytes(7_848), megabytes(0)
    ('1.8 MB', '7.8 kB', '0.0 MB')
    """
    return f"{n / 1e3:.1f} kB" if 0 < n < 1e5 else f"{n / 1e6:.1f} MB"
