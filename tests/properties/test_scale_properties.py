"""The unit that weights and outputs are measured in changes nothing but what is measured in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import fedstat.labelled as fs
from fedstat.motivation import statistics
from fedstat.stats import entropy

SEEDS = st.integers(0, 2**32 - 1)
POWERS = st.integers(-960, 1000)  # below, small weights lose digits
SHORT = settings(max_examples=25, deadline=None)


def layer(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(7, 2)) @ rng.normal(size=(2, 12))
    return common + rng.normal(size=(5, 7, 12))


@SHORT
@given(SEEDS, POWERS, st.sampled_from(["pa", "minres", "pc", "leverage"]))
@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning")
def test_a_power_of_two_on_the_weights_changes_no_bit_of_a_split(seed: int, power: int, method: str) -> None:
    w = layer(seed)
    by = 2.0**power
    a, b = fs.split(w, n_factors=2, method=method), fs.split(by * w, n_factors=2, method=method)
    np.testing.assert_array_equal(b.fit.correlation, a.fit.correlation)
    np.testing.assert_array_equal(b.communality, a.communality)
    z = fs.layer_matrix(w)
    np.testing.assert_array_equal(
        fs.fa(by * z, n_factors=2, method=method).communality, fs.fa(z, n_factors=2, method=method).communality
    )


@SHORT
@given(SEEDS, st.lists(POWERS, min_size=7, max_size=7))
def test_units_may_each_have_a_scale_of_their_own(seed: int, powers: list[int]) -> None:
    w = layer(seed)
    by = 2.0 ** np.array(powers, dtype=float)[:, None]
    np.testing.assert_array_equal(
        fs.split(by * w, n_factors=2, method="pc").communality, fs.split(w, n_factors=2, method="pc").communality
    )
    few = {"n_factors": 2, "method": "pc", "n_boot": 3}
    np.testing.assert_array_equal(fs.bootstrap(by * w, **few).communality, fs.bootstrap(w, **few).communality)


@SHORT
@given(SEEDS, POWERS)
def test_a_client_of_another_scale_is_joined_as_if_all_were_ordinary(seed: int, power: int) -> None:
    w = layer(seed)
    w[2] *= 2.0**100  # within what squares allow
    np.testing.assert_array_equal(
        fs.split(w * 2.0 ** min(power, 900), n_factors=2, method="pc").communality,
        fs.split(w, n_factors=2, method="pc").communality,
    )


def test_infinite_weights_are_still_named() -> None:
    w = 1e200 * layer(0)
    w[3, 1, 0] = np.inf
    with pytest.raises(ValueError, match=r"client 3 hold NaN or infinite values, first in unit\(s\) 1"):
        fs.split(w)


@SHORT
@given(SEEDS, st.floats(-250, 250), st.integers(1, 3))
def test_entropy_moves_by_the_log_of_the_unit(seed: int, log10: float, d: int) -> None:
    x = np.random.default_rng(seed).normal(size=(40, d))
    c = 10.0**log10
    a, b = (entropy.knn_entropy(v, feature_axis=1) for v in (x, c * x))
    np.testing.assert_allclose(b.estimate, a.estimate + d * np.log(c), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(b.std_error, a.std_error, rtol=1e-9)


@settings(max_examples=8, deadline=None)
@given(SEEDS, st.integers(-900, 900))
def test_peaks_and_mixtures_move_with_the_unit(seed: int, power: int) -> None:
    rng, c = np.random.default_rng(seed), 2.0**power
    x = np.concatenate([rng.normal(m, 1, 30) for m in (0, 6)])
    a, b = (statistics.peaks(v, 2, draws=3) for v in (x, c * x))
    assert b.bandwidth == c * a.bandwidth
    np.testing.assert_array_equal(b.position, c * a.position)
    assert b.p_value == a.p_value
    a, b = (statistics.mixture(v, draws=1) for v in (x, c * x))
    assert (b.statistic, b.p_value) == (a.statistic, a.p_value)
    np.testing.assert_array_equal([b.mean, b.sd], [c * a.mean, c * a.sd])
    np.testing.assert_allclose(b.bic, a.bic + 2 * len(x) * np.log(c))


def test_distances_beyond_float64_are_said() -> None:
    x = np.array([-1.7e308, 1.7e308, 0.0])
    with np.errstate(over="ignore"), pytest.raises(ValueError, match=r"distances .* must be within float64"):
        entropy.knn_entropy(x, k=2)


SCALES = {
    "tiny": 1e-200,
    "below normal numbers": 1e-300,
    "where squares lose digits": 1e-161,
    "huge": 1e200,
    "by unit": np.array([1e-200, 1, 1e200, 1e-90, 1e160, 3])[:, None],
}


@pytest.mark.parametrize("method", ["moments", "reml"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_variance_components_do_not_depend_on_the_scale(method: str, scale: Any) -> None:
    rng, rtol = np.random.default_rng(1), 1e-4 if method == "reml" else 1e-9  # reml ends at a flat maximum
    w = rng.normal(size=(7, 1, 6, 15)) * np.array([0, 0, 1, 2, 0.5, 3])[:, None] + rng.normal(size=(7, 2, 6, 15))
    a, b = (fs.variance_components(x, method=method) for x in (w, w * scale))
    for name in ("reliability", "conf_low", "conf_high", "p_value"):
        np.testing.assert_allclose(getattr(b.components, name), getattr(a.components, name), rtol=rtol)
    with np.errstate(over="ignore"):
        size = np.broadcast_to(scale, (6, 1))[:, 0] ** 2
        np.testing.assert_allclose(b.components.within, a.components.within * size, rtol=rtol, atol=1e-322)
    # The layer is that of the units that are not negligible beside the largest.
    units = [2] if np.ndim(scale) else range(6)
    layer = fs.variance_components(w[:, :, units], method=method).layer_components
    np.testing.assert_allclose(b.layer_components.reliability, layer.reliability, rtol=rtol)
    assert b.conclusion == ("client" if np.ndim(scale) == 0 else fs.variance_components(w[:, :, units]).conclusion)
    lazy = xr.DataArray(w * scale, dims=("client", "replicate", "unit", "weight")).chunk(unit=1)
    np.testing.assert_array_equal(fs.variance_components(lazy, method=method).reliability, b.reliability)
    tensor = fs.variance_components(torch.tensor(w * scale), method=method)
    np.testing.assert_allclose(tensor.reliability, b.reliability, rtol=rtol)


def test_common_weights_do_not_hide_tiny_differences() -> None:
    w = 1e-200 * np.random.default_rng(1).normal(size=(7, 2, 3, 15))
    offset = np.concatenate([np.ones((7, 2, 3, 5)), w], axis=3)
    np.testing.assert_allclose(fs.variance_components(offset).reliability, fs.variance_components(w).reliability)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_named_beside_large_ones(bad: float) -> None:
    w = 1e200 * np.random.default_rng(1).normal(size=(7, 2, 3, 15))
    w[4, 1, 2, 0] = bad
    with pytest.raises(ValueError, match=r"client 4 hold NaN or infinite values, first in unit\(s\) 2"):
        fs.variance_components(w)
