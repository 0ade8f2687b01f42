"""Entropy of a sample from nearest neighbors (FedFac §1, Fig. 2), with intervals and treatment of ties."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
import scipy
from array_api_compat import array_namespace, is_numpy_namespace
from array_api_compat import device as device_of

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats import moments

Array = Any

# Numbers in one block of temporaries: on the CPU few enough for its cache and for reuse of freed memory, on other
# devices few enough to fit beside the data.
_CACHED, _BLOCK = 1 << 15, 1 << 24
_SINGULAR = 1e-12
"""Largest eigenvalue of a correlation matrix that counts as 0: a coordinate is a linear function of others."""


def whiten(xp: Any, points: Array) -> tuple[Array, Array]:
    """Transform points linearly to uncorrelated coordinates of variance 1.

    Parameters
    ----------
    xp : module
        Namespace of the array API.
    points : array (series, sample) or (series, sample, feature)
        Points (series, sample) are returned unchanged.

    Returns
    -------
    whitened : array, of the shape of points
    log_det : array (series,)
        Log-determinant of the inverse transformation, in nats.

    Raises
    ------
    ValueError
        If a coordinate of a series is a linear function of the others.
    """
    log_det = xp.zeros(points.shape[0], dtype=xp.float64, device=device_of(points))
    if points.ndim == 2:
        return points, log_det
    n, d = points.shape[1:]
    x = points - points[:, :1, :]
    varies = xp.any(xp.any(x != 0, axis=2), axis=1)  # a series of equal points is a single atom
    sizes = xp.max(xp.abs(x), axis=1, keepdims=True)
    x = x / xp.where(sizes > 0, sizes, 1.0)
    x = x - xp.mean(x, axis=1, keepdims=True)
    sd = xp.sqrt(xp.mean(x**2, axis=1, keepdims=True))
    x = x / xp.where(sd > 0, sd, 1.0)
    values, vectors = xp.linalg.eigh(xp.matrix_transpose(x) @ x / n)
    if series := [int(i) for i in xp.nonzero(varies & (values[:, 0] <= _SINGULAR))[0]]:
        raise ValueError(_singular_message(series, points.shape))
    root = xp.sqrt(xp.where(values > _SINGULAR, values, 1.0))
    vectors = vectors / root[:, None, :]
    # Not matmul, which would round equal points differently.
    whitened = sum(x[:, :, j, None] * vectors[:, None, j, :] for j in range(d))
    logs = xp.log(root) + xp.log(xp.where(sizes > 0, sizes, 1.0) * xp.where(sd > 0, sd, 1.0))[:, 0, :]
    return whitened, xp.sum(logs, axis=1)


def _singular_message(series: list[int], shape: tuple[int, ...]) -> str:
    where = f" in {len(series)} of {shape[0]} series, first in series {series[0]}" if shape[0] > 1 else ""
    return (
        f"a coordinate of x is a linear function of the others{where}, so the entropy is -inf (x has {shape[1]} "
        f"samples of {shape[2]} coordinates). Leave out redundant coordinates, or pass more samples than coordinates."
    )


def distances_and_copies(xp: Any, points: Array, k: int) -> tuple[Array, Array]:
    """Return the distance of every point to its k-th nearest neighbor, and the number of points with an exact copy.

    Parameters
    ----------
    xp : module
        Namespace of the array API.
    points : array (series, sample), sorted, or (series, sample, feature)
    k : int >= 1

    Returns
    -------
    distance : array (series, sample)
        In the unit of the points.
    copied : int array (series,)
    """
    if points.ndim > 2:
        nearest, distance = distances(xp, points, (1, k))
        return distance, xp.sum(xp.astype(nearest == 0, xp.int64), axis=1)
    distance, any_equal = _distances_on_line(xp, points, k)
    copied = xp.zeros(points.shape[0], dtype=xp.int64, device=device_of(points))
    if any_equal:
        equal = points[:, 1:] == points[:, :-1]
        joined = xp.concat([equal[:, :1], equal[:, 1:] | equal[:, :-1], equal[:, -1:]], axis=1)
        copied = xp.sum(xp.astype(joined, xp.int64), axis=1)
    return distance, copied


def distances(xp: Any, points: Array, ks: tuple[int, ...]) -> list[Array]:
    """Return the distances of all points to their k-th nearest neighbors: an array (series, sample) for each k.

    ``xp`` and ``points`` are as in :func:`distances_and_copies`.
    """
    if points.ndim == 2:
        return [_distances_on_line(xp, points, k)[0] for k in ks]
    e = moments.exponent(moments.largest(points, (1, 2)))
    if bool(xp.any(e != 0)):  # squares of coordinates could overflow or vanish
        nearest = _distances_in_space(xp, points * moments.power(-e)[:, None, None], ks)
        return [distance * moments.power(e)[:, None] for distance in nearest]
    return _distances_in_space(xp, points, ks)


def _distances_in_space(xp: Any, points: Array, ks: tuple[int, ...]) -> list[Array]:
    if _on_cpu(points):
        host, ranks = np.asarray(points), [k + 1 for k in ks]
        nearest = np.array([scipy.spatial.cKDTree(p).query(p, k=ranks)[0] for p in host])
        nearest = nearest.reshape(*points.shape[:2], len(ks))
        return [xp.asarray(np.ascontiguousarray(nearest[:, :, i])) for i in range(len(ks))]
    tables = [_distances_by_table(xp, p, ks) for p in points]
    return [xp.stack([table[:, i] for table in tables]) for i in range(len(ks))]


def _distances_on_line(xp: Any, s: Array, k: int) -> tuple[Array, bool]:
    """Return distances for sorted s (series, sample), and True if any samples are equal.

    Temporaries of a block stay in the CPU's cache.
    """
    series, n = s.shape
    block = _CACHED if _on_cpu(s) else _BLOCK
    out, any_equal = xp.empty_like(s), False
    rows = max(1, block // n)
    for row in range(0, series, rows):
        for start in range(0, n, block):
            stop = min(start + block, n)
            low, high = max(0, start - k), min(n, stop + k)
            near, equal = _windows(xp, s[row : row + rows, low:high], k)
            out[row : row + rows, start:stop] = near[:, start - low : stop - low]
            any_equal = any_equal or equal
    return out, any_equal


def _windows(xp: Any, s: Array, k: int) -> tuple[Array, bool]:
    """Return distances to the k-th neighbor for sorted s (series, sample), and True if any samples are equal.

    The k nearest neighbors of a sample lie in one of k + 1 windows of neighbors in rank.
    """
    inner = s.shape[1] - k
    gap = [s[:, m:] - s[:, :-m] for m in range(1, k + 1)]  # gap[m - 1][:, i]: from sample i to sample i + m
    best = xp.empty_like(s)
    best[:, :inner], best[:, inner:] = gap[-1], math.inf
    for n_below in range(1, k):
        window = slice(n_below, n_below + inner)
        reach = xp.maximum(gap[n_below - 1][:, :inner], gap[k - n_below - 1][:, window])
        best[:, window] = xp.minimum(best[:, window], reach)
    best[:, k:] = xp.minimum(best[:, k:], gap[-1])
    return best, bool(xp.min(gap[0]) == 0)


def _on_cpu(x: Array) -> bool:
    return str(device_of(x)) == "cpu"


def _distances_by_table(xp: Any, p: Array, ks: tuple[int, ...]) -> Array:
    """Return distances (sample, k) of p (sample, feature) from all pairs of samples, a block of rows at a time."""
    step = max(1, _BLOCK // (p.shape[0] * p.shape[1]))
    rows = []
    for start in range(0, p.shape[0], step):
        square = xp.sum((p[start : start + step, None, :] - p[None, :, :]) ** 2, axis=-1)
        ordered = xp.sort(square, axis=-1, stable=False)
        rows.append(xp.sqrt(xp.stack([ordered[:, k] for k in ks], axis=-1)))
    return xp.concat(rows)


Ties = Literal["error", "atoms", "jitter"]
TIES: tuple[Ties, ...] = ("error", "atoms", "jitter")

# χ(k, d): rows are d = 1, 2, ..., columns k = 1 to 10; source: tests/golden/entropy_neighbour_variance.py.
_NEIGHBOUR_VARIANCE = (
    (2.142, 0.953, 0.616, 0.456, 0.362, 0.300, 0.256, 0.224, 0.199, 0.179),
    (2.300, 0.991, 0.627, 0.456, 0.356, 0.289, 0.245, 0.216, 0.190, 0.170),
    (2.401, 0.990, 0.611, 0.451, 0.356, 0.292, 0.246, 0.215, 0.190, 0.170),
    (2.520, 1.031, 0.629, 0.460, 0.363, 0.300, 0.257, 0.220, 0.195, 0.176),
    (2.667, 1.078, 0.666, 0.481, 0.375, 0.310, 0.262, 0.228, 0.202, 0.180),
    (2.624, 1.065, 0.669, 0.485, 0.378, 0.313, 0.267, 0.231, 0.205, 0.185),
)
_CLUSTERED = 5.0
"""Smallest increase of the estimate from a near to a further neighbor in clustered samples, in nats times √n."""


class Entropy(NamedTuple):
    """Differential entropy in nats; ``np.asarray(result)`` is the estimate.

    Attributes
    ----------
    estimate : array (...,)
        Entropy of the continuous part. NaN if at most k samples are outside the atoms (a dead unit).
    std_error : array (...,)
        Standard error of the estimate; with ``level``, NaN if there is no interval.
    n : int array (...,)
        Number of samples in the estimate: all samples outside the atoms.
    atom_value : array (..., atom) or (..., atom, feature)
        Values of more than k equal samples, ascending, NaN past the last; ``atom`` has length 0 if there are none.
    atom_mass : array (..., atom)
        Proportion of the samples at each of these values, 0 past the last. The continuous part has mass
        1 − Σ atom_mass.
    n_tied : int array (...,)
        Number of samples of the continuous part with an exact copy. Each copy shortens the distance to the k-th
        neighbor, which lowers the estimate.
    conf_low, conf_high : array (...,)
        Interval that allows for the bias. NaN without ``level``. NaN, too, where simulations found no interval that
        covers: for tied or clustered samples, and for k above :func:`largest_k`.
    clustered : bool array (...,)
        With ``level``, True if samples form groups that are narrow compared with their distances, and too small for k:
        the estimate is too high.
    """

    estimate: Array
    std_error: Array
    n: Array
    atom_value: Array
    atom_mass: Array
    n_tied: Array
    conf_low: Array
    conf_high: Array
    clustered: Array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.estimate, dtype=dtype, copy=True if copy is None else copy)

    def __float__(self) -> float:
        return float(self.estimate)


def knn_entropy(
    x: Array,
    *,
    k: int = 3,
    axis: int = 0,
    feature_axis: int | None = None,
    ties: Ties = "error",
    resolution: float | None = None,
    seed: int = 0,
    level: float | None = None,
) -> Entropy:
    """Estimate differential entropy by the method of Kozachenko and Leonenko, in nats.

    Ĥ = ψ(n) − ψ(k) + log V_d + (d/n) Σ_i log ε_i. Here ε_i is the Euclidean distance from sample i to its k-th nearest
    neighbor, and V_d the volume of the unit ball [1]_. FedFac §1 estimates the entropy of each hidden unit's outputs
    over clients (Fig. 2): a low entropy means concentrated outputs.

    Parameters
    ----------
    x : array, NumPy or torch
        Samples, in any unit u (the estimate is then relative to log u). All axes but ``axis`` and ``feature_axis`` are
        a batch.
    k : int
        Rank of the neighbor, 1 <= k < n. A larger k reduces the variance and increases the bias.
    axis : int
        Axis of the samples (the clients, for Fig. 2).
    feature_axis : int, optional
        Axis of the coordinates of a sample. None: every number is a sample, d = 1. Distances are computed after a
        linear transformation to uncorrelated coordinates of variance 1, whose log-determinant is added: units of
        coordinates and correlations between them do not matter.
    ties : {"error", "atoms", "jitter"}
        Treatment of more than k equal samples, such as the exact zeros of dead ReLU units. Their distances are 0, and Ĥ
        is −∞.

        - "error" raises ValueError.
        - "atoms" returns the tied values with their masses, and the entropy of the other samples.
        - "jitter" attributes ties to rounding. It adds uniform noise ± resolution/2 to every coordinate of each series
          with at least two equal samples.

        With at most k equal samples every distance is positive; "error" and "atoms" count them in ``n_tied``.
    resolution : float, optional
        Rounding step of the values, in the unit of ``x``; required by "jitter".
    seed : int
        Seed of the jitter.
    level : float, optional
        Confidence level of ``conf_low`` and ``conf_high``. None: they are NaN, and cost no time.

    Returns
    -------
    Entropy
        Arrays of the type of ``x``, float64, with the shape of ``x`` without ``axis`` and ``feature_axis``.

    Raises
    ------
    ValueError
        If

        - a value is not finite,
        - there are at most k samples,
        - more than k samples are equal with ``ties="error"``,
        - a coordinate is a linear function of others (the entropy is −∞), or
        - ``resolution`` is passed without "jitter".

    Notes
    -----
    The standard error is √((Var log f + χ)/n). Var log f is the variance of log ε_i^d minus ψ'(k), the part due to the
    randomness of the neighbors. χ(k, d) does not depend on f; it contains this part and the covariances between
    neighbors (for k = 1, [2]_). The standard error excludes the bias, of order (k/n)^(2/d) for smooth densities [3]_,
    and is too small unless k is small compared with n.

    For normal, uniform, exponential, t3 and bimodal samples, the ratio of the SD of the estimate to its standard error
    is 1.0 to 1.1 with k = 3 and n = 50. With k = 10 it is 1.15 to 1.5 for n = 50, and 1.1 to 1.3 for n = 100. The
    coverage of estimate ± 1.96 std_error is .92 to .97 with k = 3 and n = 100, .94 to .96 with k = 3 and n = 1000, but
    .69 to .86 with k = 10 and n = 50. For normal samples with k = 3 and n = 1000 it is .93, .82, .70 with d = 2, 3, 4.

    The interval is the union of two intervals: one for the estimate, one for the estimate minus its bias [4]_. The
    bias is estimated from the change between neighbor k and neighbor 3k (2k for d > 1), as if it grew like (k/n)^(1/d),
    as it does at borders. The error of this change enters the second interval. Both intervals use a t quantile, the
    larger value of Var log f at neighbors 1 and k, and standard errors multiplied by 1 + 2k/n.

    Simulated coverage of the 95% intervals (``simulations/inference/entropy.py``) is .95 to 1.00 for these five
    densities with n from 20 to 1000 and k = 1, 3, 10. It is also .95 to 1.00 for normal and uniform vectors of two and
    three coordinates with k = 1 and 3. The intervals are wider than ± 1.96 std_error. For k = 3 and d = 1, they are
    1.75 to 1.9 times as wide with n = 20, 1.3 to 1.5 times with n = 100, 1.2 to 1.4 times with n = 1000. For normal and
    uniform vectors with n = 1000 and k = 3, they are 1.9 to 2.6 times as wide with d = 2, 2.3 to 3.8 times with d = 3.

    If the density changes much within the distance to the k-th neighbor, two neighbors do not reveal the bias.
    :func:`largest_k` excludes such k for the densities above. For the unbounded arcsine density the coverage is .93 to
    .97 with d = 1 and n = 100. With n = 100 and 1000 it is .79 to .96 with d = 2, and .37 to .93 with d = 3.

    In samples of narrow groups with fewer than about k members each, the k-th neighbor lies in another group. The
    estimate then rises steeply from neighbor 1 to k or from k to 3k. ``clustered`` is True if it rises by more than
    5/√n nats. With k = 3 and normal groups 10⁴ SDs apart, this detects all samples of 8 groups with n = 20 and of 20
    groups with n = 50. It does not detect groups with a few times k members: for 20 groups with n = 1000 and k = 10 the
    coverage is .3. Nor can 20 samples show 10 or 20 groups that are only 10 to 20 SDs apart: the coverage is .3 to .7.
    Intervals assume that narrow groups have at least :func:`least_group` samples each.

    References
    ----------
    .. [1] Kozachenko, Leonenko (1987). Sample estimate of the entropy of a random vector. Problems Inform. Transm. 23.
    .. [2] Delattre, Fournier (2017). On the Kozachenko–Leonenko entropy estimator. J. Stat. Plan. Inference 185.
    .. [3] Berrett, Samworth, Yuan (2019). Efficient multivariate entropy estimation via k-nearest neighbour
       distances. Annals of Statistics 47.
    .. [4] Calonico, Cattaneo, Titiunik (2014). Robust nonparametric confidence intervals for regression-discontinuity
       designs. Econometrica 82.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(2000, 3))
    >>> result = knn_entropy(x)
    >>> bool(np.all(abs(result.estimate - 0.5 * np.log(2 * np.pi * np.e)) < 2.5 * result.std_error))
    True
    >>> x[:500, 1] = 0.0
    >>> knn_entropy(x, ties="atoms").atom_mass[:, 0]
    array([0.  , 0.25, 0.  ])
    """
    x = check.numbers("x", x)
    xp = array_namespace(x)
    check.choice("ties", ties, TIES)
    if resolution is not None and ties != "jitter":
        raise ValueError(
            f'resolution has no effect with ties={ties!r}, but got {resolution!r}. Remove it, or use ties="jitter".'
        )
    points, batch = _to_points(xp, x, axis, feature_axis)
    k = check.integer("k", k, low=1)
    if points.shape[1] <= k:
        raise ValueError(
            f"k={k} needs at least {k + 1} samples, but got {points.shape[1]} on axis {axis}. "
            "Use a smaller k, or the axis of the samples."
        )
    if level is not None:
        check.real("level", level, low=0, high=1, open_low=True, open_high=True)
    white, log_det = whiten(xp, points)
    distance, copied = distances_and_copies(xp, white, k)
    if ties == "jitter" and (series := _where(xp, copied > 0)):
        points = _add_jitter(xp, points, series, resolution, seed)
        white, log_det = whiten(xp, points)
        distance, copied = distances_and_copies(xp, white, k)
    tied = distance == 0 if bool(xp.any(copied > 0)) else None
    atoms: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    if tied is not None and (series := _where(xp, xp.any(tied, axis=1))):
        if ties == "error":
            raise ValueError(_tied_message(tied, series, k))
        atoms = {i: _atoms(points[i, ...][tied[i, :]], points.shape[1]) for i in series}
        copied = copied - xp.sum(xp.astype(tied, copied.dtype), axis=1)
        distance = xp.where(tied, xp.asarray(math.nan, dtype=xp.float64, device=device_of(points)), distance)
    return _collect(xp, points, white, log_det, distance, copied, tied, atoms, k, level, batch)


def _to_points(xp: Any, x: Array, axis: int, feature_axis: int | None) -> tuple[Array, tuple[int, ...]]:
    """Reshape ``x`` to float64 (series, sample), sorted, or (series, sample, feature); return the batch shape, too."""
    axes = [axis] if feature_axis is None else [axis, feature_axis]
    for name, value in zip(("axis", "feature_axis"), axes, strict=False):
        check.integer(name, value, low=-x.ndim, high=x.ndim - 1)
    if len({a % x.ndim for a in axes}) < len(axes):
        raise ValueError(f"axis and feature_axis must differ, but got {axis} and {feature_axis}")
    if not bool(xp.all(xp.isfinite(x))):
        raise ValueError(
            "x must be finite, but got NaN or infinite values. A diverged client is the usual cause: leave it out."
        )
    x = xp.moveaxis(xp.astype(x, xp.float64), axes, list(range(-len(axes), 0)))
    batch = tuple(x.shape[: x.ndim - len(axes)])
    if len(axes) == 2 and x.shape[-1] == 1:
        x = x[..., 0]
        axes = axes[:1]
    points = xp.reshape(x, (math.prod(batch), *x.shape[x.ndim - len(axes) :]))
    return (xp.sort(points, axis=-1, stable=False) if points.ndim == 2 else points), batch


def _where(xp: Any, flags: Array) -> list[int]:
    return [int(i) for i in xp.nonzero(flags)[0]]


def _estimate(xp: Any, distance: Array, k: int, d: int) -> tuple[Array, Array]:
    """Return the estimate and the variance of log f over samples, from positive distances (series, sample)."""
    n = distance.shape[1]
    log_distance = xp.log(distance)
    mean = xp.mean(log_distance, axis=1)
    if bool(xp.any(mean == math.inf)):
        raise ValueError("distances between samples must be within float64, but got inf. Divide x; its log adds to Ĥ.")
    constant = float(
        scipy.special.digamma(n)
        - scipy.special.digamma(k)
        + d / 2 * math.log(math.pi)
        - scipy.special.gammaln(d / 2 + 1)
    )
    variance = d**2 * xp.sum((log_distance - mean[:, None]) ** 2, axis=1) / (n - 1)
    return d * mean + constant, xp.clip(variance - float(scipy.special.zeta(2, k)), 0.0, None)  # ψ'(k) = ζ(2, k)


def _estimate_with_interval(
    xp: Any, white: Array, log_det: Array, distance: Array, k: int, level: float | None
) -> tuple[Array, Array, Array, Array, Array]:
    """Return estimate, standard error, interval and clustered; the error is NaN where the interval is NaN."""
    d = _dimension(white)
    estimate, variance = _estimate(xp, distance, k, d)
    error = xp.sqrt((variance + neighbour_variance(k, d)) / distance.shape[1])
    low, high, clustered = _limits(xp, white, k, level)
    if level is not None:
        error = xp.where(xp.isnan(low), math.nan, error)
    return estimate + log_det, error, low + log_det, high + log_det, clustered


def _limits(xp: Any, points: Array, k: int, level: float | None) -> tuple[Array, Array, Array]:
    """Return intervals of all series that allow for the bias, NaN if coverage is unknown, and clustered series."""
    n, d = points.shape[1], _dimension(points)
    missing = xp.full((2, points.shape[0]), math.nan, dtype=xp.float64, device=device_of(points))
    k_further = k * (3 if d == 1 else 2)
    if level is None or k > largest_k(n, d):
        return missing[0, ...], missing[1, ...], missing[0, ...] > 0
    ranks = (1, k, k_further)
    positive = (xp.where(x > 0, x, missing[0, :, None]) for x in distances(xp, points, ranks))  # NaN for ties
    (estimate_1, spread_1), (estimate, spread), (estimate_further, _) = (
        _estimate(xp, distance, j, d) for j, distance in zip(ranks, positive, strict=True)
    )
    spread = xp.maximum(spread, spread_1)
    factor = 1 / ((k_further / k) ** (1 / d) - 1)
    bias = factor * (estimate_further - estimate)
    chi = neighbour_variance(k, d)
    chi_of_bias = factor * (factor + 2) * (chi - neighbour_variance(k_further, d))
    reach = float(scipy.special.stdtrit(n - 1, (1 + level) / 2)) * (1 + 2 * k / n) / math.sqrt(n)
    half, half_corrected = reach * xp.sqrt(spread + chi), reach * xp.sqrt(spread + chi + chi_of_bias)
    low = xp.minimum(estimate - half, estimate - bias - half_corrected)
    high = xp.maximum(estimate + half, estimate - bias + half_corrected)
    clustered = xp.maximum(estimate - estimate_1, estimate_further - estimate) > _CLUSTERED / math.sqrt(n)
    return xp.where(clustered, math.nan, low), xp.where(clustered, math.nan, high), clustered


def _dimension(points: Array) -> int:
    return 1 if points.ndim == 2 else int(points.shape[2])


def _add_jitter(xp: Any, points: Array, series: list[int], resolution: float | None, seed: int) -> Array:
    if resolution is None:
        raise ValueError(
            'ties="jitter" needs resolution, the rounding step of the values, but got None. The entropy '
            'of tied values is the log of this step. If ties are not due to rounding, use ties="atoms".'
        )
    step = check.real("resolution", resolution, low=0.0, open_low=True)
    noise = generator(seed, "jitter").uniform(-step / 2, step / 2, (len(series), *points.shape[1:]))
    points = xp.asarray(points, copy=True)
    for row, i in enumerate(series):
        jittered = points[i, ...] + xp.asarray(noise[row], device=device_of(points))
        points[i, ...] = xp.sort(jittered) if points.ndim == 2 else jittered
    if bool(xp.any(distances_and_copies(xp, points, 1)[1] > 0)):
        raise ValueError(f"resolution must exceed the rounding of float64 at these values, but got {resolution!r}")
    return points


def _atoms(tied: Array, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of the tied points and their proportions of n samples."""
    host = np.asarray(tied.cpu() if hasattr(tied, "cpu") else tied)
    value, count = np.unique(host, axis=0, return_counts=True)
    return value, count / n


