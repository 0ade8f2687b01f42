"""How certain is a split? Clients resampled, units permuted, by re-weighting sums (inference for FedFac §4.1).

The client is the independent unit. R is additive over clients, so a bootstrap sample is a weighted sum of the clients'
moments and a permutation re-orders each client's own; the stacked matrix is never rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace
from array_api_compat import device as device_of

from fedstat import _check
from fedstat._executor import in_order
from fedstat._random import generator
from fedstat.stats import factor, split
from fedstat.stats.moments import Moments, correlation
from fedstat.stats.wide import safe_blas

Array = Any


class Replicates(NamedTuple):
    """Fits of the replicates.

    Attributes
    ----------
    communality : array (replicate, unit)
        NaN where a unit is dead in a replicate.
    shared : bool array (replicate, unit)
    n_factors : int array (replicate,)
    converged : bool array (replicate,)
    """

    communality: Array
    shared: Array
    n_factors: Array
    converged: Array


def reweighted(m: Moments, counts: Array) -> Moments:
    """Moments of samples that hold client c ``counts[b, c]`` times.

    Parameters
    ----------
    m : Moments
        One batch dim: client.
    counts : array (replicate, client)

    Examples
    --------
    >>> import numpy as np
    >>> from fedstat.stats.moments import moments
    >>> w = np.random.default_rng(0).normal(size=(3, 20, 4))
    >>> twice_first = reweighted(moments(w), np.array([[2.0, 0.0, 1.0]]))
    >>> np.allclose(twice_first.cross[0], moments(w[[0, 0, 2]].reshape(-1, 4)).cross)
    True
    """
    xp = array_namespace(m.cross)
    k, d = m.mean.shape
    rows = counts * m.n
    n = xp.sum(rows, axis=-1)
    mean = rows @ m.mean / n[:, None]
    between = xp.sqrt(rows)[..., None] * (m.mean - mean[:, None, :])
    within = xp.reshape(counts @ xp.reshape(m.cross, (k, d * d)), (-1, d, d))
    with safe_blas(d):
        return Moments(n, mean, within + xp.matrix_transpose(between) @ between)


def bootstrap(
    m: Moments,
    *,
    replicates: int = 200,
    tau: split.Tau = 0.5,
    seed: int = 0,
    chunk: int | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Replicates:
    """Refit on clients drawn with replacement (Efron and Tibshirani 1993, An introduction to the bootstrap, ch. 6).

    Parameters
    ----------
    m : Moments
        One batch dim: client, at least 2. Holds a (unit, unit) matrix for each client.
    replicates : int
    tau : float or Absolute
        As in :func:`fedstat.stats.split.shared`; a quantile is taken anew in each replicate.
    seed : int
    chunk : int, optional
        Replicates summed at once; by default as many as fit into 64 MB. On a GPU they are also analysed at once.
    executor : Executor, optional
        Its workers analyse the replicates, each on one BLAS thread: the numbers are the same whatever the executor, and
        those without one where BLAS has one thread; see :func:`fedstat._executor.in_order`.
    **options
        Arguments of :func:`fedstat.stats.factor.fit`.

    Returns
    -------
    Replicates

    Raises
    ------
    ValueError
        If there are fewer than 2 clients.
    """
    k = _clients(m)
    rng = generator(seed, "bootstrap")
    counts = rng.multinomial(k, np.full(k, 1 / k), size=_check.integer("replicates", replicates)).astype(float)
    xp = array_namespace(m.cross)
    step = _chunk(m, chunk)
    parts = (
        reweighted(m, xp.asarray(counts[i : i + step], device=device_of(m.cross))) for i in range(0, replicates, step)
    )
    return _fits(parts, tau, options, executor)


def permutation(
    m: Moments,
    *,
    replicates: int = 199,
    seed: int = 0,
    chunk: int | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Replicates:
    """Refit after shuffling the units within each client.

    Under the null hypothesis that units carry no identity across clients, the unit labels of every client are
    exchangeable, so shuffled data are as likely as the observed ones.

    Parameters
    ----------
    m, replicates, seed, chunk, executor, **options
        As in :func:`bootstrap`.

    Returns
    -------
    Replicates
        ``shared`` is the split at the median of ν.
    """
    k, d = _clients(m), m.mean.shape[-1]
    rng = generator(seed, "permutation")
    xp = array_namespace(m.cross)
    step = _chunk(m, chunk)

    def shuffled() -> Moments:
        orders = (xp.asarray(rng.permutation(d), device=device_of(m.cross)) for _ in range(k))
        return reduce(
            add, (Moments(m.n[c], m.mean[c][order], m.cross[c][order][:, order]) for c, order in enumerate(orders))
        )

    def parts() -> Iterator[Moments]:
        for i in range(0, _check.integer("replicates", replicates), step):
            drawn = [shuffled() for _ in range(min(step, replicates - i))]
            yield Moments(*(xp.stack(field) for field in zip(*drawn, strict=True)))

    return _fits(parts(), 0.5, options, executor)


def _fits(parts: Iterator[Moments], tau: split.Tau, options: dict[str, Any], executor: Executor | None) -> Replicates:
    matrices = (r for part in parts for r in _batches(correlation(part)))
    fits = list(in_order(executor, partial(_fit, options), matrices))
    xp = array_namespace(fits[0][0])
    nu, n_factors, converged = (xp.concat(field) for field in zip(*fits, strict=True))
    return Replicates(communality=nu, shared=split.shared(nu, tau=tau), n_factors=n_factors, converged=converged)


def _fit(options: dict[str, Any], r: Array) -> tuple[Array, Array, Array]:
    alone = len(r) == 1  # whose steps can be followed
    found = factor.fit(r[0] if alone else r, **{"loadings": False} | options)
    nu, n_factors, converged = found.communality, found.n_factors, found.converged
    return (nu[None], n_factors[None], converged[None]) if alone else (nu, n_factors, converged)


def _batches(r: Array) -> Iterator[Array]:
    """Whole batches for a GPU; single matrices for a CPU, where one that has converged should not wait."""
    step = len(r) if "cuda" in str(device_of(r)) else 1
    return (r[i : i + step] for i in range(0, len(r), step))


def _clients(m: Moments) -> int:
    if m.mean.ndim != 2 or m.mean.shape[0] < 2:
        raise ValueError(
            f"resampling clients needs the moments of at least 2 clients, but got shape {tuple(m.mean.shape)}. "
            "Stack the moments of single clients."
        )
    return int(m.mean.shape[0])


def _chunk(m: Moments, chunk: int | None) -> int:
    return _check.integer("chunk", max(1, 2**23 // m.mean.shape[-1] ** 2) if chunk is None else chunk)
