"""What factor analysis of a layer must not depend on."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedstat.labelled import layer_matrix
from fedstat.stats import factor, split
from fedstat.stats.moments import correlation, moments

SEEDS = st.integers(0, 2**32 - 1)
METHODS = st.sampled_from(factor.METHODS)
settings.register_profile("short", max_examples=25, deadline=None)
settings.load_profile("short")


def clients(rng: np.random.Generator, n: int = 5, units: int = 7, weight: int = 12) -> np.ndarray:
    common = rng.normal(size=(units, 2)) @ rng.normal(size=(2, weight))
    return common + rng.uniform(0.5, 1.5, size=(1, units, 1)) * rng.normal(size=(n, units, weight))


def communality(w: np.ndarray, method: factor.Method) -> np.ndarray:
    """Thirty principal-axis steps, or where a search ends: cut short, rounding would decide where it stands."""
    steps = {"max_iter": 30, "tol": 0} if method == "pa" else {}
    return factor.fit(correlation(moments(layer_matrix(w))), n_factors=2, method=method, **steps).communality


@given(SEEDS, METHODS)
def test_permuting_units_permutes_communalities(seed: int, method: factor.Method) -> None:
    rng = np.random.default_rng(seed)
    w, order = clients(rng), rng.permutation(7)
    np.testing.assert_allclose(communality(w[:, order], method), communality(w, method)[order], atol=1e-8)


@given(SEEDS, METHODS)
@example(386, "minres")  # a stall in the search
@example(532, "minres")
def test_permuting_clients_and_weights_changes_nothing(seed: int, method: factor.Method) -> None:
    rng = np.random.default_rng(seed)
    w = clients(rng)
    shuffled = w[rng.permutation(5)][:, :, rng.permutation(12)]
    np.testing.assert_allclose(communality(shuffled, method), communality(w, method), atol=1e-8)


@given(SEEDS, METHODS)
def test_scale_and_sign_of_a_unit_change_nothing(seed: int, method: factor.Method) -> None:
    rng = np.random.default_rng(seed)
    w = clients(rng)
    scale = rng.choice([-1, 1], size=(1, 7, 1)) * np.exp(rng.uniform(-6, 6, size=(1, 7, 1)))
    np.testing.assert_allclose(communality(w * scale, method), communality(w, method), atol=1e-7)


@given(SEEDS, st.integers(1, 4))
def test_moments_of_any_partition_of_the_rows_add_up(seed: int, cut: int) -> None:
    w = clients(np.random.default_rng(seed))
    parts = moments(layer_matrix(w[:cut])) + moments(layer_matrix(w[cut:]))
    np.testing.assert_allclose(correlation(parts), correlation(moments(layer_matrix(w))), atol=1e-12)


@given(SEEDS, st.floats(0.01, 1.0))
def test_the_number_of_factors_holds_the_share_and_one_fewer_does_not(seed: int, kappa: float) -> None:
    gamma = np.sort(np.random.default_rng(seed).exponential(size=9))[::-1]
    g = int(factor.count_factors(gamma, kappa=kappa))
    share = np.cumsum(gamma) / gamma.sum()
    assert share[g - 1] >= kappa - 1e-12
    assert g == 1 or share[g - 2] < kappa


@given(SEEDS, METHODS)
def test_one_more_dead_unit_changes_no_other(seed: int, method: factor.Method) -> None:
    w = clients(np.random.default_rng(seed))
    nu = communality(np.insert(w, 2, 0.25, axis=1), method)
    assert np.isnan(nu[2])
    np.testing.assert_allclose(np.delete(nu, 2), communality(w, method), atol=1e-7)


@given(SEEDS, st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2))
def test_a_higher_quantile_shares_a_subset(seed: int, taus: list[float]) -> None:
    nu = np.random.default_rng(seed).uniform(size=23)
    low, high = sorted(taus)
    assert not (split.shared(nu, tau=high) & ~split.shared(nu, tau=low)).any()


@given(SEEDS, st.floats(0.05, 0.95))
def test_a_quantile_depends_on_ranks_alone(seed: int, tau: float) -> None:
    nu = np.random.default_rng(seed).uniform(size=23)
    np.testing.assert_array_equal(split.shared(nu, tau=tau), split.shared(np.exp(3 * nu), tau=tau))
