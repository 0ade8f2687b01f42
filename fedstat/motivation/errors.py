"""Errors of neurons' entropies over clients, from which medians and peaks of all neurons get standard errors."""

from __future__ import annotations

import numpy as np
import scipy
from numpy.typing import NDArray

from fedstat._random import generator
from fedstat.stats.entropy import neighbour_variance

Array = NDArray[np.float64]
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
