"""Sums over clients of weights and their products, which determine correlations; scales; very wide layers.

Variables are the hidden units of a layer; observations are the pairs (client, incoming weight). Arguments and results
are NumPy arrays or torch tensors with any leading batch dims. Results are float64, except for :func:`largest`, which
retains the dtype.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of
from threadpoolctl import threadpool_limits

from fedstat._utils import memory
from fedstat.stats import eigenvalues

Array = Any
_STEP = 500


def exponent(largest: Array) -> Array:
    """Return the power of two by which to divide numbers up to ``largest``: a multiple of 500, 0 for ordinary sizes.

    Parameters
    ----------
    largest : float64 array (...,)
        Largest absolute values. For 0 the exponent is -1000, the lowest; for values that are not finite, 0.

    Returns
    -------
    array (...,)
        Quotients other than 0 lie between 2^-250 and 2^250, so that sums of their squares do not overflow or vanish.

    Examples
    --------
    >>> import numpy as np
    >>> exponent(np.array([1.0, 1e70, 1e153, 5e-324, 1e308])).tolist()
    [0.0, 0.0, 500.0, -1000.0, 1000.0]
    """
    xp = array_namespace(largest)
    unity = xp.asarray(1.0, dtype=xp.float64, device=device_of(largest))
    usable = xp.isfinite(largest) & (largest > 0)
    e = _STEP * xp.round(xp.log2(xp.where(usable, largest, unity)) / _STEP)
    return xp.where(largest == 0, -2 * _STEP * unity, e)


def largest(x: Array, axis: int | tuple[int, ...]) -> Array:
    """Return the largest absolute value along axes."""
    xp = array_namespace(x)
    return xp.maximum(xp.max(x, axis=axis), -xp.min(x, axis=axis))


def power(e: Array) -> Array:
    """Return 2 to the power of ``e``, float64."""
    xp = array_namespace(e)
    return xp.asarray(2.0, dtype=xp.float64, device=device_of(e)) ** e


# On several threads OpenBLAS 0.3.31 crashes in symmetric products and Cholesky factors of 15,500 units, not of 14,000.
_WIDE = 8192
# Matrices (unit, unit) in memory at the peak of a fit, measured as 4.3 and 7.2: with leading eigenpairs, or all.
_LEADING, _ALL = 5, 8
_SMALL = 2**30


def safe_blas(units: int) -> AbstractContextManager[object]:
    """Return a context for BLAS on symmetric matrices (unit, unit): one thread if they are large, else no limit."""
    return threadpool_limits(1, user_api="blas") if units > _WIDE else nullcontext()


def require_memory(units: int, *, all_pairs: bool, clients: int = 0) -> None:
    """Raise ValueError if the matrices of a fit exceed the available memory.

    Parameters
    ----------
    units : int
    all_pairs : bool
        True if the fit computes all eigenpairs, False for leading eigenpairs.
    clients : int
        Number of clients whose matrices are in memory, too.
    """
    need = 8 * units**2 * ((_ALL if all_pairs else _LEADING) + clients)
    if need > _SMALL and need > (free := memory.available()):
        description = f"{units} units of {clients} clients" if clients else f"{units} units"
        hint = "fewer clients or units" if clients else "fewer units"
        if all_pairs:
            hint += ", n_factors of at most a fifth of the units with method='pa' or 'pc'"
        raise ValueError(
            f"matrices (unit, unit) for {description} need about {need / 2**30:.1f} GiB of memory, but "
            f"{free / 2**30:.1f} GiB are available. Use {hint}, or a machine with more memory."
        )


# A unit whose variance is below this proportion of its mean square is constant up to rounding of float64 means.
_CONSTANT = 1e-26
# Below this sum of squares, some squares may have vanished.
_LEAST = 1e-200
_MOST = 1e250  # largest sum of squares; sums over clients stay finite


class Moments(NamedTuple):
    """Sums that determine the correlation matrix; ``+`` joins clients, chunks and hosts without loss of digits.

    Sums are centered and joined pairwise (Chan, Golub and LeVeque 1983, The American Statistician 37, 242-247).

    Attributes
    ----------
    n : array (...,)
        Number of rows.
    mean : array (..., unit)
        Means over rows; 0 for a unit whose sum is not finite.
    cross : array (..., unit, unit)
        Cross products about the means, (Z − Z̄)ᵀ(Z − Z̄).
    """

    n: Array
    mean: Array
    cross: Array

    def __add__(self, other: Moments) -> Moments:  # type: ignore[override]
        n, a, b = self.n + other.n, self.n[..., None], other.n[..., None]
        mean = (a * self.mean + b * other.mean) / (a + b)
        gap = other.mean - self.mean
        return Moments(n, mean, self.cross + other.cross + (a * b / (a + b) * gap)[..., :, None] * gap[..., None, :])


def moments(z: Array) -> Moments:
    """Compute the mean and the cross products of a block of rows.

    Parameters
    ----------
    z : array (..., row, unit)
        Rows are (client, weight) pairs, in any order and any partition. Their squares must be within float64; see
        :func:`scaled_moments` for other rows.

    Examples
    --------
    >>> import numpy as np
    >>> z = np.random.default_rng(0).normal(size=(40, 3))
    >>> joined, total = moments(z[:10]) + moments(z[10:]), moments(z)
    >>> np.allclose(correlation(joined), correlation(total))
    True
    """
    xp = array_namespace(z)
    z = xp.astype(z, xp.float64, copy=True)
    n = xp.full(z.shape[:-2], float(z.shape[-2]), dtype=xp.float64, device=device_of(z))
    mean = xp.sum(z, axis=-2) / max(z.shape[-2], 1)
    mean = xp.where(xp.isfinite(mean), mean, xp.zeros_like(mean))  # values that are not finite show in cross
    z -= mean[..., None, :]
    with safe_blas(z.shape[-1]):
        return Moments(n, mean, xp.matrix_transpose(z) @ z)


def scaled_moments(z: Array) -> tuple[Moments, Array]:
    """Compute moments of rows of any size; divide units by powers of two if their squares leave float64.

    Parameters
    ----------
    z : array (row, unit)

    Returns
    -------
    moments : Moments
    exponent : array (unit,)
        Exponents of the powers of two, which change no correlation; 0 if all sizes are ordinary.
    """
    xp = array_namespace(z)
    with np.errstate(over="ignore", invalid="ignore"):
        result = moments(z)
    size = xp.linalg.diagonal(result.cross)
    is_ordinary = (size > _LEAST) & (size < _MOST) & (xp.abs(result.mean) < math.sqrt(_MOST))
    if z.dtype != xp.float64 or bool(xp.all(is_ordinary)):
        return result, xp.zeros(z.shape[-1], dtype=xp.float64, device=device_of(z))
    e = exponent(largest(z, 0))
    return moments(z * power(-e)), e


def rescaled(m: Moments, exponent: Array) -> Moments:
    """Return the moments of rows whose units are multiplied by 2 to the power of ``exponent`` (unit,)."""
    if not bool(array_namespace(exponent).any(exponent != 0)):
        return m
    scale = power(exponent)
    return Moments(m.n, m.mean * scale, m.cross * scale[:, None] * scale)


def broken_units(m: Moments) -> list[int]:
    """Return the positions of units whose sums are NaN or infinite in any batch element, in ascending order."""
    xp = array_namespace(m.cross)
    broken = ~xp.isfinite(xp.linalg.diagonal(m.cross))
    return sorted({int(i) for i in xp.nonzero(broken)[-1]})


def correlation(m: Moments) -> Array:
    """Compute the correlation matrix of the units (FedFac §4.1, R = ZᵀZ with standardized Z).

    Parameters
    ----------
    m : Moments
        Sums over all rows.

    Returns
    -------
    array (..., unit, unit)
        The diagonal is 1. Rows and columns of a constant unit (variance 0) are NaN.

    Raises
    ------
    ValueError
        If there are fewer than two rows, or a sum is not finite.
    """
    xp = array_namespace(m.cross)
    if bool(xp.any(m.n < 2)):
        raise ValueError(
            f"a correlation needs at least 2 rows (client, weight), but got {int(xp.min(m.n))}. "
            "Use more clients or a layer with more incoming weights."
        )
    if broken := broken_units(m):
        raise ValueError(
            f"the weights hold NaN or infinite values, first in unit(s) {broken[:3]}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
    square = xp.linalg.diagonal(m.cross)
    constant = square <= _CONSTANT * (square + m.n[..., None] * m.mean**2)
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(square))
    unity = xp.asarray(1.0, dtype=xp.float64, device=device_of(square))
    scale = 1 / xp.sqrt(xp.where(constant, nan, square))
    r = m.cross * scale[..., :, None] * scale[..., None, :]
    return eigenvalues.with_diagonal(xp, (r + xp.matrix_transpose(r)) / 2, xp.where(constant, nan, unity))
