"""Partial pooling of units: empirical Bayes estimates of a layer's units, drawn towards their mean.

Estimates x_i of units have errors of standard error s_i. With a prior N(μ, A) of the units' true values, the posterior
of a unit has mean x_i − B_i (x_i − μ) and variance s_i² (1 − B_i) with the shrinkage B_i = s_i²/(s_i² + A) [1]_.

References
----------
.. [1] Morris (1983). Parametric empirical Bayes inference: theory and applications. JASA 78, 47-55.
.. [2] Efron, Morris (1972). Limiting the risk of Bayes and empirical Bayes estimators, part II. JASA 67, 130-139.
.. [3] Smyth (2004). Linear models and empirical Bayes methods for assessing differential expression in microarray
   experiments. Statist. Appl. Genet. Mol. Biol. 3, article 3.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_POOLED = 10
"""Least number of units with a standard error."""
# Ratio of the prior variance to the mean squared standard error from which pooled intervals held in simulations.
_LEAST_SPREAD = 1.0
# An estimate moves by at most this number of its standard errors: prior distributions may have long tails.
_FARTHEST = 0.5


class Pooled(NamedTuple):
    """Estimates of units, drawn towards their mean.

    Attributes
    ----------
    estimate, std_error : array (unit,)
        Posterior mean and standard deviation. NaN for a unit without a standard error.
    df : array (unit,)
        Degrees of freedom of the posterior, a t distribution.
    shrinkage : array (unit,)
        B, factor by which the prior draws a unit's difference from the mean towards 0, unless ``is_limited``.
    is_limited : bool array (unit,)
        True for units that moved by half a standard error, and no further.
    prior_mean, prior_variance : float
        μ and A, by the method of moments.
    noise : float
        Mean squared standard error.
    """

    estimate: Floats
    std_error: Floats
    df: Floats
    shrinkage: Floats
    is_limited: NDArray[np.bool_]
    prior_mean: float
    prior_variance: float
    noise: float

    def ends(self, level: float) -> tuple[Floats, Floats]:
        """Return the ends of posterior intervals, arrays (unit,)."""
        half = scipy.special.stdtrit(self.df, 0.5 + level / 2) * self.std_error
        return self.estimate - half, self.estimate + half

    def above(self, value: float) -> Floats:
        """Return the posterior probability that a unit's true value is above a value, array (unit,)."""
        return np.asarray(scipy.special.stdtr(self.df, (self.estimate - value) / self.std_error))


