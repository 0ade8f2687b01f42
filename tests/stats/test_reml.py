"""REML of clients x replicates against statsmodels, against the closed form of balanced data, and by simulation."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from statsmodels.regression.mixed_linear_model import MixedLM

from fedstat.stats import reml
from fedstat.stats import variance_components as moments


def estimate(w: np.ndarray, sizes: Any = None, covariate: np.ndarray | None = None) -> moments.Components:
    return reml.components(reml.gram(w, sizes, covariate))


def draw(clients: int, replicates: int, n: int, sizes: np.ndarray, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(clients, replicates, 1, n)) / np.sqrt(sizes)[..., None, None]
    return rng.normal(size=(1, 1, 1, n)) + rng.normal(size=(clients, 1, 1, n)) + noise


def mixed(w: np.ndarray, sizes: np.ndarray, covariate: np.ndarray | None) -> tuple[float, float]:
    """σ_b² and ω by statsmodels: every weight has its fixed effects, rows times √size have one residual variance."""
    c, r, _, n = w.shape
    x = np.ones((c, 1)) if covariate is None else np.column_stack([np.ones(c), covariate])
    rows = list(itertools.product(range(c), range(r), range(n)))
    y = np.array([w[a, b, 0, i] * np.sqrt(sizes[a, b]) for a, b, i in rows])
    fixed = np.array([np.sqrt(sizes[a, b]) * np.kron(np.eye(n)[i], x[a]) for a, b, i in rows])
    random = np.array([[np.sqrt(sizes[a, b])] for a, b, _ in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gtol is beyond what the optimiser calls converged
        model = MixedLM(y, fixed, groups=[a * n + i for a, _, i in rows], exog_re=random)
        fit = model.fit(reml=True, method=["bfgs"], gtol=1e-10)
    return float(fit.cov_re[0, 0]), float(fit.scale)


@pytest.mark.parametrize("covariate", [False, True])
@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("shape", [(8, 2, 3), (6, 3, 4), (10, 2, 2)])
def test_estimates_are_those_of_statsmodels(shape: tuple[int, int, int], unequal: bool, covariate: bool) -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(3, 40, size=shape[:2]).astype(float) if unequal else np.ones(shape[:2])
    unit = sizes * np.mean(1 / sizes)  # statsmodels does not find the maximum from far away
    w, x = draw(*shape, unit), rng.normal(size=shape[0]) if covariate else None
    found = estimate(w, sizes, covariate=x)
    between, omega = mixed(w, unit, x)
    assert found.between[0] == pytest.approx(between, rel=1e-6)
    assert found.within[0] == pytest.approx(omega, rel=1e-6)
    whole = omega * np.mean(1 / unit.sum(axis=1))
    assert found.reliability[0] == pytest.approx(between / (between + whole), rel=1e-6)


def test_balanced_data_have_the_closed_form_of_moments() -> None:
    w = np.concatenate([draw(10, 2, 20, np.ones((10, 2)), seed) for seed in range(4)], axis=2)
    ours, theirs = estimate(w), moments.components(moments.parts(w))
    for name in ("between", "within", "reliability", "reliability_replicate", "conf_low", "conf_high", "statistic"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-6, err_msg=name)


def test_estimates_of_moments_below_zero_are_zero_here() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, 2, 40, 3))
    ours, theirs = estimate(w), moments.components(moments.parts(w))
    below = theirs.between < 0
    assert below.any()
    assert (ours.between[below] == 0).all()
    assert (ours.conf_low >= 0).all()
    np.testing.assert_allclose(ours.p_value, theirs.p_value, rtol=1e-5)
    np.testing.assert_allclose(ours.between[~below], theirs.between[~below], rtol=1e-5)


def test_uncertainty_is_that_of_leaving_out_clients() -> None:
    """Where no fit without a client is at its bound, the fit of the others alone."""
    sizes = np.random.default_rng(2).integers(5, 30, size=(7, 2)).astype(float)
    w = draw(7, 2, 30, sizes / 5)
    found = estimate(w, sizes)
    inverse = np.mean(1 / sizes.sum(axis=1))

    def theta(keep: np.ndarray) -> float:
        f, mean = estimate(w[keep], sizes[keep]), np.mean(1 / sizes[keep])
        return float(np.log1p(f.between[0] / (f.within[0] / mean) / inverse))

    left = np.array([theta(np.delete(np.arange(7), c)) for c in range(7)])
    std_error = np.sqrt(6 / 7 * ((left - left.mean()) ** 2).sum())
    assert found.statistic[0] == pytest.approx(theta(np.arange(7)) / std_error, rel=1e-5)


def test_intervals_hold_the_truth_and_tests_keep_their_level_under_known_unequal_sizes() -> None:
    """Bounds: 400 runs at 0.93 and 0.05, up to 2.5 standard errors."""
    rng = np.random.default_rng(0)
    sizes = np.exp(np.linspace(-1, 1, 10))
    sizes = sizes * np.mean(1 / sizes)
    for share in (0.0, 0.5):
        w = np.sqrt(share / (1 - share)) * rng.normal(size=(10, 1, 400, 3))
        w = w + np.sqrt(2 / sizes)[:, None, None, None] * rng.normal(size=(10, 2, 400, 3))
        found, plain = estimate(w, sizes), moments.components(moments.parts(w))
        assert np.mean((found.conf_low <= share) & (share <= found.conf_high)) > 0.895
        if share == 0:
            assert np.mean(found.p_value < 0.05) < 0.078
        ours, theirs = (np.mean((np.maximum(f.reliability, 0) - share) ** 2) for f in (found, plain))
        assert ours < 0.9 * theirs


def test_sums_of_parameters_units_and_tensors_are_those_of_the_layer() -> None:
    sizes = np.random.default_rng(2).integers(5, 30, size=8)
    each = np.repeat(sizes[:, None] / 2, 2, axis=1)
    w = draw(8, 2, 60, each)
    whole = estimate(w, sizes)
    g = reml.gram(w.reshape(8, 2, 5, 12), sizes)
    added = reml.gram(w[..., :20], sizes) + reml.gram(torch.tensor(w[..., 20:]), torch.tensor(each))
    for other in (g.pooled(), added):
        for ours, theirs in zip(reml.components(other), whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    with pytest.raises(ValueError, match="sums to be added must have equal clients"):
        g + reml.gram(w.reshape(8, 2, 5, 12))


def test_dead_units_are_undefined_and_bad_input_is_named() -> None:
    w = np.concatenate([draw(6, 2, 5, np.ones((6, 2)), s) for s in range(3)], axis=2)
    w[:, :, 1] = 0.3
    found = estimate(w)
    for name in ("reliability", "reliability_replicate", "conf_low", "conf_high", "p_value"):
        np.testing.assert_array_equal(np.isnan(getattr(found, name)), [False, True, False], err_msg=name)
    assert found.between[1] == found.within[1] == 0
    with pytest.raises(ValueError, match=r"\(6,\) or \(6, 2\), but got \(5,\)"):
        estimate(w, np.ones(5))
    with pytest.raises(ValueError, match="above 0, but got 0"):
        estimate(w, [0, 1, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="identical bit for bit"):
        estimate(np.repeat(w[:, :1], 2, axis=1))
    w[3, 0, 2, 1] = np.nan
    with pytest.raises(moments.BadWeightsError, match=r"client 3 .* 2"):
        estimate(w)
