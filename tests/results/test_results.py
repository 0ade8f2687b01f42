"""Reports of a factor analysis against psych and factor_analyzer; every table and print."""

from __future__ import annotations

import functools
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from factor_analyzer.factor_analyzer import calculate_bartlett_sphericity, calculate_kmo

import fedstat.labelled as fs
from fedstat.results import FactorResult
from fedstat.stats import factor, number_of_factors

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "psych.json").read_text())
CASES = {c["name"]: c for c in GOLDEN["cases"] if c["name"] != "iris"}  # a Heywood case: psych's indices are undefined
TOL = GOLDEN["tolerance"]


@functools.cache
def analyse(name: str, **options: Any) -> FactorResult:
    case = CASES[name]
    return fs.fa(
        np.array(case["r"]), corr=True, n_obs=case["n_obs"], n_factors=case["n_factors"], max_iter=30_000, tol=1e-14,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fit_indices_equal_psych(name: str) -> None:
    row, pa = analyse(name).glance().iloc[0], CASES[name]["pa"]
    ours = ("chi2", "df", "p_value", "null_chi2", "null_df", "tli", "bic", "sabic", "rmsr", "rmsr_corrected", "fit_off")
    theirs = ("chi2", "df", "p_value", "null_chi2", "null_df", "tli", "bic", "sabic", "rmsr", "crms", "fit_off")
    for a, b in zip(ours, theirs, strict=True):
        assert row[a] == pytest.approx(pa[b], rel=TOL["index"], abs=1e-9), a
    np.testing.assert_allclose(row[["rmsea", "rmsea_low", "rmsea_high"]].to_list(), pa["rmsea"], atol=TOL["rmsea"])


@pytest.mark.parametrize("name", CASES)
def test_kmo_and_bartlett_equal_psych(name: str) -> None:
    case, row = CASES[name], analyse(name).glance().iloc[0]
    assert row["kmo"] == pytest.approx(case["kmo"], abs=1e-8)
    np.testing.assert_allclose(number_of_factors.kmo(np.array(case["r"]))[1], case["kmo_unit"], atol=1e-8)
    assert row["bartlett"] == pytest.approx(case["bartlett"]["chi2"], rel=1e-9)
    assert row["bartlett_p"] == pytest.approx(case["bartlett"]["p_value"], rel=1e-6)


def test_kmo_and_bartlett_equal_factor_analyzer_on_rows() -> None:
    z = np.random.default_rng(0).normal(size=(200, 3)) @ np.random.default_rng(1).normal(size=(3, 9))
    z += np.random.default_rng(2).normal(size=z.shape)
    row = fs.fa(z, n_factors=3).glance().iloc[0]
    per_unit, overall = calculate_kmo(z)
    assert row["kmo"] == pytest.approx(overall, abs=1e-10)
    np.testing.assert_allclose(number_of_factors.kmo(np.corrcoef(z.T))[1], per_unit, atol=1e-10)
    stat, p = calculate_bartlett_sphericity(z)
    assert row["bartlett"] == pytest.approx(stat, rel=1e-10)
    assert row["bartlett_p"] == pytest.approx(p, rel=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_complexity_equals_psych(name: str) -> None:
    np.testing.assert_allclose(analyse(name).tidy()["complexity"], CASES[name]["pa"]["complexity"], atol=1e-6)


@pytest.mark.parametrize("rotation", ["varimax", "promax", "oblimin"])
def test_communalities_do_not_depend_on_the_rotation(rotation: Any) -> None:
    plain, turned = analyse("harman24"), analyse("harman24", rotation=rotation)
    phi = np.eye(4) if turned.phi is None else turned.phi
    common = np.diagonal(turned.loadings @ phi @ turned.loadings.T)
    np.testing.assert_allclose(common, plain.communality, atol=1e-10)
    np.testing.assert_array_equal(turned.communality, plain.communality)
    np.testing.assert_allclose(GOLDEN["rotations"][rotation]["communality"], plain.communality, atol=TOL["pa"])
    assert turned.glance()["rmsr"][0] == pytest.approx(plain.glance()["rmsr"][0], abs=1e-10)
    assert turned.ss_loadings.sum() == pytest.approx(plain.ss_loadings.sum(), abs=1e-8)


def test_one_factor_needs_no_rotation() -> None:
    one = fs.fa(np.array(CASES["harman24"]["r"]), corr=True, n_factors=1)
    np.testing.assert_array_equal(one.rotate("varimax").loadings, one.loadings)
    with pytest.raises(ValueError, match="rotation must be one of"):
        one.rotate("varymax")  # type: ignore[arg-type]


def test_loadings_have_no_arbitrary_sign() -> None:
    assert (analyse("bfi").loadings.sum(0) >= 0).all()


def test_scores_are_thurstones_regression_with_the_r2_psych_gives() -> None:
    case = CASES["harman24"]
    low = np.linalg.cholesky(np.array(case["r"]))
    z = np.random.default_rng(0).normal(size=(500, 24))
    z = (z - z.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(z.T, bias=True))).T @ low.T  # correlation exactly R
    scores = analyse("harman24").augment(z, reference=z)
    assert list(scores) == ["factor_1", "factor_2", "factor_3", "factor_4"]
    np.testing.assert_allclose(scores.var(ddof=0), case["pa"]["r2_scores"], atol=1e-6)
    with pytest.raises(ValueError, match=r"shape \(row, 24\), but got \(500, 23\)"):
        analyse("harman24").augment(z[:, 1:], reference=z)


def test_negative_degrees_of_freedom_are_said_not_hidden() -> None:
    result = fs.fa(np.array(CASES["thurstone"]["r"]), corr=True, n_obs=213, n_factors=7, method="pc")
    row = result.glance().iloc[0]
    assert row["df"] == -6
    assert np.isnan(row["chi2"]) == np.isnan(row["tli"]) or np.isnan(row["tli"])
    assert np.isnan(row["rmsea"])
    assert "df <= 0" in result.summary()


def test_a_singular_matrix_and_an_unknown_n_are_said() -> None:
    z = np.random.default_rng(0).normal(size=(6, 9))
    few = fs.fa(z, n_factors=2, method="pc")
    assert few.glance()["rank"][0] == 5
    assert "singular" in few.summary()
    assert "need n_obs" in fs.fa(np.array(CASES["bfi"]["r"]), corr=True, n_factors=2).summary()


def test_the_leverage_rule_has_no_model_and_hence_no_fit_indices() -> None:
    row = analyse("bfi").glance().iloc[0]
    assert not np.isnan(row["rmsr"])
    row = fs.fa(np.array(CASES["bfi"]["r"]), corr=True, n_obs=2800, method="leverage").glance().iloc[0]
    assert np.isnan(row["rmsr"])
    assert np.isnan(row["chi2"])


@pytest.mark.parametrize("d", [5, 300])
def test_prints_fit_80_columns_at_any_size(d: int) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(6, d, 40)) + rng.normal(size=(1, d, 40))
    w[:, d // 2] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = fs.split(w, kappa=0.5)
    for text in (repr(result), repr(result.fit), result.summary()):
        assert max(map(len, text.splitlines())) <= 80
    assert f"constant: {d // 2}" in repr(result)
    assert "1 constant" in repr(result)
    assert "SS loadings" in result.summary()


def test_results_leave_as_dict_latex_and_html() -> None:
    split = analyse("bfi").split(tau=0.5)
    for result in (split, split.fit):
        plain = json.loads(json.dumps(result.to_dict()))
        assert plain["tidy"]["communality"] == split.communality.tolist()
        assert plain["glance"]["n_factors"] == 5
        assert result.to_latex(caption="").startswith(r"\begin{tabular}")
        assert not re.search(r"(?<!\\)[_%]", result.to_latex()), "LaTeX stops at a bare underscore"
        assert result._repr_html_().count("<table") == 2


def test_glance_of_a_split_counts_every_unit_once() -> None:
    w = np.random.default_rng(0).normal(size=(5, 8, 20))
    w[:, 3] = 1.5
    row = fs.split(w, n_factors=2, method="pc", tau=0.5).glance().iloc[0]
    assert row["n_shared"] + row["n_personal"] + row["n_constant"] == row["n_units"] == 8
    assert row["n_clients"] == 5
    assert row["n_obs"] == 100


def test_update_repeats_the_analysis_and_starts_where_the_last_ended() -> None:
    rng = np.random.default_rng(0)
    pattern = rng.normal(size=(2, 30))
    mixing = rng.normal(size=(10, 2))
    first = mixing @ pattern + rng.normal(size=(8, 10, 30))
    second = first + 0.02 * rng.normal(size=first.shape)
    before = fs.split(first, n_factors=2, tau=0.3, tol=1e-9, max_iter=2000)
    after, fresh = fs.update(before, second), fs.split(second, n_factors=2, tau=0.3, tol=1e-9, max_iter=2000)
    np.testing.assert_allclose(after.communality, fresh.communality, atol=1e-6)
    assert after.fit.n_iter < fresh.fit.n_iter
    assert after.tau == 0.3
    assert fs.update(before.fit, second).n_factors == 2
    with pytest.raises(ValueError, match="must have the 10 units of the previous result, but got 9"):
        fs.update(before, second[:, :9])


def test_methods_are_offered_alike_by_fa_and_the_arrays() -> None:
    for method in factor.METHODS:
        assert fs.fa(np.array(CASES["bfi"]["r"]), corr=True, n_factors=3, method=method).method == method
