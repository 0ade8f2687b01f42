"""Student's interval of a mean against scipy, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from fedstat.stats import resampling


@pytest.mark.parametrize("n", [2, 3, 30])
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_it_is_scipys_t_test_and_interval(n: int, level: float) -> None:
    x = np.random.default_rng(n).normal(1, 2, size=n)
    found, expected = resampling.mean(x, level=level), stats.ttest_1samp(x, 0)
    interval = expected.confidence_interval(level)
    assert (found.n, found.mean, found.std_error) == pytest.approx((n, x.mean(), stats.sem(x)))
    assert (found.statistic, found.p_value) == pytest.approx((expected.statistic, expected.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert not found.equal


@pytest.mark.parametrize("x", [[0.0] * 48, [0.3, 0.3], [0.1 + 0.2, 0.3], [-1e9, -1e9]])
def test_equal_values_have_no_spread_to_go_by(x: list[float]) -> None:
    found = resampling.mean(x)
    assert found.equal
    assert found.mean == pytest.approx(x[0])
    assert np.isnan([found.std_error, found.statistic, found.p_value, found.low, found.high]).all()


def test_values_within_rounding_are_equal_and_beyond_it_are_not() -> None:
    assert resampling.mean([0.5, 0.5 + 1e-7], rounding=2e-7).equal
    assert not resampling.mean([0.5, 0.5 + 1e-7], rounding=0.5e-7).equal
    assert not resampling.mean([0.0] * 9 + [1e-3]).equal


@pytest.mark.parametrize(("x", "mean"), [([], np.nan), ([2.0], 2.0), ([1.0, np.nan], np.nan), ([1.0, np.inf], np.inf)])
def test_where_nothing_can_be_said_there_is_nan_and_no_claim_of_equality(x: list[float], mean: float) -> None:
    found = resampling.mean(x)
    assert found.mean == pytest.approx(mean, nan_ok=True)
    assert np.isnan([found.std_error, found.p_value, found.low, found.high]).all()
    assert not found.equal
