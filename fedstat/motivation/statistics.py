"""Statistics of the motivating study: peaks of densities, entropies' errors, and their relation to communality.

The sample may be an array or a tensor on the host; NumPy arrays come out.
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
        Smallest bandwidth at which the Gaussian kernel density has that many peaks, in the unit of the
        sample; not below 1/512 of its range.
    position : array (peak,)
        Where the density with this bandwidth has its peaks, ascending.
    p_value : float
        Small values speak for more peaks. NaN where no test was asked for.
    """

    bandwidth: float
    position: Array
    p_value: float


class Mixture(NamedTuple):
    """One normal distribution against a mixture of two.

    Attributes
    ----------
    statistic : float
        Twice the difference of the maximal log-likelihoods.
    p_value : float
        Share of samples from the fitted normal, of the same size, with a statistic at least as large.
    bic : array (2,)
        Bayesian information criterion of one and of two components; the smaller is better.
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
    """Peaks of a sample's density, and Silverman's test of "at most ``n``" [1]_.

    Parameters
    ----------
    x : array (sample,)
        Finite, not all equal.
    n : int
        Number of peaks.
    draws : int
        Samples of the smoothed bootstrap from which the p-value comes; 0: no test. At level 0.05 one peak is rejected
        in 0.01 to 0.04 of normal samples of 20 and 100 values. Values far out in a long tail count as peaks: it is
        rejected in 0.17 and 0.37 of samples of Student's t with 3 degrees of freedom, in 0.11 and 0.18 of exponential
        ones.
    seed : int

    Returns
    -------
    Peaks

    Raises
    ------
    ValueError
        If there are fewer than 4 values, one is not finite, or all are equal.

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
    x, unit = _sample(x)
    n, draws = check.integer("n", n), check.integer("draws", draws, low=0)
    high = float(np.ptp(x))  # with a bandwidth of half the range the density has one peak
    low = high / _GRID
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if len(_peaks(x, middle)) <= n else (middle, high)
    rng, more = generator(seed, "modes", "silverman"), 0
    shrink = 1 / np.sqrt(1 + high**2 / x.var())
    for _ in range(draws):
        drawn = rng.choice(x, len(x)) + high * rng.normal(size=len(x))
        more += len(_peaks(x.mean() + (drawn - x.mean()) * shrink, high)) > n
    return Peaks(high * unit, _peaks(x, high) * unit, (1 + more) / (1 + draws) if draws else float("nan"))


def mixture(x: Any, *, draws: int = 199, seed: int = 0) -> Mixture:
    """Likelihood-ratio test of one normal distribution against a mixture of two, by parametric bootstrap [1]_.

    EM stops, for the sample as for the draws, where the mean log-likelihood gains less than 0.001.
    Rejection says that the sample is not normal; a skewed sample with one peak is rejected too. ``peaks`` asks for
    the peaks themselves.

    Parameters
    ----------
    x : array (sample,)
        Finite, not all equal.
    draws : int
        Samples of the bootstrap.
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
    >>> found = mixture(x, draws=19)
    >>> found.p_value, found.mean.round(0), bool(found.bic[1] < found.bic[0])
    (0.05, array([0., 6.]), True)
    """
    x, unit = _sample(x)
    draws = check.integer("draws", draws)
    z = (x - x.mean()) / x.std()  # the ratio is free of location and scale, EM's floor of variances is not
    one, two, ratio = _fits(z)
    rng = generator(seed, "modes", "mixture")
    larger = sum(_fits(rng.normal(size=len(z)))[2] >= ratio for _ in range(draws))
    order = np.argsort(two.means_[:, 0])
    return Mixture(
        statistic=ratio,
        p_value=(1 + larger) / (1 + draws),
        bic=np.array([one.bic(z[:, None]), two.bic(z[:, None])]) + 2 * len(x) * (np.log(x.std()) + np.log(unit)),
        mean=unit * (x.mean() + x.std() * two.means_[order, 0]),
        sd=unit * x.std() * np.sqrt(two.covariances_[order, 0, 0]),
        weight=two.weights_[order],
    )


def _sample(x: Any) -> tuple[Array, float]:
    """Sample divided by a power of two that keeps squares within float64, and that power: 1 for ordinary sizes."""
    x = np.asarray(check.numbers("x", x), dtype=np.float64)
    if x.ndim != 1 or len(x) < 4 or not np.isfinite(x).all() or x.min() == x.max():
        what = f"shape {x.shape}" if x.ndim != 1 or len(x) < 4 else "NaN, infinite or all equal values"
        raise ValueError(f"x must be at least 4 finite numbers that are not all equal, but got {what}")
    e = exponent(largest(x, 0))
    return x * power(-e), float(power(e))


