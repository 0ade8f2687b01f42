"""Variance components: plain loops, closed forms, literal jackknife, simulated bias, coverage and level; errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from statsmodels.regression.linear_model import OLS

from fedstat.stats import icc
from fedstat.stats import variance_components as vc


def weights(seed: int = 0, clients: int = 12, replicates: int = 3, units: int = 5, n: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    own = 0.5 * rng.normal(size=(clients, 1, units, n))
    return 3 + own + rng.normal(size=(clients, replicates, units, n))


SAMPLES = np.random.default_rng(5).integers(10, 100, 12)


@pytest.mark.parametrize("covariate", [None, SAMPLES])
def test_parts_are_residuals_of_least_squares_and_variances_between_replicates(covariate: Any) -> None:
    w = weights()
    found = vc.parts(w, covariate)
    x = np.ones((12, 1)) if covariate is None else np.column_stack([np.ones(12), covariate])
    for u in range(5):
        rest = np.column_stack([OLS(w[:, :, u, i].mean(axis=1), x).fit().resid for i in range(40)])
        np.testing.assert_allclose(found.between[:, u], (rest**2).sum(axis=1), rtol=1e-10)
        np.testing.assert_allclose(found.within[:, u], w[:, :, u].var(axis=1, ddof=1).sum(axis=1), rtol=1e-12)
    hat = OLS(w[:, 0, 0, 0], x).fit().get_influence().hat_matrix_diag
    np.testing.assert_allclose(found.leverage, hat, rtol=1e-10)


@pytest.mark.parametrize("covariate", [None, SAMPLES])
def test_uncertainty_is_that_of_leaving_out_one_client_after_another(covariate: Any) -> None:
    w = weights()
    found = vc.components(vc.parts(w, covariate).pooled())

    def log_f(clients: np.ndarray) -> float:
        p = vc.parts(w[clients], None if covariate is None else covariate[clients]).pooled()
        return float(np.log(p.between.sum() / ((1 - p.leverage) @ p.within / 3)[0]))

    left = np.array([log_f(np.delete(np.arange(12), c)) for c in range(12)])
    std_error = np.sqrt(11 / 12 * ((left - left.mean()) ** 2).sum())
    whole = log_f(np.arange(12))
    assert found.statistic[0] == pytest.approx(whole / std_error, rel=1e-10)
    assert found.reliability[0] == pytest.approx(1 - np.exp(-whole), rel=1e-10)
    assert found.df == 11 - (covariate is not None)


@pytest.mark.parametrize("n", [1, 7, 300])
def test_tensors_and_blocks_give_what_arrays_give_at_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = weights(n=n)
    whole = vc.parts(w, SAMPLES)
    monkeypatch.setattr(icc, "_CACHED", 36 * 50)
    for other in (vc.parts(w, SAMPLES), vc.parts(torch.tensor(w), torch.tensor(SAMPLES))):
        for name in ("between", "within"):
            np.testing.assert_allclose(getattr(other, name), getattr(whole, name), rtol=1e-10)


def test_parts_of_parameters_and_units_add_up_to_the_layer() -> None:
    w, bias = weights(), weights(seed=1, n=1)
    together = vc.parts(np.concatenate([w, bias], axis=-1))
    added = vc.parts(w) + vc.parts(bias)
    np.testing.assert_allclose(vc.components(added).reliability, vc.components(together).reliability, rtol=1e-12)
    other = weights(seed=2, units=2, n=9)
    layer = vc.components(vc.parts(w).pooled() + vc.parts(other).pooled())
    flat = np.concatenate([w.reshape(12, 3, 1, -1), other.reshape(12, 3, 1, -1)], axis=-1)
    for ours, theirs in zip(layer, vc.components(vc.parts(flat)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10)
    with pytest.raises(ValueError, match="sums to be added must have equal clients, units"):
        vc.parts(w) + vc.parts(other)
    with pytest.raises(ValueError, match="covariate"):
        vc.parts(w) + vc.parts(w, SAMPLES)


def test_share_of_the_whole_data_is_that_of_a_half_stepped_up_by_spearman_and_brown() -> None:
    found = vc.components(vc.parts(weights()))
    r = found.reliability_replicate
    np.testing.assert_allclose(found.reliability, 3 * r / (1 + 2 * r), rtol=1e-12)
    np.testing.assert_allclose(r, found.between / (found.between + found.within))


@pytest.mark.parametrize("covariate", [False, True])
def test_estimates_are_unbiased_however_unequal_the_noise_of_clients_and_replicates(covariate: bool) -> None:
    """With the covariate's effect on weights, which the fit takes out."""
    rng = np.random.default_rng(0)
    sizes = np.exp(np.linspace(-1.5, 1.5, 8))
    noise = rng.uniform(0.3, 3, size=(8, 2)) / sizes[:, None]
    w = 0.4 * rng.normal(size=(8, 1, 1, 100_000)) + np.sqrt(noise)[..., None, None] * rng.normal(
        size=(8, 2, 1, 100_000)
    )
    if covariate:
        w = w + sizes[:, None, None, None] * rng.normal(size=100_000)
    p = vc.parts(w, sizes if covariate else None)
    found, free = vc.components(p), 1 - p.leverage
    assert found.between[0] == pytest.approx(0.16, abs=0.006)
    by_client = free * noise.mean(axis=1)  # each with a relative error of sqrt(2 / weights)
    error = np.sqrt(2 / 100_000) * np.linalg.norm(by_client) / free.sum()
    assert found.within[0] == pytest.approx(by_client.sum() / free.sum(), abs=4 * error)
    if covariate:
        assert vc.components(vc.parts(w)).between[0] > 1


