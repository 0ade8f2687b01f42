"""What is said of a difference, and of two orders."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from _claims import claim, rank_correlation
from numpy.testing import assert_allclose
from scipy import stats


@pytest.mark.parametrize(
    ("difference", "low", "high", "said"),
    [
        (0.02, 0.001, 0.039, "better"),
        (-0.02, -0.039, -0.001, "worse"),
        (0.0035, 0.0031, 0.0039, "better"),  # by less than the margin, but certainly more than noise
        (0.001, -0.0049, 0.0049, "the same"),
        (0.002, 0.001, 0.003, "the same"),
        (0.001, -0.005, 0.004, "inconclusive"),  # the limit is not within
        (0.003, 0.0005, 0.0055, "below the noise floor"),  # at the floor is not beyond it
        (-0.0029, -0.0058, -0.0001, "below the noise floor"),
        (0.02, 0.0, 0.04, "inconclusive"),
        (0.02, -0.01, 0.05, "inconclusive"),
        (0.02, np.nan, np.nan, "inconclusive"),
    ],
)
def test_each_claim(difference, low, high, said):
    assert claim(difference, low, high, floor=0.003, margin=0.005) == said


def test_a_higher_floor_silences_a_difference():
    assert claim(0.02, 0.01, 0.03, floor=0.02, margin=0.005) == "below the noise floor"
    assert claim(0.02, 0.01, 0.03, floor=0.0199, margin=0.005) == "better"


@pytest.mark.parametrize("ties", [False, True])
def test_the_permutation_p_is_that_of_all_orders(ties):
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=6), rng.normal(size=6)
    if ties:
        x, y = np.round(x), np.round(y)
    r = stats.spearmanr(x, y).statistic
    others = [stats.spearmanr(x, y[list(order)]).statistic for order in permutations(range(6))]
    found = rank_correlation(x, y)
    assert_allclose(found.r, r, atol=1e-12)
    assert_allclose(found.p_value, np.mean(np.abs(others) >= abs(r) - 1e-12))


def test_eight_settings_are_exact():
    # Two of 8! orders are as far from 0 as the perfect ones; with one neighbouring pair exchanged, 2 (1 + 7).
    assert_allclose(rank_correlation(range(8), range(8)).p_value, 2 / 40320)
    assert_allclose(rank_correlation(range(8), [1, 0, *range(2, 8)]).p_value, 16 / 40320)


def test_beyond_eight_orders_are_drawn():
    rng = np.random.default_rng(1)
    x = rng.normal(size=12)
    y = x + 1.5 * rng.normal(size=12)
    found = rank_correlation(x, y)
    assert found == rank_correlation(x, y)
    assert_allclose(found.p_value, stats.spearmanr(x, y).pvalue, atol=0.01)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3])])
def test_no_correlation_without_an_order(x, y):
    found = rank_correlation(x, y)
    assert np.isnan(found.r)
    assert np.isnan(found.p_value)


@pytest.mark.parametrize(("x", "y"), [([1, 2, 3], [1, 2]), ([1, 2, np.nan], [1, 2, 3])])
def test_pairs_must_be_whole(x, y):
    with pytest.raises(ValueError, match="equally many finite numbers"):
        rank_correlation(x, y)
