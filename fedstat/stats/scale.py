"""Sizes far from 1: a power of two brings them to where squares neither overflow nor vanish, and no digit changes.

NumPy or torch, the same out; :func:`largest` keeps the dtype, the others are float64.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace
from array_api_compat import device as device_of

Array = Any
_STEP = 500


def exponent(largest: Array) -> Array:
    """Power of two by which numbers up to ``largest`` should be divided: a multiple of 500, and 0 for ordinary sizes.

    Parameters
    ----------
    largest : float64 array (...,)
        Largest absolute values. For 0 the exponent is -1000, the lowest; where it is not finite, 0.

    Returns
    -------
    array (...,)
        Quotients other than 0 lie between 2^-250 and 2^250, so that sums of their squares stay within float64.

    Examples
    --------
    >>> import numpy as np
    >>> exponent(np.array([1.0, 1e70, 1e153, 5e-324, 1e308])).tolist()
    [0.0, 0.0, 500.0, -1000.0, 1000.0]
    """
    xp = array_namespace(largest)
    one = xp.asarray(1.0, dtype=xp.float64, device=device_of(largest))
    usable = xp.isfinite(largest) & (largest > 0)
    e = _STEP * xp.round(xp.log2(xp.where(usable, largest, one)) / _STEP)
    return xp.where(largest == 0, -2 * _STEP * one, e)


def largest(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Largest absolute value along axes."""
    xp = array_namespace(x)
    return xp.maximum(xp.max(x, axis=axis), -xp.min(x, axis=axis))


def power(e: Array) -> Array:
    """2 to the power of ``e``, float64."""
    xp = array_namespace(e)
    return xp.asarray(2.0, dtype=xp.float64, device=device_of(e)) ** e
