"""Student's interval of a mean, the jackknife, and the bootstrap and permutation of a split from sums over clients.

The client is the independent unit. Moments are additive over clients: a bootstrap sample is a weighted sum of the
clients' moments, and a permutation reorders the moments of each client. The stacked matrix is never rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_numpy_array
from array_api_compat import device as device_of
from numpy.typing import ArrayLike, NDArray

from fedstat._utils import check
from fedstat._utils.loops import in_order, threads_of_blas
from fedstat._utils.streams import generator
from fedstat.stats import factor, split
from fedstat.stats.moments import Moments, correlation, safe_blas

_ROUNDING = 1e-12


class Mean(NamedTuple):
    """Mean of independent values with test and interval.

    Attributes
    ----------
    n : int
    mean, std_error : float
    statistic, p_value : float
        t, and its two-sided p value for H0: the mean is 0.
    low, high : float
        Student's interval.
    equal : bool
        True if there are at least two values, all equal: their spread is unknown, not 0. In this case, and for a single
        value, ``std_error``, test and interval are NaN.
    """

    n: int
    mean: float
    std_error: float
    statistic: float
    p_value: float
    low: float
    high: float
    equal: bool


def mean(values: ArrayLike, *, level: float = 0.95, rounding: float = 0.0) -> Mean:
    """Compute the mean of independent values with Student's interval (Student 1908, Biometrika 6, 1-25).

    Parameters
    ----------
    values : array (n,)
        If a value is NaN, all results are NaN.
    level : float in (0, 1)
    rounding : float >= 0
        Values are equal if they differ by at most ``rounding``, or by at most 1e-12 of the largest absolute value.

    Returns
    -------
    Mean

    Examples
    --------
    >>> result = mean([1.0, 2.0, 3.0])
    >>> result.mean, round(result.low, 3), round(result.high, 3)
    (2.0, -0.484, 4.484)
    >>> mean([0.0, 0.0, 0.0]).equal, mean([0.0, 0.0, 0.0]).low
    (True, nan)
    """
    check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    x = np.asarray(values, dtype=np.float64)
    n, nan = len(x), math.nan
    center = float(x.mean()) if n else nan
    finite = math.isfinite(center)
    equal = bool(n > 1 and finite and np.ptp(x) <= max(rounding, _ROUNDING * np.abs(x).max()))
    if n < 2 or equal or not finite:
        return Mean(n, center, nan, nan, nan, nan, nan, equal)
    error = float(x.std(ddof=1)) / math.sqrt(n)
    half = float(scipy.stats.t.ppf((1 + level) / 2, n - 1)) * error
    p_value = float(2 * scipy.stats.t.sf(abs(center / error), n - 1))
    return Mean(n, center, error, center / error, p_value, center - half, center + half, False)


def jackknife(
    left_out: NDArray[np.float64],
    most: int,
    strata: NDArray[np.int64] | None = None,
    estimate: NDArray[np.float64] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the jackknife standard error and its degrees of freedom from estimates without each client.

    Parameters
    ----------
    left_out : array (client, ...)
        Estimates without each client.
    most : int
        Largest number of degrees of freedom.
    strata : int array (client,), optional
        Fixed group of each client: the variance is the sum over groups (Rao and Shao 1992, Biometrika 79, 811-822).
    estimate : array (...), optional
        Value from which deviations are measured: by default the mean of ``left_out``.

    Returns
    -------
    std_error : array (...)
        Jackknife standard error (Miller 1974, Biometrika 61, 1-15).
    df : array (...)
        (Σ v)² / Σ v² for squared deviations v of the estimates from their mean. It is small if few clients contribute
        most of the variance. For clients of equal variance it is near a third of their number.

    Examples
    --------
    >>> std_error, df = jackknife(np.array([0.0, 0.0, 0.0, 4.0]), 3)
    >>> float(std_error), round(float(df), 2)
    (3.0, 1.71)
    """
    n = np.full(1, len(left_out)) if strata is None else np.bincount(strata)[strata]
    weights = ((n - 1) / n).reshape(-1, *[1] * (left_out.ndim - 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        center = left_out.mean(axis=0) if estimate is None else estimate
        v = weights * (left_out - center) ** 2
        total = v.sum(axis=0)
        df = np.clip(np.nan_to_num(total**2 / (v**2).sum(axis=0), nan=most), 1, most)
        return np.sqrt(total), df


Array = Any
_BATCH = 32  # matrices in a call, as a call costs as much as the decomposition of a small matrix
_LARGE = 100  # units from which fits run in threads: smaller ones mostly wait for Python


class Replicates(NamedTuple):
    """Fits of bootstrap samples or permutations.

    Attributes
    ----------
    communality : array (replicate, unit)
        NaN if a unit is constant in a replicate.
    shared : bool array (replicate, unit)
    n_factors : int array (replicate,)
    converged : bool array (replicate,)
    gap : array (replicate,)
        Eigenvalue of the last factor minus the next eigenvalue of R. NaN if the next was not computed.
    """

    communality: Array
    shared: Array
    n_factors: Array
    converged: Array
    gap: Array


def reweighted(m: Moments, counts: Array) -> Moments:
    """Return the moments of samples that contain client c ``counts[b, c]`` times.

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
    groups: NDArray[np.int64] | None = None,
    whole_groups: bool = False,
    seed: int = 0,
    chunk: int | None = None,
    executor: Executor | None = None,
    tick: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> Replicates:
    """Refit on bootstrap samples of clients (Efron and Tibshirani 1993, An introduction to the bootstrap, ch. 6).

    Parameters
    ----------
    m : Moments
        One batch dim: client, at least 2. Contains a (unit, unit) matrix for each client.
    replicates : int
        Number of bootstrap samples.
    tau : float or Absolute
        As in :func:`fedstat.stats.split.shared`; a quantile is computed for each bootstrap sample.
    groups : int array (client,), optional
        Group of each client: 0, 1, ... Samples have as many clients of each group as there are, drawn from the group.
    whole_groups : bool
        Draw whole groups, with all their clients, instead.
    seed : int
    chunk : int, optional
        Number of samples that are summed at a time; by default as many as fit into 16 MB, or 64 MB on a GPU, where they
        are also fitted at a time.
    executor : Executor, optional
        Its workers fit the samples, each on one BLAS thread. All executors give equal numbers, as does no executor:
        NumPy arrays of at least 100 units are then fitted in as many threads as BLAS has.
    tick : callable (int)
        Called with the number of samples that were fitted since the last call.
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
    k = _count_clients(m)
    rng = generator(seed, "bootstrap")
    n_samples = check.integer("replicates", replicates)

    def draw(n: int) -> NDArray[np.float64]:
        return rng.multinomial(n, np.full(n, 1 / n), size=n_samples).astype(float)

    if groups is None:
        counts = draw(k)
    elif whole_groups:
        counts = draw(int(groups.max()) + 1)[:, groups]
    else:
        counts = np.empty((n_samples, k))
        for group, size in enumerate(np.bincount(groups).tolist()):
            counts[:, groups == group] = draw(size)
    return _refit(m, _reweight(m, counts, chunk), tau, options, executor, tick)


def half_samples(
    m: Moments,
    *,
    pairs: int = 3,
    seed: int = 0,
    chunk: int | None = None,
    executor: Executor | None = None,
    **options: Any,
) -> Array:
    """Refit on random halves of the clients, to estimate how communalities depend on the number of clients.

    A bias proportional to 1 / clients is as large as the change that halving the clients causes.

    Parameters
    ----------
    m, seed, chunk, executor, **options
        As in :func:`bootstrap`.
    pairs : int
        Number of random divisions of the clients into halves. With an odd number of clients, each division excludes a
        random client.

    Returns
    -------
    array (half, unit)
        ν of the ``2 * pairs`` halves.
    """
    k = _count_clients(m)
    rng = generator(seed, "half-samples")
    orders = (rng.permutation(k) for _ in range(check.integer("pairs", pairs)))
    halves = [half for order in orders for half in order[: k - k % 2].reshape(2, -1)]
    counts = np.zeros((len(halves), k))
    np.put_along_axis(counts, np.array(halves), 1.0, axis=1)
    return _refit(m, _reweight(m, counts, chunk), 0.5, options, executor).communality


def divide_clients(
    n_clients: int, n_blocks: int, *, groups: NDArray[np.int64] | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """Divide clients at random into blocks whose sizes differ by at most one client.

    Parameters
    ----------
    n_clients, n_blocks : int
        At least 2 blocks, and at most as many as clients.
    groups : int array (client,), optional
        Groups that are divided each, into at least 2 blocks, in proportion to their sizes: then ``n_blocks`` is about
        the number of blocks.
    seed : int
        Not used if each client is a block.

    Returns
    -------
    int array (client,)
        Number of each client's block.

    Examples
    --------
    >>> divide_clients(4, 4)
    array([0, 1, 2, 3])
    >>> np.bincount(divide_clients(10, 4)).tolist()
    [3, 3, 2, 2]
    """
    if n_clients < 2:
        raise ValueError(f"a jackknife needs at least 2 clients, but got {n_clients}. Pass more clients.")
    check.integer("n_blocks", n_blocks, low=2, high=n_clients)
    if groups is not None:
        blocks, n = np.empty(n_clients, dtype=np.int64), 0
        for group, size in enumerate(np.bincount(groups).tolist()):
            n_of_group = min(size, max(2, round(n_blocks * size / n_clients)))
            blocks[groups == group] = n + divide_clients(size, n_of_group, seed=seed)
            n += n_of_group
        return blocks
    order = np.arange(n_clients) % n_blocks
    return order if n_blocks == n_clients else generator(seed, "jackknife").permutation(order)


def delete_blocks(
    m: Moments,
    blocks: NDArray[np.int64],
    *,
    groups: NDArray[np.int64] | None = None,
    tau: split.Tau = 0.5,
    chunk: int | None = None,
    executor: Executor | None = None,
    tick: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> Replicates:
    """Refit without each block of clients: the delete-a-group jackknife (Kott 2001, J. Official Stat. 17, 521-526).

    Parameters
    ----------
    m, tau, chunk, executor, tick, **options
        As in :func:`bootstrap`.
    blocks : int array (client,)
        Number of each client's block: 0, 1, ..., with at least 2 blocks.
    groups : int array (client,), optional
        Fixed group of each client, a part of which is a block: the rest of the group has the group's total weight.

    Returns
    -------
    Replicates
        One per block; :func:`jackknife` makes standard errors of them.
    """
    n_clients = _count_clients(m)
    if len(blocks) != n_clients:
        raise ValueError(f"blocks must have one number per client ({n_clients}), but got {len(blocks)}.")
    counts = (np.arange(blocks.max() + 1)[:, None] != blocks).astype(float)
    if groups is not None:
        member = groups[:, None] == groups
        counts *= member.sum(axis=1) / np.maximum(counts @ member, 1)
    return _refit(m, _reweight(m, counts, chunk), tau, options, executor, tick)


def expanded_percentiles(
    x: np.ndarray, n: int, *, level: float, df: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the expanded percentile interval from bootstrap estimates.

    Percentile intervals are too narrow for small samples: the variance of bootstrap estimates has the divisor n instead
    of n − 1, and normal instead of t quantiles. The expanded interval corrects both with tail probabilities
    Φ(√(n/(n−1)) t), where t is Student's quantile with n − 1 degrees of freedom [1]_.

    Parameters
    ----------
    x : array (replicate, ...)
        Bootstrap estimates; NaN is ignored.
    n : int
        Size of the observed sample, at least 2.
    level : float in (0, 1)
    df : int, optional
        Degrees of freedom of t; by default n − 1. Of samples by group, n is the size of the smallest group, and df the
        number of clients minus groups.

    Returns
    -------
    low, high : array (...,)

    References
    ----------
    .. [1] Hesterberg (2015), "What teachers should know about the bootstrap: resampling in the undergraduate
       statistics curriculum", Amer. Statist. 69, 371-386.

    Examples
    --------
    >>> low, high = expanded_percentiles(np.arange(1.0, 1000.0), 10, level=0.95)
    >>> round(float(low), 1), round(float(high), 1)
    (8.6, 991.4)
    """
    tail = scipy.special.ndtr(math.sqrt(n / (n - 1)) * scipy.special.stdtrit(df or n - 1, (1 - level) / 2))
    low, high = np.nanquantile(x, [tail, 1 - tail], axis=0, method="weibull")  # unbiased tail probabilities
    return low, high


def permutation(
    m: Moments,
    *,
    replicates: int = 199,
    groups: NDArray[np.int64] | None = None,
    seed: int = 0,
    chunk: int | None = None,
    executor: Executor | None = None,
    tick: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> Replicates:
    """Refit after permuting the units within each client.

    H0: units are exchangeable within clients, so that permuted data are as likely as the observed data. Common initial
    parameters of all clients make H0 false by construction.

    Parameters
    ----------
    m, replicates, seed, chunk, executor, tick, **options
        As in :func:`bootstrap`; ``replicates`` is the number of permutations.
    groups : int array (client,), optional
        Group of each client: 0, 1, ... Clients of a group have one order, so that H0 allows groups of unlike clients.

    Returns
    -------
    Replicates
        ``shared`` is the split at the median of ν.
    """
    k, d = _count_clients(m), m.mean.shape[-1]
    rng = generator(seed, "permutation")
    xp = array_namespace(m.cross)
    step = _chunk_size(m, chunk)

    def permuted_sum() -> Moments:
        n_orders = k if groups is None else int(groups.max()) + 1
        drawn = [xp.asarray(rng.permutation(d), device=device_of(m.cross)) for _ in range(n_orders)]
        orders = drawn if groups is None else [drawn[group] for group in groups.tolist()]
        return reduce(
            add, (Moments(m.n[c], m.mean[c][order], m.cross[c][order][:, order]) for c, order in enumerate(orders))
        )

    def batches() -> Iterator[Moments]:
        for i in range(0, check.integer("replicates", replicates), step):
            samples = [permuted_sum() for _ in range(min(step, replicates - i))]
            yield Moments(*(xp.stack(field) for field in zip(*samples, strict=True)))

    return _refit(m, batches(), 0.5, options, executor, tick)


def _reweight(m: Moments, counts: np.ndarray, chunk: int | None) -> Iterator[Moments]:
    xp, step = array_namespace(m.cross), _chunk_size(m, chunk)
    counts_on_device = xp.asarray(counts, device=device_of(m.cross))
    return (reweighted(m, counts_on_device[i : i + step, :]) for i in range(0, len(counts), step))


def _refit(
    m: Moments,
    samples: Iterator[Moments],
    tau: split.Tau,
    options: dict[str, Any],
    executor: Executor | None,
    tick: Callable[[int], object] = lambda _: None,
) -> Replicates:
    iterates = options.get("method", "pa") in factor.ITERATE
    matrices = (r for sums in samples for r in _batches(correlation(sums), iterates=iterates))
    in_threads = executor is None and is_numpy_array(m.cross) and m.mean.shape[-1] >= _LARGE
    run = threads_of_blas if in_threads else partial(in_order, executor)
    fits = []
    for fit in run(partial(_fit, options), matrices):
        fits.append(fit)
        tick(len(fit[0]))
    xp = array_namespace(fits[0][0])
    nu, n_factors, converged, eigenvalues = (xp.concat(field) for field in zip(*fits, strict=True))
    shared, gap = split.shared(nu, tau=tau), factor.gap(eigenvalues, n_factors)
    return Replicates(communality=nu, shared=shared, n_factors=n_factors, converged=converged, gap=gap)


def _fit(options: dict[str, Any], r: Array) -> tuple[Array, ...]:
    is_single = len(r) == 1  # the fit of a single matrix can follow earlier steps
    result = factor.fit(r[0] if is_single else r, **{"loadings": False} | options)
    fields = result.communality, result.n_factors, result.converged, result.eigenvalues
    return tuple(field[None] for field in fields) if is_single else fields


def _batches(r: Array, *, iterates: bool) -> Iterator[Array]:
    """Divide matrices into batches: all on a GPU; on a CPU single matrices if the fit iterates, so that none waits."""
    step = len(r) if _is_cuda(r) else 1 if iterates else _BATCH
    return (r[i : i + step] for i in range(0, len(r), step))


def _count_clients(m: Moments) -> int:
    if m.mean.ndim != 2 or m.mean.shape[0] < 2:
        raise ValueError(
            f"resampling clients needs the moments of at least 2 clients, but got shape {tuple(m.mean.shape)}. "
            "Stack the moments of single clients."
        )
    return int(m.mean.shape[0])


def _chunk_size(m: Moments, chunk: int | None) -> int:
    default = max(1, (2**23 if _is_cuda(m.cross) else 2**21) // m.mean.shape[-1] ** 2)
    return check.integer("chunk", default if chunk is None else chunk)


def _is_cuda(array: Array) -> bool:
    return "cuda" in str(device_of(array))