def _peaks(x: Array, bandwidth: float) -> Array:
    """Peaks of the Gaussian kernel density, found on a grid; all lie within the range of the sample."""
    margin = np.ptp(x) / _GRID
    grid = np.linspace(x.min() - margin, x.max() + margin, _GRID)
    rise = np.diff(np.exp(-0.5 * ((grid[:, None] - x) / bandwidth) ** 2).sum(axis=1))
    return grid[1:-1][(rise[:-1] > 0) & (rise[1:] <= 0)]


def _fits(z: Array) -> tuple[GaussianMixture, GaussianMixture, float]:
    """One normal, a mixture of two, and twice their difference in log-likelihood: 0 where EM ends below the one."""
    from sklearn.mixture import GaussianMixture

    column = ((z - z.mean()) / z.std())[:, None]
    one = GaussianMixture(1, random_state=0).fit(column)
    two = GaussianMixture(2, n_init=_STARTS, random_state=0).fit(column)
    return one, two, max(0.0, float(2 * len(z) * (two.score(column) - one.score(column))))


ON = ("weights", "updates")

ESTIMATORS: tuple[factor.Method, ...] = ("pa", "pc", "leverage")
"""Estimators of the communality that entropy is compared with."""

STEPS = 50
"""Largest number of principal-axis steps, of all clients as of half-samples."""


def dispersion(outputs: Array, *, k: int = 3) -> dict[str, NDArray]:
    """How dispersed every neuron's outputs are over the clients.

    Parameters
    ----------
    outputs : array (client, unit)
        A neuron's output for every client.
    k : int
        Neighbour of the entropy estimate.

    Returns
    -------
    dict of arrays (unit,)
        entropy, std_error (nats) of the outputs without atoms; n, the clients they rest on; atom_share, the share of
        the clients in atoms (values that more than k share, as dead neurons' zeros); zero_share; spread, the standard
        deviation.
    """
    found = knn_entropy(outputs, k=k, ties="atoms")
    return {
        "entropy": found.estimate,
        "std_error": found.std_error,
        "n": found.n,
        "atom_share": found.atom_mass.sum(axis=-1),
        "zero_share": (outputs == 0).mean(axis=0),
        "spread": outputs.std(axis=0, ddof=1),
    }


def halves(strata: NDArray[np.int64], replicates: int, *, seed: int = 0) -> NDArray[np.bool_]:
    """Random halves of the clients, drawn within strata without replacement.

    A bootstrap repeats clients, and repeated clients have distance 0, for which kNN entropy is undefined. Halves
    without repetition have the same variance as the bootstrap of the full sample: the factor m / (n − m) of the
    delete-d jackknife is 1 [1]_.

    Parameters
    ----------
    strata : int array (client,)
        Clients with one value are a stratum; from those of odd size the odd client is drawn or not by chance.
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
    chosen = np.zeros((replicates, len(strata)), dtype=bool)
    for row in chosen:
        for stratum in np.unique(strata):
            here = rng.permutation(np.flatnonzero(strata == stratum))
            row[here[: (len(here) + rng.integers(2)) // 2]] = True
    return chosen


def strata_of(case: str, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Strata (client,) of a partition: classes, where clients of one class have been dealt to each; else none.

    Examples
    --------
    >>> strata_of("one-class", np.array([0, 0, 1, 1])), strata_of("iid", np.array([0, 0, 1, 1]))
    (array([0, 0, 1, 1]), array([0, 0, 0, 0]))
    """
    return label if case == "one-class" else np.zeros_like(label)


