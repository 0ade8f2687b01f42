"""Statistics of the motivating study: density peaks, errors of entropies, and the relation to communality.

Samples are arrays, or tensors in CPU memory; results are NumPy arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._utils import check
from fedstat._utils.streams import generator
from fedstat.stats import factor
from fedstat.stats.entropy import knn_entropy, neighbour_variance
from fedstat.stats.moments import correlation, exponent, largest, moments, power
from fedstat.stats.resampling import reweighted

if TYPE_CHECKING:
    from sklearn.mixture import GaussianMixture


Array = NDArray[np.float64]
_GRID = 512
_STARTS = 3


class Peaks(NamedTuple):
    """Silverman's test of "at most n peaks".

    Attributes
    ----------
    bandwidth : float
        Smallest bandwidth at which the Gaussian kernel density has at most n peaks, in the unit of the sample. It is at
        least 1/512 of the range.
    position : array (peak,)
        Positions of the peaks of the density with this bandwidth, ascending.
    p_value : float
        p-value of H0: at most n peaks. NaN without a test.
    """

    bandwidth: float
    position: Array
    p_value: float


class Mixture(NamedTuple):
    """Likelihood-ratio test of one normal distribution against a mixture of two.

    Attributes
    ----------
    statistic : float
        Twice the difference of the maximal log-likelihoods.
    p_value : float
        Proportion of samples of equal size from the fitted normal distribution with a statistic at least as large.
    bic : array (2,)
        Bayesian information criterion of one and of two components; smaller is better.
    mean, sd, weight : array (2,)
        Parameters of the two components, in ascending order of the mean.
    """

    statistic: float
    p_value: float
    bic: Array
    mean: Array
    sd: Array
    weight: Array


def peaks(x: Any, n: int, *, draws: int = 0, seed: int = 0) -> Peaks:
    """Find the peaks of a density, and test "at most ``n`` peaks" by Silverman's test [1]_.

    Parameters
    ----------
    x : array (sample,)
        Sample of finite values that are not all equal.
    n : int
        Number of peaks.
    draws : int
        Number of smoothed bootstrap samples for the p-value; 0: no test. See Notes for the level of the test.
    seed : int

    Returns
    -------
    Peaks

    Raises
    ------
    ValueError
        If there are fewer than 4 values, one is not finite, or all are equal.

    Notes
    -----
    At level 0.05, the test rejects one peak in 1% to 4% of normal samples of 20 and 100 values. Outliers in a long tail
    count as peaks: the test rejects one peak in 17% and 37% of samples from Student's t with 3 degrees of freedom, and
    in 11% and 18% of exponential samples.

    References
    ----------
    .. [1] Silverman (1981). Using kernel density estimates to investigate multimodality. J. R. Stat. Soc. B 43.

    Examples
    --------
    >>> x = np.concatenate([np.random.default_rng(0).normal(m, 1, 100) for m in (0, 6)])
    >>> [peaks(x, n, draws=99).p_value < 0.05 for n in (1, 2)]
    [True, False]
    >>> peaks(x, 2).position.round(0)
    array([0., 6.])
    """
    x, unit = _scale_sample(x)
    n, draws = check.integer("n", n), check.integer("draws", draws, low=0)
    high = float(np.ptp(x))  # with a bandwidth of half the range the density has one peak
    low = high / _GRID
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_find_peaks(x, middle)) <= n else (middle, high)
    rng, n_larger = generator(seed, "modes", "silverman"), 0
    shrink = 1 / np.sqrt(1 + high**2 / x.var())
    for _ in range(draws):
        smoothed = rng.choice(x, len(x)) + high * rng.normal(size=len(x))
        n_larger += len(_find_peaks(x.mean() + (smoothed - x.mean()) * shrink, high)) > n
    return Peaks(high * unit, _find_peaks(x, high) * unit, (1 + n_larger) / (1 + draws) if draws else float("nan"))


def mixture(x: Any, *, draws: int = 199, seed: int = 0) -> Mixture:
    """Test one normal distribution against a mixture of two by the parametric bootstrap [1]_.

    For the sample and the draws, EM stops if the mean log-likelihood increases by less than 0.001. Rejection means that
    the sample is not normal: skewed samples with one peak are rejected, too. :func:`peaks` tests the number of peaks.

    Parameters
    ----------
    x : array (sample,)
        Sample of finite values that are not all equal.
    draws : int
        Number of bootstrap samples.
    seed : int

    Returns
    -------
    Mixture

    Raises
    ------
    ValueError
        If there are fewer than 4 values, one is not finite, or all are equal.

    References
    ----------
    .. [1] McLachlan (1987). On bootstrapping the likelihood ratio test statistic for the number of components in a
       normal mixture. Applied Statistics 36.

    Examples
    --------
    >>> x = np.concatenate([np.random.default_rng(0).normal(m, 1, 100) for m in (0, 6)])
    >>> result = mixture(x, draws=19)
    >>> result.p_value, result.mean.round(0), bool(result.bic[1] < result.bic[0])
    (0.05, array([0., 6.]), True)
    """
    x, unit = _scale_sample(x)
    draws = check.integer("draws", draws)
    z = (x - x.mean()) / x.std()  # EM's lower limit of variances depends on the scale, the ratio does not
    normal, two, ratio = _fit_mixtures(z)
    rng = generator(seed, "modes", "mixture")
    n_larger = sum(_fit_mixtures(rng.normal(size=len(z)))[2] >= ratio for _ in range(draws))
    order = np.argsort(two.means_[:, 0])
    return Mixture(
        statistic=ratio,
        p_value=(1 + n_larger) / (1 + draws),
        bic=np.array([normal.bic(z[:, None]), two.bic(z[:, None])]) + 2 * len(x) * (np.log(x.std()) + np.log(unit)),
        mean=unit * (x.mean() + x.std() * two.means_[order, 0]),
        sd=unit * x.std() * np.sqrt(two.covariances_[order, 0, 0]),
        weight=two.weights_[order],
    )


def _scale_sample(x: Any) -> tuple[Array, float]:
    """Divide a sample by a power of two so that squares fit float64; return it and the power (usually 1)."""
    x = np.asarray(check.numbers("x", x), dtype=np.float64)
    if x.ndim != 1 or len(x) < 4 or not np.isfinite(x).all() or x.min() == x.max():
        problem = f"shape {x.shape}" if x.ndim != 1 or len(x) < 4 else "NaN, infinite or all equal values"
        raise ValueError(f"x must be at least 4 finite numbers that are not all equal, but got {problem}")
    e = exponent(largest(x, 0))
    return x * power(-e), float(power(e))


def _find_peaks(x: Array, bandwidth: float) -> Array:
    """Find the peaks of the Gaussian kernel density on a grid; all lie within the range of the sample."""
    margin = np.ptp(x) / _GRID
    grid = np.linspace(x.min() - margin, x.max() + margin, _GRID)
    rise = np.diff(np.exp(-0.5 * ((grid[:, None] - x) / bandwidth) ** 2).sum(axis=1))
    return grid[1:-1][(rise[:-1] > 0) & (rise[1:] <= 0)]


def _fit_mixtures(z: Array) -> tuple[GaussianMixture, GaussianMixture, float]:
    """Fit one normal and a mixture of two; return both, and twice the difference in log-likelihood, at least 0."""
    from sklearn.mixture import GaussianMixture

    column = ((z - z.mean()) / z.std())[:, None]
    normal = GaussianMixture(1, random_state=0).fit(column)
    two = GaussianMixture(2, n_init=_STARTS, random_state=0).fit(column)
    return normal, two, max(0.0, float(2 * len(z) * (two.score(column) - normal.score(column))))


ON = ("weights", "updates")

ESTIMATORS: tuple[factor.Method, ...] = ("pa", "pc", "leverage")
"""Estimators of communality, which entropy is compared with."""

STEPS = 50
"""Maximum number of principal-axis steps, for all clients and for half-samples."""


def dispersion(outputs: Array, *, k: int = 3) -> dict[str, NDArray]:
    """Measure the dispersion of unit outputs over clients.

    Parameters
    ----------
    outputs : array (client, unit)
        Output of each unit in each client.
    k : int
        Number of the nearest neighbor in the entropy estimate.

    Returns
    -------
    dict of arrays (unit,)
        - entropy, std_error (nats) of the outputs without atoms. Atoms are values that more than k clients have, such
          as the zeros of dead units.
        - n, number of clients without atoms.
        - atom_share, proportion of clients in atoms.
        - zero_share, proportion of clients with output 0.
        - spread, standard deviation.
    """
    fit = knn_entropy(outputs, k=k, ties="atoms")
    return {
        "entropy": fit.estimate,
        "std_error": fit.std_error,
        "n": fit.n,
        "atom_share": fit.atom_mass.sum(axis=-1),
        "zero_share": (outputs == 0).mean(axis=0),
        "spread": outputs.std(axis=0, ddof=1),
    }


def halves(strata: NDArray[np.int64], replicates: int, *, seed: int = 0) -> NDArray[np.bool_]:
    """Draw random halves of the clients within strata, without replacement.

    A bootstrap repeats clients. Repeated clients have distance 0, for which kNN entropy is undefined. Halves drawn
    without replacement have the variance of the bootstrap of the full sample: the factor m / (n − m) of the delete-d
    jackknife is 1 [1]_.

    Parameters
    ----------
    strata : int array (client,)
        Stratum of each client. From a stratum of odd size n, (n − 1)/2 or (n + 1)/2 clients are drawn at random.
    replicates : int
    seed : int

    Returns
    -------
    bool array (replicate, client)

    References
    ----------
    .. [1] Shao, Wu (1989). A general theory for jackknife variance estimation. Annals of Statistics 17.

    Examples
    --------
    >>> halves(np.array([0, 0, 0, 0, 1, 1]), 3).sum(axis=1)
    array([3, 3, 3])
    """
    check.integer("replicates", replicates)
    rng = generator(seed, "motivation", "halves")
    is_drawn = np.zeros((replicates, len(strata)), dtype=bool)
    for row in is_drawn:
        for stratum in np.unique(strata):
            clients = rng.permutation(np.flatnonzero(strata == stratum))
            row[clients[: (len(clients) + rng.integers(2)) // 2]] = True
    return is_drawn


def strata_of(case: str, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the strata (client,) of a partition: classes for ``"one-class"``, else a single stratum.

    Examples
    --------
    >>> strata_of("one-class", np.array([0, 0, 1, 1])), strata_of("iid", np.array([0, 0, 1, 1]))
    (array([0, 0, 1, 1]), array([0, 0, 0, 0]))
    """
    return label if case == "one-class" else np.zeros_like(label)