def test_own_weights_beat_the_mean_from_a_share_of_one_half_on_and_shrinking_by_the_share_beats_both() -> None:
    rng = np.random.default_rng(0)
    for variance, own_is_better in ((0.5, False), (2.0, True)):
        truth = np.sqrt(variance) * rng.normal(size=(20, 1, 1, 20_000))
        halves = truth + np.sqrt(2) * rng.normal(size=(20, 2, 1, 20_000))  # noise of the whole: 1
        share = vc.components(vc.parts(halves)).reliability[0]
        own, b = halves.mean(axis=1), truth[:, 0]
        mean = own.mean(axis=0)

        def missed(estimate: np.ndarray, b: np.ndarray = b) -> float:
            return float(((estimate - b) ** 2).mean())

        assert (share > 0.5) == own_is_better == (missed(own) < missed(np.broadcast_to(mean, own.shape)))
        tried = {by: missed(mean + by * (own - mean)) for by in (0, share - 0.1, share, share + 0.1, 1)}
        assert min(tried, key=tried.__getitem__) == share


def simulate(runs: int, clients: int, rank: int, share: float, *, unequal: bool, covariate: bool) -> tuple[Any, float]:
    """Units are runs; ``rank`` weights stand for many that are correlated. Noise of a mean of halves is 1 on average.

    The second value is the share for the average that ``within`` is.
    """
    rng = np.random.default_rng([clients, rank, int(10 * share), unequal, covariate])
    sizes = np.exp(np.linspace(-1, 1, clients)) if unequal else np.ones(clients)
    noise = 1 / sizes / np.mean(1 / sizes)
    between = share / (1 - share)
    w = np.sqrt(between) * rng.normal(size=(clients, 1, runs, rank))
    w = w + np.sqrt(2 * noise)[:, None, None, None] * rng.normal(size=(clients, 2, runs, rank))
    p = vc.parts(w, (sizes if unequal else rng.normal(size=clients)) if covariate else None)
    free = 1 - p.leverage
    return vc.components(p), between / (between + free @ noise / free.sum())


def hold(runs: int, *case: Any, **how: bool) -> tuple[float, float]:
    """Shares of 95 % intervals that hold the truth, and of tests at 0.05 that reject."""
    found, truth = simulate(runs, *case, **how)
    return np.mean((found.conf_low <= truth) & (truth <= found.conf_high)), np.mean(found.p_value < 0.05)


