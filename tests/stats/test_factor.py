"""Factor analysis against R's psych, statsmodels and closed forms."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from array_api_compat import array_namespace
from layers import R8, weights
from scipy.optimize import approx_fprime
from statsmodels.multivariate.factor import Factor

import fedstat.labelled as fs
from fedstat.results import ConvergenceWarning
from fedstat.stats import eigenvalues, factor
from fedstat.stats.moments import correlation, moments

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "psych.json").read_text())
CASES = {c["name"]: c for c in GOLDEN["cases"]}
TOL = GOLDEN["tolerance"]


def to_fixed_point(r: Any, n_factors: int) -> factor.Fit:
    return factor.fit(r, n_factors=n_factors, max_iter=30_000, tol=1e-14)


@functools.cache
def fixed_point(name: str) -> factor.Fit:
    return to_fixed_point(np.array(CASES[name]["r"]), CASES[name]["n_factors"])


# --- against programs we did not write -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_principal_axis_equals_psych(name: str) -> None:
    case = CASES[name]
    fit = fixed_point(name)
    assert fit.converged
    np.testing.assert_allclose(fit.communality, case["pa"]["communality"], atol=TOL["pa"], rtol=0)
    np.testing.assert_allclose((fit.loadings**2).sum(0)[: case["n_factors"]], case["pa"]["ss_loadings"], atol=TOL["pa"])
    np.testing.assert_allclose(fit.eigenvalues, case["eigenvalues"], atol=TOL["pa"])


@pytest.mark.parametrize("name", [n for n in CASES if n != "iris"])
def test_principal_axis_equals_statsmodels(name: str) -> None:
    case = CASES[name]
    r, g = np.array(case["r"]), case["n_factors"]
    peer = Factor(corr=r, n_factor=g, method="pa", smc=False).fit(maxiter=30_000, tol=1e-14)
    np.testing.assert_allclose(fixed_point(name).communality, peer.communality, atol=1e-8, rtol=0)


def test_one_step_equals_statsmodels_after_one_iteration_of_principal_components() -> None:
    r = np.array(CASES["harman24"]["r"])
    values, vectors = np.linalg.eigh(r)
    np.testing.assert_allclose(
        factor.fit(r, n_factors=4, method="pc").communality, (vectors[:, -4:] ** 2 * values[-4:]).sum(1), atol=1e-12
    )
    np.testing.assert_allclose(
        factor.fit(r, n_factors=4, method="leverage").communality, (vectors[:, -3:] ** 2).sum(1), atol=1e-12
    )


def test_a_one_factor_correlation_matrix_is_recovered_exactly() -> None:
    loadings = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    r = np.outer(loadings, loadings)
    np.fill_diagonal(r, 1)
    np.testing.assert_allclose(to_fixed_point(r, 1).communality, loadings**2, atol=1e-10)


def test_correlation_equals_numpy_corrcoef() -> None:
    z = fs.layer_matrix(weights(shape=(3, 3, 2)))
    np.testing.assert_allclose(correlation(moments(z)), np.corrcoef(z, rowvar=False), atol=1e-12)


# --- bounded MINRES, starts, partial eigenproblems ---------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("iris", "reise")])
def test_minres_equals_psych(name: str) -> None:
    case = CASES[name]
    fit = factor.fit(np.array(case["r"]), n_factors=case["n_factors"], method="minres")
    np.testing.assert_allclose(fit.communality, case["minres"]["communality"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [n for n in CASES if n != "iris"])
def test_minres_ends_where_principal_axis_ends_if_that_is_proper(name: str) -> None:
    case = CASES[name]
    r = np.array(case["r"])
    a, b = factor.fit(r, n_factors=case["n_factors"], method="minres", tol=1e-8), fixed_point(name)
    np.testing.assert_allclose(a.communality, b.communality, atol=1e-6, rtol=0)
    assert a.n_iter < b.n_iter / (5 if b.n_iter > 60 else 4)


@pytest.mark.parametrize("kappa", [0.5, 0.75, 0.85, 0.95])
@pytest.mark.parametrize("name", ["harman24", "bfi", "reise"])
def test_minres_meets_the_kkt_conditions_computed_independently(name: str, kappa: float) -> None:
    r = np.array(CASES[name]["r"])
    fit = factor.fit(r, kappa=kappa, method="minres")
    h, g = fit.communality, int(fit.n_factors)

    def loss(x: np.ndarray) -> float:
        a = r.copy()
        np.fill_diagonal(a, x)
        values, vectors = np.linalg.eigh(a)
        top = np.clip(values[-g:], 0, None)
        return float(np.sum((a - (vectors[:, -g:] * top) @ vectors[:, -g:].T) ** 2)) / 2

    gradient = approx_fprime(h, loss, 1e-6)
    assert ((h >= 0) & (h <= 1)).all()
    assert fit.converged
    assert fit.residual <= 1e-6
    assert np.abs(np.clip(h - gradient, 0, 1) - h).max() < 1e-4
    held = (h == 1) & (gradient < -1e-4)
    assert fit.heywood[held].all()
    assert not fit.heywood[h < 1].any()


def test_of_several_minima_in_the_heywood_regime_the_one_with_the_smallest_residuals_is_returned() -> None:
    r = np.array(CASES["harman24"]["r"])
    first = fs.fa(r, corr=True, method="minres")
    best = fs.fa(r, corr=True, method="minres", n_starts=20)
    assert best.n_minima >= 5
    assert f"{best.n_minima} solutions from 20 initial values" in " ".join(repr(best).split())
    assert fs.fa(r, corr=True, n_factors=4, method="minres", n_starts=20).n_minima == 1

    def misfit(result: Any) -> float:
        left = r - result.loadings @ result.loadings.T
        return float(np.sum((left - np.diag(np.diagonal(left))) ** 2))

    assert misfit(best) <= misfit(first) + 1e-9


@pytest.mark.parametrize(("n_factors", "seed"), [(2, 386), (3, 366), (3, 1159)])
def test_minres_goes_on_where_its_line_search_stalls_far_from_a_minimum(n_factors: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(7, 2)) @ rng.normal(size=(2, 12))
    w = common + rng.uniform(0.5, 1.5, size=(1, 7, 1)) * rng.normal(size=(5, 7, 12))
    r = correlation(moments(fs.layer_matrix(w)))
    fit = factor.fit(r, n_factors=n_factors, method="minres")
    assert fit.converged
    slow = to_fixed_point_within_bounds(r, n_factors, fit.communality)
    np.testing.assert_allclose(fit.communality, slow, atol=1e-4)


def to_fixed_point_within_bounds(r: np.ndarray, n_factors: int, h: np.ndarray) -> np.ndarray:
    for _ in range(20_000):
        values, vectors = np.linalg.eigh(r - np.eye(len(r)) + np.diag(h))
        step = (vectors[:, -n_factors:] ** 2 * values[-n_factors:].clip(0)).sum(1).clip(0, 1)
        if np.abs(step - h).max() < 1e-10:
            break
        h = step
    return h


@pytest.mark.parametrize("max_iter", [1, 2, 10, 30])
def test_minres_uses_no_more_eigendecompositions_than_its_cap(max_iter: int) -> None:
    r = np.array(CASES["harman24"]["r"])
    seen = [factor.fit(r, kappa=0.85, method="minres", max_iter=n, tol=0) for n in (max_iter, max_iter + 1)]
    assert [int(one.n_iter) for one in seen] == [max_iter, max_iter + 1]
    values = [float(minres_objective(r, one)) for one in seen]
    assert values[1] <= values[0]


def minres_objective(r: np.ndarray, fit: factor.Fit) -> float:
    values = np.linalg.eigvalsh(r - np.eye(len(r)) + np.diag(fit.communality))[::-1]
    return (values**2).sum() - (values[: int(fit.n_factors)].clip(0) ** 2).sum()


@pytest.mark.parametrize("init", ["smc", np.full(24, 0.3)])
def test_the_start_does_not_matter_where_there_is_one_solution(init: Any) -> None:
    case = CASES["harman24"]
    fit = factor.fit(np.array(case["r"]), n_factors=4, init=init, max_iter=10_000, tol=1e-13)
    np.testing.assert_allclose(fit.communality, case["pa"]["communality"], atol=1e-8)


def test_a_warm_start_needs_fewer_steps_and_ends_at_the_same_point() -> None:
    r = np.array(CASES["harman24"]["r"])
    cold = factor.fit(r, n_factors=4, tol=1e-10, max_iter=1000)
    moved = 0.999 * r + 0.001 * np.eye(24)
    warm = factor.fit(moved, n_factors=4, tol=1e-10, max_iter=1000, init=cold.communality)
    again = factor.fit(moved, n_factors=4, tol=1e-10, max_iter=1000)
    np.testing.assert_allclose(warm.communality, again.communality, atol=1e-8)
    assert warm.n_iter < again.n_iter


@pytest.mark.parametrize("init", ["smcs", np.ones(7), np.full(8, -0.1)])
def test_a_start_that_is_none_is_an_error(init: Any) -> None:
    with pytest.raises(ValueError, match="init must be"):
        factor.fit(R8, n_factors=2, init=init)


def test_heywood_cases_can_be_kept_bounded_or_refused() -> None:
    r = np.array(CASES["harman24"]["r"])
    with pytest.warns(ConvergenceWarning):
        assert fs.fa(r, corr=True, max_iter=1000, tol=1e-6).communality.max() > 1.2
    bounded = fs.fa(r, corr=True, heywood="bound", max_iter=200_000, tol=1e-5)
    assert bounded.communality.max() == 1
    assert bounded.heywood.any()
    assert bounded.converged
    iris = xr.DataArray(CASES["iris"]["r"], dims=("other", "unit"), coords={"unit": list("abcd")})
    with pytest.raises(
        ValueError,
        match=r"above 1 \(Heywood case\) in unit\(s\) c\. Lower n_factors, or pass heywood='bound' or 'allow'",
    ):
        fs.fa(iris, corr=True, n_factors=1, heywood="error", tol=1e-6)
    harman = {"corr": True, "kappa": 0.85, "heywood": "error"}
    with pytest.raises(ValueError, match=r"above 1 .* Lower kappa, or pass heywood='bound' or 'allow'"):
        fs.fa(r, max_iter=1000, tol=1e-6, **harman)
    with pytest.raises(
        ValueError, match=r"at the bound of 1 .* Lower kappa, or pass heywood='allow', which flags"
    ) as error:
        fs.fa(r, method="minres", **harman)
    assert "minres" not in str(error.value)
    assert fs.fa(r, method="minres", **harman | {"heywood": "allow"}).heywood.any()


@pytest.mark.parametrize("n_factors", [1, 5, 12])
def test_few_factors_of_a_large_layer_equal_the_full_decomposition(
    n_factors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(800, 5)) @ rng.normal(size=(5, 150)) + 2 * rng.normal(size=(800, 150))
    r = correlation(moments(np.insert(z, 7, 0.0, axis=1)))
    how: dict[str, Any] = {"n_factors": n_factors, "tol": 1e-12, "max_iter": 25}
    fast = factor.fit(r, **how)
    assert np.isnan(fast.eigenvalues[-1]) == (n_factors <= 5)  # past the gap all eigenpairs are cheaper
    batch, as_torch = factor.fit(np.stack([r, r]), **how), factor.fit(torch.asarray(r), **how)
    monkeypatch.setattr(eigenvalues, "pays", lambda *_: False)
    slow = factor.fit(r, **how)
    for other in (fast.communality, batch.communality[1], as_torch.communality.numpy()):
        np.testing.assert_allclose(other, slow.communality, atol=1e-10)


def test_the_leading_eigenpairs_of_noise_without_a_gap_are_exact() -> None:
    r = correlation(moments(np.random.default_rng(0).normal(size=(300, 200))))
    xp = array_namespace(r)
    values, vectors = eigenvalues.leading(xp, r, 10)
    np.testing.assert_allclose(values[:10], np.linalg.eigvalsh(r)[::-1][:10], atol=1e-10)
    np.testing.assert_allclose(r @ vectors[:, :10], vectors[:, :10] * values[:10], atol=1e-8)


# --- number of factors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kappa", "g"), [(1e-9, 1), (0.5, 1), (0.500001, 2), (0.75, 2), (0.8, 3), (1.0, 3)])
def test_the_kappa_rule_takes_the_smallest_number_that_reaches_the_share_ties_included(kappa: float, g: int) -> None:
    assert factor.count_factors(np.array([2.0, 1.0, 1.0]), kappa=kappa) == g


def test_kappa_one_of_a_singular_matrix_counts_its_rank_only() -> None:
    z = np.random.default_rng(0).normal(size=(5, 8))
    r = correlation(moments(z))
    assert factor.fit(r, kappa=1.0, method="pc").n_factors == 4


@pytest.mark.parametrize("kappa", [0, -0.1, 1.01, float("nan"), "0.5", True])
def test_kappa_out_of_range_is_an_error_that_shows_it(kappa: Any) -> None:
    with pytest.raises(ValueError, match=r"kappa must be a finite number in \(0, 1\], but got"):
        factor.fit(R8, kappa=kappa)


@pytest.mark.parametrize("n_factors", [0, 9, 2.5])
def test_number_of_factors_out_of_range_is_an_error(n_factors: Any) -> None:
    with pytest.raises(ValueError, match="n_factors must be an integer from 1 to 8"):
        factor.fit(R8, n_factors=n_factors)


def test_unknown_method_offers_the_nearest() -> None:
    with pytest.raises(ValueError, match="Did you mean 'leverage'"):
        factor.fit(np.eye(3), method="leverge")  # type: ignore[arg-type]


def test_a_heywood_case_is_flagged_with_the_communality_psych_reports() -> None:
    case = CASES["iris"]
    fit = fixed_point("iris")
    assert max(case["pa"]["communality"]) > 1
    np.testing.assert_array_equal(fit.heywood, np.array(case["pa"]["communality"]) > 1)