def relation(
    outputs: Array, weights: NDArray, half: NDArray[np.bool_], *, k: int = 3, kappa: float = 0.75
) -> dict[str, NDArray]:
    """Rank correlation over neurons between entropy over clients and communality.

    Parameters
    ----------
    outputs : array (outputs, client, unit)
    weights : array (on, client, unit, weight)
    half : bool array (replicate, client)
        Halves of the clients from which both sides are computed anew.
    k, kappa
        Neighbour of the entropy; share of the eigenvalues' sum that decides the number of factors.

    Returns
    -------
    dict of arrays
        ``split/communality`` (on, estimator, unit), ``…/n_factors`` and ``…/converged`` (on, estimator);
        ``relation/spearman`` (outputs, on, estimator), ``relation/spearman_half`` (outputs, on, estimator, replicate).
        Neurons without entropy (dead for all but k clients) or communality take no part.

    Notes
    -----
    Communalities of halves are computed as those of all clients, from principal components and with as many steps.
    Where ``"pa"`` stops before its fixed point, start and steps are a part of the estimator: halves that start from the
    communalities of all clients vary too little. ``"minres"``, or fewer factors, is well posed.
    """
    entropy = np.stack([knn_entropy(o, k=k, ties="atoms").estimate for o in outputs])
    entropy_half = np.stack([[knn_entropy(o[h], k=k, ties="atoms").estimate for h in half] for o in outputs])
    names = ("communality", "n_factors", "converged")
    fits: list[list[factor.Fit]] = []
    nu_half = np.empty((len(weights), len(ESTIMATORS), len(half), weights.shape[2]))
    for i, w in enumerate(weights):
        each = moments(w.swapaxes(1, 2))
        whole = correlation(reweighted(each, np.ones((1, len(w)))))[0]
        parts = correlation(reweighted(each, half.astype(float)))
        fits.append([factor.fit(whole, kappa=kappa, method=m, max_iter=STEPS) for m in ESTIMATORS])
        for j, method in enumerate(ESTIMATORS):
            nu_half[i, j] = factor.fit(parts, kappa=kappa, method=method, max_iter=STEPS, loadings=False).communality
    found = {f"split/{n}": np.array([[getattr(f, n) for f in row] for row in fits]) for n in names}
    nu = found["split/communality"]
    found["relation/spearman"] = spearman(entropy[:, None, None], nu[None])
    found["relation/spearman_half"] = spearman(entropy_half[:, None, None], nu_half[None])
    return found


def interval(rho: Array, halves: Array) -> tuple[Array, Array]:
    """95 % interval over clients of rank correlations: ± 1.96 standard deviations of Fisher's z over half-samples.

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
    In simulations with 24 neurons, intervals of a correlation that is not 0 cover .88 to .93 with 30 clients and .94 to
    .97 with 100; those of a correlation of 0 cover .92 to .97 (``simulations/inference``).

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
    """Rank correlation along the last axis, over the pairs without NaN.

    Parameters
    ----------
    x, y : array (..., unit)
        Shapes broadcast.

    Returns
    -------
    array (...,)
        NaN where fewer than 3 pairs are left, or one side is constant.

    Examples
    --------
    >>> spearman(np.array([1.0, 2, 3, np.nan]), np.array([[1.0, 4, 9, 0], [3, 2, 1, 0]]))
    array([ 1., -1.])
    """
    x, y = np.broadcast_arrays(x, y)
    out = np.full(x.shape[:-1], np.nan)
    for at in np.ndindex(out.shape):
        whole = np.isfinite(x[at]) & np.isfinite(y[at])
        if whole.sum() >= 3 and np.ptp(x[at][whole]) > 0 and np.ptp(y[at][whole]) > 0:
            out[at] = np.corrcoef(scipy.stats.rankdata(x[at][whole]), scipy.stats.rankdata(y[at][whole]))[0, 1]
    return out


Strata = NDArray[np.int64]


def entropy_errors(outputs: Array, strata: Strata, *, k: int = 3, draws: int = 100, seed: int = 0) -> Array:
    """Draw errors of nearest-neighbour entropies from the normal distribution that they have over clients.

    The entropy of a neuron is a mean over clients of log ε_i, with ε_i the distance to the k-th neighbour. Each draw
    multiplies clients' deviations by normal numbers, the same for all neurons (multiplier bootstrap [1]_), so that
    neurons that vary together err together. Independent errors of single neurons make up the variance that theory gives
    (:func:`fedstat.stats.entropy.knn_entropy`). The jackknife [2]_ decides the variance of the mean over neurons: it is
    right for covariances of different neurons, while it doubles the variance of one, whose neighbours change with the
    sample.

    Parameters
    ----------
    outputs : array (client, unit)
        Outputs of neurons whose entropy is defined: more than k clients are left beside the atoms.
    strata : int array (client,)
        Clients with one value are a stratum, and strata have given sizes. Strata of one client leave nothing to
        estimate a variance from: all clients are then one stratum.
    k : int
        Neighbour of the entropy estimate.
    draws, seed : int

    Returns
    -------
    array (draw, unit)
        Errors in nats.

    Notes
    -----
    The variance of one neuron is raised by 1 + 2 k / n, since distances in the tails of a sample of n are too alike.
    In ``simulations/inference/motivation.py`` the median ± 1.96 standard errors held the truth in 0.91 to 0.98, peaks
    in 0.90 to 1.00; the low ends are of clients of one class each.

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
        live = ~_in_atoms(x, k)
        logs, influence = _log_distances(x[live], k)
        n[u] = len(logs)
        deviation[live, u], jackknife[live, u] = logs - logs.mean(), influence - influence.mean()
    deviation, jackknife = _within(deviation / n, strata), _within(jackknife / n, strata)
    squares = (deviation**2).sum(axis=0)
    of_density = np.maximum(squares - scipy.special.zeta(2, k) / n, 0)  # ψ'(k) = ζ(2, k) is due to neighbours
    variance = (of_density + neighbour_variance(k, 1) / n) * (1 + 2 * k / n)
    own = np.maximum(variance - squares, 0)
    covariances = (jackknife.sum(axis=1) ** 2).sum() - (jackknife**2).sum()
    of_mean = (variance.sum() + max(covariances, 0.0)) / units**2
    drawn_of_mean = (deviation.mean(axis=1) ** 2).sum() + own.sum() / units**2
    rng = generator(seed, "motivation", "errors of entropies")
    error = rng.normal(size=(draws, clients)) @ deviation + np.sqrt(own) * rng.normal(size=(draws, units))
    return np.asarray(error + (np.sqrt(of_mean / drawn_of_mean) - 1) * error.mean(axis=1, keepdims=True))