def _collect(
    xp: Any,
    points: Array,
    white: Array,
    log_det: Array,
    distance: Array,
    copied: Array,
    tied: Array,
    atoms: dict[int, tuple[np.ndarray, np.ndarray]],
    k: int,
    level: float | None,
    batch: tuple[int, ...],
) -> Entropy:
    slots = max((len(mass) for _, mass in atoms.values()), default=0)
    value = np.full((len(points), slots, *points.shape[2:]), math.nan)
    mass = np.zeros((len(points), slots))
    count = np.full(len(points), points.shape[1])
    # Series with atoms are estimated again below, without their tied points.
    estimates = _estimate_with_interval(xp, white, log_det, distance, k, level)
    for i, (values, masses) in atoms.items():
        value[i, : len(values)], mass[i, : len(masses)] = values, masses
        untied = points[i, ...][~tied[i, :]][None, ...]
        count[i] = untied.shape[1]
        if untied.shape[1] > k:
            untied, log_untied = whiten(xp, untied)
            [distance_of_untied] = distances(xp, untied, (k,))
            measured = _estimate_with_interval(xp, untied, log_untied, distance_of_untied, k, level)
            for field, value_of_untied in zip(estimates, measured, strict=True):
                field[i] = value_of_untied[0]

    def finish(a: Array) -> Array:
        array = a if is_numpy_namespace(xp) else xp.asarray(a, device=device_of(points))
        return xp.reshape(array, (*batch, *a.shape[1:]))

    estimate, error, low, high, clustered = map(finish, estimates)
    return Entropy(estimate, error, finish(count), finish(value), finish(mass), finish(copied), low, high, clustered)