def relation(
    outputs: Array, weights: NDArray, half: NDArray[np.bool_], *, k: int = 3, kappa: float = 0.75
) -> dict[str, NDArray]:
    """Compute the rank correlation over units between entropy over clients and communality.

    Parameters
    ----------
    outputs : array (outputs, client, unit)
    weights : array (on, client, unit, weight)
    half : bool array (replicate, client)
        Halves of the clients for which entropy and communality are recomputed.
    k, kappa
        Number of the nearest neighbor in the entropy estimate; proportion of the eigenvalue sum that sets the number
        of factors.

    Returns
    -------
    dict of arrays
        ``split/communality`` (on, method, unit), ``…/n_factors`` and ``…/converged`` (on, method);
        ``relation/spearman`` (outputs, on, method), ``relation/spearman_half`` (outputs, on, method, replicate).
        Units without entropy (dead in all but k clients) or without communality are excluded.

    Notes
    -----
    Communalities of halves are computed like the communalities of all clients: they start from principal components
    and take as many steps. If ``"pa"`` stops before its fixed point, initial values and number of steps are part of the
    estimator. Halves that started from the communalities of all clients would vary too little. ``"minres"``, or fewer
    factors, is well posed.
    """
    entropy = np.stack([knn_entropy(o, k=k, ties="atoms").estimate for o in outputs])
    entropy_half = np.stack([[knn_entropy(o[h], k=k, ties="atoms").estimate for h in half] for o in outputs])
    names = ("communality", "n_factors", "converged")
    fits: list[list[factor.Fit]] = []
    nu_half = np.empty((len(weights), len(ESTIMATORS), len(half), weights.shape[2]))
    for i, w in enumerate(weights):
        by_client = moments(w.swapaxes(1, 2))
        r = correlation(reweighted(by_client, np.ones((1, len(w)))))[0]
        r_half = correlation(reweighted(by_client, half.astype(float)))
        fits.append([factor.fit(r, kappa=kappa, method=m, max_iter=STEPS) for m in ESTIMATORS])
        for j, method in enumerate(ESTIMATORS):
            nu_half[i, j] = factor.fit(r_half, kappa=kappa, method=method, max_iter=STEPS, loadings=False).communality
    variables = {f"split/{n}": np.array([[getattr(f, n) for f in row] for row in fits]) for n in names}
    nu = variables["split/communality"]
    variables["relation/spearman"] = spearman(entropy[:, None, None], nu[None])
    variables["relation/spearman_half"] = spearman(entropy_half[:, None, None], nu_half[None])
    return variables


