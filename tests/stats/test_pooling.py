"""Partial pooling of units: James and Stein's estimator, Bayes by numerical integration, pooled variances, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import scipy

from fedstat.stats import pooling
from fedstat.stats.pooling import pool

# Hits of 18 players in 45 at bats, and James and Stein's estimates (Efron and Morris 1975, JASA 70, as in table 1.1 of
# Efron 2010, Large-scale inference).
HITS = np.array([18, 17, 16, 15, 14, 14, 13, 12, 11, 11, 10, 10, 10, 10, 10, 9, 8, 7]) / 45
JAMES_STEIN = [0.294, 0.289, 0.285, 0.280, 0.275, 0.275, 0.270, 0.266, 0.261, 0.261, *[0.256] * 5, 0.252, 0.247, 0.242]


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pool without limit and without refusal, as the sources do."""
    monkeypatch.setattr(pooling, "_FARTHEST", np.inf)
    monkeypatch.setattr(pooling, "_LEAST_SPREAD", -1.0)


def equal_errors(x: np.ndarray, v: float = 1.0) -> pooling.Pooled:
    """Pool units whose errors have one known variance."""
    n = len(x)
    return pool(x, np.full(n, np.sqrt(v)), np.full(n, 1e6), most=10**6)


@pytest.mark.usefixtures("unlimited")
def test_with_equal_errors_the_estimate_is_that_of_james_and_stein() -> None:
    mean = HITS.mean()
    v = mean * (1 - mean) / 45
    pooled = equal_errors(HITS, v)
    factor = 1 - (len(HITS) - 3) * v / ((HITS - mean) ** 2).sum()
    np.testing.assert_allclose(pooled.estimate, mean + factor * (HITS - mean), rtol=1e-12)
    np.testing.assert_allclose(pooled.estimate, JAMES_STEIN, atol=0.0011)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_mean_and_variance_are_near_those_of_bayes_with_a_flat_prior_of_mean_and_variance(spread: float) -> None:
    n = 30
    x = np.sqrt(1 + spread) * scipy.stats.norm.ppf((np.arange(n) + 0.5) / n)
    pooled, squares = equal_errors(x), ((x - x.mean()) ** 2).sum()
    a = np.linspace(0, 60, 200_001)
    log = -(n - 1) / 2 * np.log(1 + a) - squares / (2 * (1 + a))
    weight = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    b = 1 / (1 + a)
    mean_b, var_b = weight @ b, weight @ b**2 - (weight @ b) ** 2
    estimate = x - mean_b * (x - x.mean())
    variance = 1 - (n - 1) / n * mean_b + var_b * (x - x.mean()) ** 2
    np.testing.assert_allclose(pooled.estimate, estimate, atol=0.01 * np.ptp(x))
    np.testing.assert_allclose(pooled.std_error, np.sqrt(variance), rtol=0.03)


def test_an_estimate_far_away_moves_by_half_a_standard_error_and_keeps_its_variance() -> None:
    x = np.concatenate([scipy.stats.norm.ppf((np.arange(30) + 0.5) / 30) * 1.8, [12.0]])
    pooled = equal_errors(x)
    assert pooled.is_limited.tolist() == [abs(one) > 0.5 for one in pooled.shrinkage * (x - pooled.prior_mean)]
    assert pooled.estimate[-1] == pytest.approx(11.5)
    assert (pooled.std_error[pooled.is_limited] >= 1).all()
    assert (pooled.std_error[~pooled.is_limited] < 1).all()
    assert (np.abs(pooled.estimate - x) <= 0.5 + 1e-12).all()


def test_units_without_a_standard_error_are_left_out() -> None:
    rng = np.random.default_rng(0)
    x, se, df = 3 * rng.normal(size=12), np.full(12, 1.0), np.full(12, 4.0)
    without = pool(x, se, df, most=11)
    bad = np.array([np.nan, 1.0, 2.0, np.inf, 3.0])
    pooled = pool(np.append(x, bad), np.append(se, [1, np.nan, 0, 1, np.inf]), np.append(df, [4] * 5), most=11)
    assert np.isnan(pooled.estimate[12:]).all()
    assert np.isnan(pooled.ends(0.95)[0][12:]).all()
    assert not pooled.is_limited[12:].any()
    for name in ("estimate", "std_error", "df", "shrinkage"):
        np.testing.assert_array_equal(getattr(pooled, name)[:12], getattr(without, name))


def test_intervals_and_probabilities_are_those_of_t() -> None:
    pooled = pool(np.arange(12.0) * 2, np.full(12, 1.0), np.linspace(2, 9, 12), most=11)
    low, high = pooled.ends(0.9)
    posterior = scipy.stats.t(pooled.df, pooled.estimate, pooled.std_error)
    np.testing.assert_allclose([low, high], posterior.interval(0.9))
    np.testing.assert_allclose(pooled.above(7.0), posterior.sf(7.0))


def test_equal_variances_get_the_most_degrees_of_freedom_and_unlike_ones_keep_their_own() -> None:
    v, df = pooling._pool_variances(np.full(20, 2.0), np.full(20, 4.0), 9)
    np.testing.assert_allclose(v, 2.0)
    np.testing.assert_array_equal(df, 9)
    unlike = np.exp(np.linspace(-12, 12, 20))
    v, df = pooling._pool_variances(unlike, np.full(20, 4.0), 9)
    np.testing.assert_allclose(df, 4.0, atol=0.3)
    assert (v >= unlike).all()


def test_prior_degrees_of_freedom_are_those_that_variances_were_drawn_with() -> None:
    rng, own, prior = np.random.default_rng(0), 5.0, 12.0
    truth = prior / rng.chisquare(prior, 100_000)  # Smyth's model: 1 / σ² is χ² by its degrees of freedom
    v = truth * rng.chisquare(own, 100_000) / own
    _, df = pooling._pool_variances(v, np.full(100_000, own), 10**6)
    np.testing.assert_allclose(df, own + prior, rtol=0.03)


@pytest.mark.parametrize("y", [1e-9, 0.01, 1.0, 300.0, 1e8])
def test_the_trigamma_function_is_inverted(y: float) -> None:
    assert scipy.special.polygamma(1, pooling._inverse_trigamma(y)) == pytest.approx(y, rel=1e-6)


def test_few_units_and_units_alike_are_refused() -> None:
    x = np.arange(10.0)
    with pytest.raises(ValueError, match=r"at least 10 units with an interval, but got 9\."):
        pool(x[:9], np.full(9, 1.0), np.full(9, 4.0), most=9)
    error = np.sqrt(x.var(ddof=1) / 2)  # the units' variance is that of their errors
    pool(x, np.full(10, 0.999 * error), np.full(10, 4.0), most=9)
    with pytest.raises(ValueError, match=r"beyond errors of variance 4\.6 the variance of the units is 4\.6: "):
        pool(x, np.full(10, 1.001 * error), np.full(10, 4.0), most=9)
