"""Peaks of a density and the comparison of one normal with two, against closed forms and known samples."""

from __future__ import annotations

import numpy as np
import pytest

from fedstat.motivation import statistics


@pytest.mark.parametrize("half", [0.5, 3.0])
def test_two_points_merge_at_the_closed_form(half):
    # The sum of two equal Gaussian bumps at ±a has one peak exactly if their sd is at least a.
    x = np.repeat([-half, half], 10) + 7.0
    found = statistics.peaks(x, 1)
    np.testing.assert_allclose(found.bandwidth, half, rtol=0.02)
    two = statistics.peaks(x, 2)
    np.testing.assert_allclose(two.position, [7 - half, 7 + half], atol=0.02 * half)


def test_bandwidth_falls_with_peaks_and_moves_with_the_sample():
    x = np.random.default_rng(1).gamma(2, size=150)
    found = [statistics.peaks(x, n) for n in (1, 2, 3)]
    assert found[0].bandwidth > found[1].bandwidth > found[2].bandwidth
    assert [len(f.position) for f in found] == [1, 2, 3]
    moved = statistics.peaks(10 - 4 * x, 2)
    np.testing.assert_allclose(moved.bandwidth, 4 * found[1].bandwidth, rtol=1e-3)
    np.testing.assert_allclose(moved.position, 10 - 4 * found[1].position[::-1], atol=0.1)


def test_one_peak_is_seldom_rejected_and_two_are():
    rng = np.random.default_rng(0)
    normal = [statistics.peaks(rng.normal(size=100), 1, draws=59, seed=i).p_value for i in range(20)]
    assert np.mean(np.array(normal) < 0.05) <= 0.1  # conservative: the share expected is below 0.05
    apart = [
        statistics.peaks(np.r_[rng.normal(0, 1, 60), rng.normal(7, 1, 40)], 1, draws=59, seed=i).p_value
        for i in range(5)
    ]
    assert max(apart) < 0.05


def test_mixture_keeps_its_level_and_recovers_its_components():
    rng = np.random.default_rng(2)
    level = [statistics.mixture(rng.normal(3, 0.01, size=60), draws=19, seed=i).p_value for i in range(10)]
    assert np.sum(np.array(level) <= 0.05) <= 3  # 10 tests at 5%: more than 3 rejections have chance 1e-3
    found = statistics.mixture(np.r_[rng.normal(100, 1, 600), rng.normal(110, 2, 400)], draws=19)
    assert found.p_value == pytest.approx(0.05)
    n, sd = np.array([600, 400]), np.array([1, 2])
    assert (abs(found.mean - [100, 110]) < 4 * sd / np.sqrt(n)).all()
    assert (abs(found.sd / sd - 1) < 4 / np.sqrt(2 * n)).all()
    np.testing.assert_allclose(found.weight, [0.6, 0.4], atol=0.003)  # of 1000 samples next to none is between them


def test_information_criterion_of_one_normal_is_the_closed_form():
    x = np.random.default_rng(3).gamma(2, size=80)
    log_likelihood = -0.5 * len(x) * (np.log(2 * np.pi * x.var()) + 1)
    found = statistics.mixture(x, draws=1)
    # scikit-learn adds 1e-6 to the variance of the standardised sample
    assert found.bic[0] == pytest.approx(2 * np.log(len(x)) - 2 * log_likelihood, abs=1e-3)
    assert found.bic[1] == pytest.approx(found.bic[0] - found.statistic + 3 * np.log(len(x)))


def test_a_skewed_sample_has_one_peak_though_it_is_no_normal():
    x = np.random.default_rng(4).gamma(1.5, size=300)
    assert statistics.mixture(x, draws=19).p_value <= 0.05
    assert statistics.peaks(x, 1, draws=99).p_value > 0.05


def test_seeds_repeat():
    x = np.random.default_rng(5).normal(size=50)
    assert statistics.peaks(x, 1, draws=20, seed=3).p_value == statistics.peaks(x, 1, draws=20, seed=3).p_value
    assert statistics.mixture(x, draws=5, seed=3).p_value == statistics.mixture(x, draws=5, seed=3).p_value


@pytest.mark.parametrize("x", [np.zeros(10), np.arange(3.0), [0.0, 1, 2, np.nan], np.ones((5, 2))])
def test_bad_samples_are_named(x):
    with pytest.raises(ValueError, match="at least 4 finite numbers that are not all equal, but got"):
        statistics.peaks(x, 1)
    with pytest.raises(ValueError, match="at least 4 finite numbers"):
        statistics.mixture(x)