def with_errors(entropy: Array, errors: Array) -> Array:
    """Entropies (draw, unit) as other clients might give them: errors added, and as widely spread as those at hand.

    Estimates of neurons spread more than their true entropies, by their errors. They are drawn together so far that
    with errors added the variance over neurons is again that of the estimates.

    Examples
    --------
    >>> errors = np.array([[0.5, -0.5, 0.5, -0.5], [-0.5, 0.5, 0.5, -0.5]])
    >>> with_errors(np.array([1.0, 2.0, 3.0, 4.0]), errors).mean()
    np.float64(2.5)
    """
    share = errors.var(axis=1).mean() / entropy.var()
    centre = entropy.mean()
    return np.asarray(centre + np.sqrt(max(0.0, 1 - share)) * (entropy - centre) + errors)


def _in_atoms(x: Array, k: int) -> NDArray[np.bool_]:
    """Which values more than k clients share."""
    _, inverse, count = np.unique(x, return_inverse=True, return_counts=True)
    return np.asarray(count[inverse] > k)


def _log_distances(x: Array, k: int) -> tuple[Array, Array]:
    """Log distances to the k-th neighbours, and each client's jackknife influence on their sum, up to a constant.

    Without a client, those of whose k neighbours it is one have the next neighbour as their k-th.
    """
    order = np.argsort(x)
    s = x[order]
    away = np.full((2, k + 1, len(s)), np.inf)  # distance to the m-th on the right, on the left
    for m in range(1, min(k + 1, len(s) - 1) + 1):
        away[0, m - 1, :-m] = away[1, m - 1, m:] = s[m:] - s[:-m]
    nearest = np.sort(away.reshape(-1, len(s)), axis=0)
    logs = np.log(nearest[k - 1])
    further = np.where(np.isfinite(nearest[k]), np.log(nearest[k]) - logs, 0)  # k + 1 clients have no next neighbour
    influence = logs.copy()
    for m in range(1, min(k, len(s) - 1) + 1):
        influence[m:] -= np.where(away[0, m - 1, :-m] <= nearest[k - 1, :-m], further[:-m], 0)
        influence[:-m] -= np.where(away[1, m - 1, m:] <= nearest[k - 1, m:], further[m:], 0)
    back = np.argsort(order)
    return logs[back], influence[back]


def _within(x: Array, strata: Strata) -> Array:
    """Deviations of x (client, unit) from their strata's means, with squares that are unbiased for small strata."""
    _, stratum, size = np.unique(strata, return_inverse=True, return_counts=True)
    if size.min() == 1:
        stratum, size = np.zeros(len(x), int), np.array([len(x)])
    member = (stratum == np.arange(len(size))[:, None]).astype(float)
    mean = member @ x / size[:, None]
    return np.asarray((x - mean[stratum]) * np.sqrt(size / (size - 1))[stratum, None])