def interval(rho: Array, halves: Array) -> tuple[Array, Array]:
    """Compute 95% CIs of rank correlations over clients: Fisher's z ± 1.96 standard deviations over half-samples.

    Parameters
    ----------
    rho : array (...,)
    halves : array (..., replicate)
        Rank correlations of half-samples, see :func:`halves`.

    Returns
    -------
    low, high : array (...,)

    Notes
    -----
    ``simulations/inference`` simulates 24 units. If the correlation is not 0, the coverage is 0.88 to 0.93 with 30
    clients and 0.94 to 0.97 with 100 clients. If it is 0, the coverage is 0.92 to 0.97.

    Examples
    --------
    >>> low, high = interval(np.array(0.5), np.array([0.4, 0.5, 0.6]))
    >>> low.round(2), high.round(2)
    (np.float64(0.28), np.float64(0.67))
    """
    z, z_half = (np.arctanh(np.clip(x, -1 + 1e-12, 1 - 1e-12)) for x in (rho, halves))
    half = 1.96 * z_half.std(axis=-1, ddof=1)
    return np.tanh(z - half), np.tanh(z + half)


def spearman(x: Array, y: Array) -> Array:
    """Compute the rank correlation along the last axis, over pairs without NaN.

    Parameters
    ----------
    x, y : array (..., unit)
        Shapes broadcast.

    Returns
    -------
    array (...,)
        NaN if there are fewer than 3 pairs, or x or y is constant.

    Examples
    --------
    >>> spearman(np.array([1.0, 2, 3, np.nan]), np.array([[1.0, 4, 9, 0], [3, 2, 1, 0]]))
    array([ 1., -1.])
    """
    x, y = np.broadcast_arrays(x, y)
    out = np.full(x.shape[:-1], np.nan)
    for index in np.ndindex(out.shape):
        is_finite = np.isfinite(x[index]) & np.isfinite(y[index])
        a, b = x[index][is_finite], y[index][is_finite]
        if len(a) >= 3 and np.ptp(a) > 0 and np.ptp(b) > 0:
            out[index] = np.corrcoef(scipy.stats.rankdata(a), scipy.stats.rankdata(b))[0, 1]
    return out


