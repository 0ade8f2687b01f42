"""Sums over clients of weights and their products, from which correlations follow; scales; very wide layers.

NumPy or torch, the same out; :func:`largest` keeps the dtype, the others are float64.

Variables are the hidden units of one layer; observations are the pairs (client, incoming weight). NumPy arrays or torch
tensors, with any leading batch dimensions, in float64.
"""

from __future__ import annotations

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


# On several threads OpenBLAS 0.3.31 crashes in symmetric products and Cholesky factors of 15,500 units, not of 14,000.
_WIDE = 8192
# Matrices (unit, unit) that a fit holds at its peak, measured as 4.3 and 7.2: leading eigenpairs alone, or all.
_LEADING, _ALL = 5, 8
_SMALL = 2**30


def safe_blas(units: int) -> AbstractContextManager[object]:
    """Context in which BLAS may work on symmetric matrices of this size: on one thread if it is large."""
    return threadpool_limits(1, user_api="blas") if units > _WIDE else nullcontext()


def require_memory(units: int, *, all_pairs: bool, clients: int = 0) -> None:
    """Raise ValueError if the matrices of a fit do not fit into memory.

    Parameters
    ----------
    units : int
    all_pairs : bool
        Whether the fit takes all eigenpairs, or the leading ones.
    clients : int
        Clients whose own matrices are held as well, twice while they are stacked.
    """
    need = 8 * units**2 * ((_ALL if all_pairs else _LEADING) + 2 * clients)
    if need > _SMALL and need > (free := memory.available()):
        of = f"{units} units of {clients} clients" if clients else f"{units} units"
        way_out = "fewer clients or units" if clients else "fewer units"
        if all_pairs:
            way_out += ", n_factors of at most a fifth of the units with method='pa' or 'pc'"
        raise ValueError(
            f"matrices (unit, unit) for {of} need about {need / 2**30:.1f} GiB of memory, but "
            f"{free / 2**30:.1f} GiB are available. Take {way_out}, or a machine with more memory."
        )


# A unit whose variance is below this share of its mean square is constant up to the rounding of float64 means.
_DEAD = 1e-26
# Below this sum of squares some of them may have vanished.
_LEAST = 1e-200


class Moments(NamedTuple):
    """What determines the correlation matrix; ``+`` joins clients, chunks of clients and hosts without loss of digits.

    Sums about the mean, joined pairwise (Chan, Golub and LeVeque 1983, The American Statistician 37, 242-247).

    Attributes
    ----------
    n : array (...,)
        Number of rows summed.
    mean : array (..., unit)
        Column means; 0 for a unit whose sum is not finite.
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
    """Mean and cross products of one block of rows.

    Parameters
    ----------
    z : array (..., row, unit)
        Rows are (client, weight) pairs, in any order and any partition. Their squares must be within float64, see
        :func:`scaled_moments`.

    Examples
    --------
    >>> import numpy as np
    >>> z = np.random.default_rng(0).normal(size=(40, 3))
    >>> both, whole = moments(z[:10]) + moments(z[10:]), moments(z)
    >>> np.allclose(correlation(both), correlation(whole))
    True
    """
    xp = array_namespace(z)
    z = xp.astype(z, xp.float64, copy=True)
    n = xp.full(z.shape[:-2], float(z.shape[-2]), dtype=xp.float64, device=device_of(z))
    mean = xp.sum(z, axis=-2) / max(z.shape[-2], 1)
    mean = xp.where(xp.isfinite(mean), mean, xp.zeros_like(mean))  # what is not finite shows in cross
    z -= mean[..., None, :]
    with safe_blas(z.shape[-1]):
        return Moments(n, mean, xp.matrix_transpose(z) @ z)


def scaled_moments(z: Array) -> tuple[Moments, Array]:
    """Moments of rows of any size, with units divided by powers of two where their squares leave float64.

    Parameters
    ----------
    z : array (row, unit)

    Returns
    -------
    moments : Moments
    exponent : array (unit,)
        Of the powers of two, which change no correlation; 0 where all sizes are ordinary.
    """
    xp = array_namespace(z)
    with np.errstate(over="ignore", invalid="ignore"):
        found = moments(z)
    size = xp.linalg.diagonal(found.cross)
    if z.dtype != xp.float64 or bool(xp.all((size > _LEAST) & xp.isfinite(size))):
        return found, xp.zeros(z.shape[-1], dtype=xp.float64, device=device_of(z))
    e = exponent(largest(z, 0))
    return moments(z * power(-e)), e


def rescaled(m: Moments, exponent: Array) -> Moments:
    """Moments of rows whose units are multiplied by 2 to the power of ``exponent`` (unit,)."""
    if not bool(array_namespace(exponent).any(exponent != 0)):
        return m
    by = power(exponent)
    return Moments(m.n, m.mean * by, m.cross * by[:, None] * by)


def broken_units(m: Moments) -> list[int]:
    """Units (positions) whose sums are NaN or infinite in any batch element, in ascending order."""
    xp = array_namespace(m.cross)
    bad = ~xp.isfinite(xp.linalg.diagonal(m.cross))
    return sorted({int(i) for i in xp.nonzero(bad)[-1]})


def correlation(m: Moments) -> Array:
    """Correlation matrix of the units (FedFac §4.1, R = ZᵀZ of the standardised Z).

    Parameters
    ----------
    m : Moments
        Sums over all rows.

    Returns
    -------
    array (..., unit, unit)
        Unit diagonal. Rows and columns of a unit with zero variance (a dead unit) are NaN.

    Raises
    ------
    ValueError
        If fewer than two rows were summed, or a sum is not finite.
    """
    xp = array_namespace(m.cross)
    if bool(xp.any(m.n < 2)):
        raise ValueError(
            f"a correlation needs at least 2 rows (client, weight), but got {int(xp.min(m.n))}. "
            "Use more clients or a layer with more incoming weights."
        )
    if bad := broken_units(m):
        raise ValueError(
            f"the weights hold NaN or infinite values, first in unit(s) {bad[:3]}. "
            "A diverged client is the usual cause: leave it out or lower its learning rate."
        )
    square = xp.linalg.diagonal(m.cross)
    dead = square <= _DEAD * (square + m.n[..., None] * m.mean**2)
    nan = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(square))
    one = xp.asarray(1.0, dtype=xp.float64, device=device_of(square))
    scale = 1 / xp.sqrt(xp.where(dead, nan, square))
    r = m.cross * scale[..., :, None] * scale[..., None, :]
    return eigenvalues.with_diagonal(xp, (r + xp.matrix_transpose(r)) / 2, xp.where(dead, nan, one))