def pool(estimate: Floats, std_error: Floats, df: Floats, *, most: int) -> Pooled:
    """Draw estimates of units towards their mean by empirical Bayes, each by at most half a standard error.

    Parameters
    ----------
    estimate : array (unit,)
        Estimates on a scale on which their errors are nearly normal.
    std_error, df : array (unit,)
        Standard errors and their degrees of freedom. Units without a positive, finite standard error are left out.
    most : int
        Largest number of degrees of freedom.

    Returns
    -------
    Pooled

    Raises
    ------
    ValueError
        If there are fewer than 10 units with a standard error, or if the prior variance is below the mean squared
        standard error.

    Notes
    -----
    Standard errors are pooled first, because units that are selected for their estimates have standard errors that are
    too small. With f_i degrees of freedom and the prior degrees of freedom f_0 of [3]_, s_i² becomes the larger of s_i²
    and (f_0 s̄² + f_i s_i²)/(f_0 + f_i), with f_0 + f_i degrees of freedom, but not more than ``most``. The bar is a
    mean over units.

    μ is the mean and A the variance of the estimates minus their mean squared standard error, before these are pooled.
    Units have equal weights, because a unit's true value and its standard error are dependent. For k units of equal
    weight, B_i and the variance of the posterior are those of [1]_:

        B_i = (k − 3)/(k − 1) s_i²/(s_i² + A),
        s_i² (1 − (k − 1)/k B_i) + 2/(k − 3) B_i² (s̄² + A)/(s_i² + A) (x_i − μ)²,

    of which the last term is the error of the estimated A. A few units of trained layers lie far outside of the
    others, where a normal prior would move them by several standard errors. The estimate therefore moves by at most
    half a standard error, the limited translation of [2]_; a unit at this limit has at least the variance s_i².

    Both refusals were fixed by simulation (``simulations/inference/pooling.py``). Where units differ by less than their
    errors, the prior variance is too uncertain, and intervals of selected units are too short.

    Examples
    --------
    >>> x = np.array([-3.0, -1, -1, -1, 0, 0, 1, 1, 1, 3])
    >>> pooled = pool(x, np.full(10, 1.0), np.full(10, 5.0), most=9)
    >>> round(pooled.prior_variance, 2), pooled.estimate.round(2).tolist()
    (1.67, [-2.5, -0.71, -0.71, -0.71, 0.0, 0.0, 0.71, 0.71, 0.71, 2.5])
    """
    has_error = np.isfinite(estimate) & np.isfinite(std_error) & (std_error > 0)
    if (n := int(has_error.sum())) < LEAST_POOLED:
        raise ValueError(
            f"pooling needs at least {LEAST_POOLED} units with an interval, but got {n}. Use the estimates without "
            "pooling."
        )
    x, v = estimate[has_error], std_error[has_error] ** 2
    mean, noise = float(x.mean()), float(v.mean())
    prior = float(x.var(ddof=1)) - noise
    if prior < _LEAST_SPREAD * noise:
        raise ValueError(
            "pooling needs units that differ at least as much as their errors, but beyond errors of variance "
            f"{noise:.2g} the variance of the units is {prior:.2g}: pooled intervals would be too short. Use more "
            "clients, or the estimates without pooling."
        )
    v, df_pooled = _pool_variances(v, df[has_error], most)
    deviation, total = x - mean, v + prior
    shrinkage = (n - 3) / (n - 1) * v / total
    variance = v * (1 - (n - 1) / n * shrinkage) + 2 / (n - 3) * shrinkage**2 * total.mean() / total * deviation**2
    shift, limit = -shrinkage * deviation, _FARTHEST * np.sqrt(v)
    is_limited = np.abs(shift) > limit
    variance = np.where(is_limited, np.maximum(variance, v), variance)
    columns = (x + np.clip(shift, -limit, limit), np.sqrt(variance), df_pooled, shrinkage)
    of_units = np.full((len(columns), len(estimate)), np.nan)
    of_units[:, has_error] = columns
    limited = np.zeros(len(estimate), bool)
    limited[has_error] = is_limited
    pooled, error, pooled_df, factor = of_units
    return Pooled(pooled, error, pooled_df, factor, limited, mean, prior, noise)


def _pool_variances(v: Floats, df: Floats, most: int) -> tuple[Floats, Floats]:
    """Draw estimated variances (unit,) upwards to their mean; return them with their degrees of freedom (unit,).

    The prior degrees of freedom f solve ψ'(f/2) = variance of log v − ψ(df/2) + log(df/2) minus mean of ψ'(df/2), with
    the trigamma function ψ' (Smyth 2004, section 6.2); they are infinite if the difference is not positive.
    """
    logs = np.log(v) - scipy.special.digamma(df / 2) + np.log(df / 2)
    excess = float(logs.var(ddof=1) - scipy.special.polygamma(1, df / 2).mean())
    prior_df = np.inf if excess <= 0 else 2 * _inverse_trigamma(excess)
    weight = df / (df + prior_df)
    return np.maximum(v, weight * v + (1 - weight) * v.mean()), np.minimum(df + prior_df, most)


def _inverse_trigamma(y: float) -> float:
    """Return x > 0 with ψ'(x) = y > 0, which lies between bounds since 1/x + 1/(2 x²) < ψ'(x) < 1/x + 1/x².

    Examples
    --------
    >>> round(_inverse_trigamma(np.pi**2 / 6), 9)
    1.0
    """
    low, high = ((1 + np.sqrt(1 + c * y)) / (2 * y) for c in (2, 4))
    return float(scipy.optimize.brentq(lambda x: scipy.special.polygamma(1, x) - y, low, high))