Strata = NDArray[np.int64]


def entropy_errors(outputs: Array, strata: Strata, *, k: int = 3, draws: int = 100, seed: int = 0) -> Array:
    """Draw errors of nearest-neighbor entropies from their normal distribution over clients.

    The entropy of a unit is a mean over clients of log ε_i, with ε_i the distance to the k-th neighbor. Each draw
    multiplies the deviations of clients by normal numbers, equal for all units (multiplier bootstrap [1]_). Units that
    vary together therefore have correlated errors. Independent errors of single units add up to the theoretical
    variance (:func:`fedstat.stats.entropy.knn_entropy`). The jackknife [2]_ determines the variance of the mean over
    units. It is valid for covariances between units, but doubles the variance of one unit, whose neighbors change with
    the sample.

    Parameters
    ----------
    outputs : array (client, unit)
        Outputs of units with a defined entropy: more than k clients are outside the atoms.
    strata : int array (client,)
        Stratum of each client; the sizes of strata are treated as fixed. If a stratum has one client, a variance
        within strata cannot be estimated, and all clients form one stratum.
    k : int
        Number of the nearest neighbor in the entropy estimate.
    draws, seed : int

    Returns
    -------
    array (draw, unit)
        Errors in nats.

    Notes
    -----
    The variance of one unit is multiplied by 1 + 2 k / n, because distances in the tails of a sample vary too little.
    In ``simulations/inference/motivation.py``, intervals of ± 1.96 standard errors had coverage 0.91 to 0.98 for the
    median and 0.90 to 1.00 for peaks. The lowest coverage occurred with one class per client.

    References
    ----------
    .. [1] van der Vaart, Wellner (1996). Weak convergence and empirical processes, section 2.9.
    .. [2] Miller (1974). The jackknife: a review. Biometrika 61, 1-15.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(100, 50))
    >>> entropy_errors(x, np.zeros(100, int), draws=400).std(axis=0).mean().round(1)
    np.float64(0.1)
    """
    clients, units = outputs.shape
    deviation, jackknife = np.zeros((2, clients, units))
    n = np.empty(units)
    for u, x in enumerate(outputs.T):
        live = ~_is_atom(x, k)
        logs, influence = _log_distances(x[live], k)
        n[u] = len(logs)
        deviation[live, u], jackknife[live, u] = logs - logs.mean(), influence - influence.mean()
    deviation, jackknife = _center_strata(deviation / n, strata), _center_strata(jackknife / n, strata)
    squares = (deviation**2).sum(axis=0)
    # ψ'(k) = ζ(2, k) is the variance due to neighbors
    density_variance = np.maximum(squares - scipy.special.zeta(2, k) / n, 0)
    variance = (density_variance + neighbour_variance(k, 1) / n) * (1 + 2 * k / n)
    independent = np.maximum(variance - squares, 0)
    covariances = (jackknife.sum(axis=1) ** 2).sum() - (jackknife**2).sum()
    mean_variance = (variance.sum() + max(covariances, 0.0)) / units**2
    drawn_variance = (deviation.mean(axis=1) ** 2).sum() + independent.sum() / units**2
    rng = generator(seed, "motivation", "errors of entropies")
    error = rng.normal(size=(draws, clients)) @ deviation + np.sqrt(independent) * rng.normal(size=(draws, units))
    return np.asarray(error + (np.sqrt(mean_variance / drawn_variance) - 1) * error.mean(axis=1, keepdims=True))