def _tied_message(tied: Array, series: list[int], k: int) -> str:
    where = f" in {len(series)} of {tied.shape[0]} series, first in series {series[0]}" if tied.shape[0] > 1 else ""
    return (
        f"x has more than k = {k} equal samples ({int(tied[series[0], :].sum())} tied{where}), so a "
        'distance is 0 and the entropy -inf. Use ties="atoms" to separate these values (dead units), '
        'ties="jitter" if they are due to rounding, or a larger k.'
    )


def largest_k(n: int, d: int) -> int:
    """Return the largest k with an interval for n samples in d dimensions; 0 for d > 3.

    Determined by simulation (``simulations/inference/entropy.py``). The bias is of order (k/n)^(2/d), or (k/n)^(1/d) at
    borders, as long as the k-th neighbor is near. For larger k it follows no power of k.

    Examples
    --------
    >>> [largest_k(n, 1) for n in (12, 18, 100, 1000)]
    [2, 3, 10, 31]
    >>> largest_k(100, 2)
    3
    """
    if d > 3:
        return 0
    return min(n // 6, math.isqrt(n)) if d == 1 else min(n // 4, 3)


def least_group(k: int) -> int:
    """Return the number of samples that narrow groups need so that intervals cover, 10 k².

    In simulations with 10 and 20 normal groups of at least so many samples, coverage is .95 to .97
    (``simulations/inference/entropy.py``).

    Examples
    --------
    >>> [least_group(k) for k in (1, 3, 10)]
    [10, 90, 1000]
    """
    return 10 * k**2


def neighbour_variance(k: int, d: int) -> float:
    """Return χ(k, d): n times the variance of the estimate for a uniform density without borders, for large n.

    Determined by simulation for k up to 10 and d up to 6, with errors of 0.1% for d = 1 and 1.5% for d > 1. For larger
    k it is assumed to fall as 1/k, as it does from k = 3 on; for larger d it is the value at d = 6.

    Examples
    --------
    >>> neighbour_variance(3, 1)
    0.616
    """
    row = _NEIGHBOUR_VARIANCE[min(d, len(_NEIGHBOUR_VARIANCE)) - 1]
    return row[k - 1] if k <= len(row) else row[-1] * len(row) / k