@pytest.mark.parametrize("covariate", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize(("clients", "rank"), [(10, 3), (20, 1), (40, 30)])
def test_intervals_hold_the_truth_and_tests_keep_their_level(
    clients: int, rank: int, unequal: bool, covariate: bool
) -> None:
    """Bounds: what a nominal interval in between 0.93 and 1 gives in 1000 runs, up to 2.5 standard errors."""
    how = {"unequal": unequal, "covariate": covariate}
    for share in (0.0, 0.6):
        covered, rejected = hold(1000, clients, rank, share, **how)
        assert covered > 0.91, (share, covered)
        if share == 0:
            assert 0.02 < rejected < 0.08, rejected
        elif (clients, rank) == (40, 30):
            assert rejected > 0.99


def test_dead_units_are_undefined_and_leave_the_others_alone() -> None:
    w = weights()
    expected = vc.components(vc.parts(w))
    w[:, :, 2] = 0.1
    found = vc.components(vc.parts(w, SAMPLES)), vc.components(vc.parts(w))
    for f in found:
        for name in ("reliability", "reliability_replicate", "conf_low", "conf_high", "p_value"):
            assert np.isnan(getattr(f, name)[2]), name
        assert f.between[2] == f.within[2] == 0
    np.testing.assert_array_equal(np.delete(found[1].reliability, 2), np.delete(expected.reliability, 2))


def test_what_clients_have_in_common_costs_no_digits() -> None:
    w = weights()
    near = vc.components(vc.parts(w)).reliability
    np.testing.assert_allclose(vc.components(vc.parts(w + 1e8)).reliability, near, rtol=1e-6)
    np.testing.assert_allclose(vc.components(vc.parts(1e-100 * w)).reliability, near, rtol=1e-10)


def test_where_one_client_has_all_the_noise_nothing_is_claimed() -> None:
    w = weights(n=3)
    w[1:] = w[1:, :1]
    found = vc.components(vc.parts(w))
    assert np.isnan([found.conf_low, found.conf_high, found.p_value]).all()


BAD: list[tuple[Any, Any, str]] = [
    (weights()[0], None, r"\(client, replicate, unit, weight\), but got shape \(3, 5, 40\)"),
    (weights()[:1], None, "needs at least 3 clients, but got 1"),
    (weights()[:2], None, "needs at least 3 clients, but got 2"),
    (weights()[:3], [1, 2, 4], "with a covariate needs at least 4 clients, but got 3"),
    (weights()[:, :1], None, "at least 2 per client, but got 1. Train every client on disjoint parts"),
    (weights(), np.ones(12), "covariate must differ between clients, but all have 1"),
    (weights(), np.ones(11), r"shape \(12,\), but got \(11,\)"),
    (weights(), [np.nan, *range(11)], r"NaN or infinite values for client\(s\) \[0\]"),
    (weights(), ["a"] * 12, "covariate must hold real numbers"),
    (weights(), [0] * 11 + [3], "covariate sets client 11 apart from all others"),
    (1e200 * weights(), None, "unit 0 are so large that their squares overflow"),
    (np.repeat(weights()[:, :1], 2, axis=1), None, r"identical bit for bit in all .* in 5 unit\(s\), first in unit 0"),
]


@pytest.mark.parametrize(("w", "covariate", "message"), BAD, ids=[m[:30] for *_, m in BAD])
def test_bad_input_is_named(w: Any, covariate: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vc.components(vc.parts(w, covariate))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_diverged_client_is_named(value: float) -> None:
    w = weights()
    w[4, 1, 3, 7] = value
    for kind in (np.asarray, torch.tensor):
        with pytest.raises(vc.BadWeightsError, match=r"weights of client 4 hold NaN or infinite values, first in .* 3"):
            vc.parts(kind(w))


def test_gradients_are_not_followed() -> None:
    w = torch.tensor(weights(), requires_grad=True)
    assert not vc.parts(w).between.requires_grad


def test_the_ratio_of_noise_is_1_for_equal_noise_and_1_plus_the_squared_variation_otherwise() -> None:
    rng = np.random.default_rng(0)
    smooth = np.linalg.cholesky(np.exp(-0.1 * np.abs(np.subtract.outer(np.arange(30), np.arange(30)))))
    w = rng.normal(size=(32, 2, 32, 30)) @ smooth.T  # dependent weights
    assert np.median(vc.noise_ratios(w)) == pytest.approx(1, abs=0.05)
    sd = np.resize([0.5, 1.5], 32)  # CV of the variance: 0.8
    unequal = w * sd[:, None, None, None]
    assert vc.noise_cv(vc.noise_ratios(unequal)) == pytest.approx(0.8, abs=0.06)
    assert vc.noise_cv(vc.noise_ratios(unequal, sizes=1 / sd**2)) < 0.3, "noise falls as 1 / samples"
    d = (unequal[:, 0] - unequal[:, 1]).swapaxes(0, 1)
    products, (i, j) = d @ d.swapaxes(1, 2), np.triu_indices(32, 1)
    size = np.diagonal(products, axis1=1, axis2=2)
    expected = (size**2).mean(axis=1) / (size[:, i] * size[:, j] + 2 * products[:, i, j] ** 2).mean(axis=1)
    np.testing.assert_allclose(vc.noise_ratios(torch.from_numpy(unequal) * 1e-120), expected)
    assert len(vc.noise_ratios(np.concatenate([unequal] * 3, axis=2))) <= 32
    w[:, :, 0] = 0
    assert np.isnan(vc.noise_ratios(w)[0])
    assert np.isnan(vc.noise_cv(np.array([np.nan])))