def with_errors(entropy: Array, errors: Array) -> Array:
    """Add errors to entropies, and shrink the entropies so that their variance over units stays equal: (draw, unit).

    Errors make estimates of entropies vary more over units than the true entropies. The estimates are therefore shrunk
    towards their mean, so that estimates plus errors have the variance of the estimates.

    Examples
    --------
    >>> errors = np.array([[0.5, -0.5, 0.5, -0.5], [-0.5, 0.5, 0.5, -0.5]])
    >>> with_errors(np.array([1.0, 2.0, 3.0, 4.0]), errors).mean()
    np.float64(2.5)
    """
    ratio = errors.var(axis=1).mean() / entropy.var()
    center = entropy.mean()
    return np.asarray(center + np.sqrt(max(0.0, 1 - ratio)) * (entropy - center) + errors)


def _is_atom(x: Array, k: int) -> NDArray[np.bool_]:
    """Return True where more than k clients have an equal value."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return np.asarray(count[inverse] > k)


def _log_distances(x: Array, k: int) -> tuple[Array, Array]:
    """Compute log distances to the k-th neighbors, and the jackknife influence of each client on their sum.

    The influence is defined up to a constant. If a client is removed, clients that have it among their k neighbors get
    the next neighbor as their k-th.
    """
    order = np.argsort(x)
    s = x[order]
    distance = np.full((2, k + 1, len(s)), np.inf)  # to the m-th value on the right and on the left
    for m in range(1, min(k + 1, len(s) - 1) + 1):
        distance[0, m - 1, :-m] = distance[1, m - 1, m:] = s[m:] - s[:-m]
    nearest = np.sort(distance.reshape(-1, len(s)), axis=0)
    logs = np.log(nearest[k - 1])
    increase = np.where(np.isfinite(nearest[k]), np.log(nearest[k]) - logs, 0)  # k + 1 clients have no next neighbor
    influence = logs.copy()
    for m in range(1, min(k, len(s) - 1) + 1):
        influence[m:] -= np.where(distance[0, m - 1, :-m] <= nearest[k - 1, :-m], increase[:-m], 0)
        influence[:-m] -= np.where(distance[1, m - 1, m:] <= nearest[k - 1, m:], increase[m:], 0)
    inverse = np.argsort(order)
    return logs[inverse], influence[inverse]


def _center_strata(x: Array, strata: Strata) -> Array:
    """Subtract stratum means from x (client, unit), scaled so that squares are unbiased for small strata."""
    _, stratum, size = np.unique(strata, return_inverse=True, return_counts=True)
    if size.min() == 1:
        stratum, size = np.zeros(len(x), int), np.array([len(x)])
    member = (stratum == np.arange(len(size))[:, None]).astype(float)
    mean = member @ x / size[:, None]
    return np.asarray((x - mean[stratum]) * np.sqrt(size / (size - 1))[stratum, None])
