"""How certain is agreement between clients? Intraclass correlations of clients drawn with replacement.

Weights may be NumPy arrays or torch tensors; the coefficients are NumPy arrays, on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from array_api_compat import device as device_of
from numpy.typing import NDArray

from fedstat import _check
from fedstat._random import generator
from fedstat.stats import scale
from fedstat.stats.icc import at_once, block, mean_squares_of, six, slices

Array = Any


def bootstrap(
    w: Array, start: Array | None = None, *, replicates: int = 200, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Coefficients of clients drawn with replacement (Efron and Tibshirani 1993, An introduction to the bootstrap).

    The mean squares are means over pairs of clients. A client drawn twice agrees with itself, which says nothing about
    how clients agree: these pairs are left out, or every coefficient would be about (1 - ICC) / clients too high.

    Parameters
    ----------
    w : array (client, unit, weight)
        At least 3 clients.
    start : array (unit, weight), optional
        Subtracted from every client's weights.
    replicates : int
    seed : int

    Returns
    -------
    units : array (replicate, unit, type)
        NaN where nothing varies.
    layer : array (replicate, type)
        Both are NaN in a replicate that drew one client alone.

    Raises
    ------
    ValueError
        If there are fewer than 3 clients: with two, a replicate is the sample itself or has no pair.
    """
    xp = array_namespace(w)
    k, d, n = w.shape
    if k < 3:
        raise ValueError(f"resampling clients needs at least 3 of them, but got {k}. Use replicates=0.")
    rng = generator(seed, "icc bootstrap")
    drawn = rng.multinomial(k, np.full(k, 1 / k), size=_check.integer("replicates", replicates)).astype(float)
    counts = xp.asarray(drawn, device=device_of(w))
    units, means, total = [], [], None
    for part in slices(d, max(1, at_once(w) // (k * max(n, k, len(drawn))))):
        pairs, each = _pairs(*block(w, start, slice(None), part))
        means.append(each)
        units.append(_resampled(pairs, counts, n))
        total = _as_one(pairs) if total is None else _as_one(_joined(total, _as_one(pairs)))
    between, _ = _pairs(*block(xp.concat(means, axis=1)[:, None, :]))
    weighed = between._replace(cross=n * between.cross, apart=n * between.apart)
    layer = _as_one(_joined(cast(_Pairs, total), weighed))
    by = scale.power(2 * (between.exponent - layer.exponent))
    layer = layer._replace(offset=by * between.offset, gap=by[:, None, None] * between.gap)
    return np.concatenate(units, axis=1), _resampled(layer, counts, n * d)[:, 0]


class _Pairs(NamedTuple):
    """What pairs of clients have in common and apart: (unit,), and (unit, client, client) with zero diagonals."""

    exponent: Array
    offset: Array  # square of the mean
    cross: Array  # products of the weights, each client's less their mean
    apart: Array  # squared distances of the same
    gap: Array  # squared differences of the means


def _pairs(e: Array, x: Array) -> tuple[_Pairs, Array]:
    """Pairs of clients of a block, which is used up, and the clients' means (client, unit), not divided."""
    xp = array_namespace(x)
    k, _, n = x.shape
    each = xp.sum(x, axis=-1) / n
    x -= each[..., None]
    profile = xp.sum(x, axis=0) / k
    x -= profile
    both = xp.matmul(xp.permute_dims(x, (1, 0, 2)), xp.permute_dims(x, (1, 2, 0)))
    own = xp.linalg.diagonal(both)
    along = xp.permute_dims(xp.vecdot(x, profile[None]), (1, 0))
    off = 1 - xp.eye(k, dtype=xp.float64, device=device_of(x))
    cross = (xp.vecdot(profile, profile)[:, None, None] + along[:, :, None] + along[:, None, :] + both) * off
    apart = (own[:, :, None] + own[:, None, :] - 2 * both) * off
    means = xp.permute_dims(each, (1, 0))
    gap = (means[:, :, None] - means[:, None, :]) ** 2
    return _Pairs(e, xp.mean(means, axis=-1) ** 2, cross, apart, gap), each * scale.power(e)


def _joined(a: _Pairs, b: _Pairs) -> _Pairs:
    return _Pairs(*map(array_namespace(a.cross).concat, zip(a, b, strict=True)))


def _as_one(p: _Pairs) -> _Pairs:
    """All units as one, except their means."""
    xp = array_namespace(p.cross)
    top = xp.max(p.exponent)
    by = scale.power(2 * (p.exponent - top))[:, None, None]
    cross, apart = xp.sum(by * p.cross, axis=0)[None], xp.sum(by * p.apart, axis=0)[None]
    return _Pairs(top[None], xp.zeros_like(top)[None], cross, apart, xp.zeros_like(cross))


def _resampled(p: _Pairs, counts: Array, n: int) -> NDArray[np.float64]:
    """Coefficients (replicate, unit, type) of samples that hold client c ``counts[b, c]`` times."""
    xp = array_namespace(p.cross)
    k = counts.shape[-1]
    pairs = k**2 - xp.sum(counts**2, axis=-1)
    none = xp.asarray(float("nan"), dtype=xp.float64, device=device_of(pairs))
    pairs = xp.where(pairs > 0, pairs, none)

    def mean(x: Array) -> Array:
        return xp.vecdot(xp.matmul(counts, x), counts[None]) / pairs  # (unit, replicate)

    e, j = mean(p.apart) / (2 * (n - 1)), n * mean(p.gap) / 2
    b = k * mean(p.cross) / (n - 1) + e
    squares = ((n - 1) * b, (k - 1) * j, (n - 1) * (k - 1) * e)
    ms = mean_squares_of(*squares, p.offset[:, None], p.exponent, k, n)
    b, j, e = (np.asarray(x.detach().cpu() if is_torch_array(x) else x).T for x in ms[:3])
    with np.errstate(divide="ignore", invalid="ignore"):
        return six(b, j, e, n, k)
