"""Components of clients in groups against lme4, against plain loops and closed forms, and by simulation."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from fedstat.stats import nested, reml, resampling
from fedstat.stats import variance_components as one_way

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/nested.json").read_text())
METHODS = ("moments", "reml")
CLAIMS = ("these groups", "new groups")
SIZES = (2, 5, 3, 2, 7)


def codes_of(sizes: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.arange(len(sizes)), sizes)


def draw(
    sizes: tuple[int, ...] = SIZES, *, units: int = 3, weights: int = 20, of_groups: float = 1, seed: int = 0
) -> np.ndarray:
    rng = np.random.default_rng(seed)
    groups = np.sqrt(of_groups) * rng.normal(size=(len(sizes), 1, units, weights))
    clients = rng.normal(size=(sum(sizes), 1, units, weights))
    return groups[codes_of(sizes)] + clients + rng.normal(size=(sum(sizes), 2, units, weights))


def estimate(w: Any, codes: np.ndarray, **options: Any) -> tuple[one_way.Components, nested.GroupComponents]:
    return nested.components(reml.gram(w), codes, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_reml_is_that_of_lme4(case: dict[str, Any]) -> None:
    w = np.array(case["weights"]).reshape(case["shape"])[:, :, None]
    clients, groups = estimate(w, np.array(case["group"]) - 1, method="reml")
    found = np.array([groups.between[0], clients.between[0], clients.within[0]])
    expected = np.array([case["groups"], case["clients"], case["noise"]])
    np.testing.assert_allclose(found, expected, rtol=GOLDEN["tolerance"], atol=1e-8)


def test_golden_cases_reach_both_boundaries() -> None:
    at_0 = {(case["groups"] < 1e-8, case["clients"] < 1e-8) for case in GOLDEN["cases"]}
    assert at_0 == set(itertools.product([False, True], repeat=2))


def test_balanced_data_have_the_mean_squares_of_textbooks() -> None:
    g, n, r, weights = 5, 4, 3, 20
    rng = np.random.default_rng(0)
    w = rng.normal(size=(g, 1, 1, 1, weights)) + rng.normal(size=(g, n, 1, 1, weights))
    w = w + rng.normal(size=(g, n, r, 1, weights))
    of_groups, of_clients = w.mean(axis=(1, 2)), w.mean(axis=2)
    ms_groups = n * r * of_groups.var(axis=0, ddof=1).mean()
    ms_clients = r * of_clients.var(axis=1, ddof=1).mean()
    ms_noise = w.var(axis=2, ddof=1).mean()
    expected = (ms_groups - ms_clients) / (n * r), (ms_clients - ms_noise) / r, ms_noise
    for method in METHODS:
        clients, groups = estimate(w.reshape(g * n, r, 1, weights), codes_of((n,) * g), method=method)
        found = groups.between[0], clients.between[0], clients.within[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert groups.statistic[0] == pytest.approx(ms_groups / ms_clients)
        assert clients.reliability[0] == pytest.approx(1 - ms_noise / ms_clients)
        total = expected[0] + expected[1] + expected[2] / r
        assert groups.proportion[0] == pytest.approx(expected[0] / total, rel=1e-6)


def test_two_groups_have_the_statistic_of_welch() -> None:
    w = draw((3, 6), units=1, weights=1)
    y = w.mean(axis=1).ravel()
    _, groups = estimate(w, codes_of((3, 6)), claim="these groups")
    expected = scipy.stats.ttest_ind(y[:3], y[3:], equal_var=False).statistic ** 2
    assert groups.statistic[0] == pytest.approx(expected)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 3), (1, 2, 3)])
def test_few_permutations_are_all_tried(sizes: tuple[int, ...]) -> None:
    """A group of one client has no part."""
    w, codes = draw(sizes, units=2, of_groups=3), codes_of(sizes)
    _, groups = estimate(w, codes, claim="these groups" if min(sizes) > 1 else "new groups")
    keep = np.bincount(codes)[codes] > 1
    w, codes = w[keep], np.unique(codes[keep], return_inverse=True)[1]
    orders = sorted(set(itertools.permutations(codes.tolist())))
    under = np.array([_f(w, np.array(order)) for order in orders])
    observed = _f(w, codes)
    np.testing.assert_allclose(groups.statistic, observed)
    np.testing.assert_allclose(groups.p_value, (under >= observed * (1 - 1e-9)).mean(axis=0))
    assert (groups.exact, groups.n_permutations) == (True, len(orders))
    equal = [sorted(map(tuple, _members(order))) == sorted(map(tuple, _members(codes.tolist()))) for order in orders]
    assert groups.least == pytest.approx(np.mean(equal))


def _members(codes: Sequence[int]) -> list[list[int]]:
    """Clients of each group, whatever its number."""
    return [np.flatnonzero(np.array(codes) == g).tolist() for g in sorted(set(codes))]


def _f(w: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """F of each unit, by a loop over groups."""
    y, n = w.mean(axis=1), np.bincount(codes)
    between, squares = 0.0, []
    for g in range(len(n)):
        of_group = y[codes == g]
        between = between + n[g] * np.square(of_group.mean(axis=0) - y.mean(axis=0)).sum(axis=-1)
        squares.append(np.square(of_group - of_group.mean(axis=0)).sum(axis=(0, -1)))
    variances = [s / (k - 1) for s, k in zip(squares, n, strict=True)]
    return np.asarray(between / sum((1 - k / len(y)) * v for k, v in zip(n, variances, strict=True)))


def test_one_group_of_several_clients_has_no_test() -> None:
    _, groups = estimate(draw((1, 1, 4)), codes_of((1, 1, 4)))
    assert np.isnan(groups.p_value).all()
    assert (groups.least, groups.n_permutations) == (1, 0)


@pytest.mark.parametrize("method", METHODS)
def test_estimates_without_a_client_or_group_are_those_of_the_others(method: Any) -> None:
    w, codes = draw(), codes_of(SIZES)
    s = nested._products(reml.gram(w), codes)
    full = nested._all_clients(s)
    fit: Any = nested._moments if method == "moments" else lambda x: nested._reml(x, r=2)
    left = {"client": (nested._without_clients(s, full), range(len(codes)))}
    left["group"] = (nested._without_groups(full), range(len(SIZES)))
    for what, (sets, numbers) in left.items():
        without = fit(sets)
        for i in numbers:
            keep = codes != i if what == "group" else np.arange(len(codes)) != i
            rest = fit(
                nested._all_clients(
                    nested._products(reml.gram(w[keep]), np.unique(codes[keep], return_inverse=True)[1])
                )
            )
            for a, b in zip(without, rest, strict=True):
                np.testing.assert_allclose(a[:, i], b[:, 0], rtol=1e-5)


def test_clients_within_groups_are_the_one_way_analysis_with_groups_as_fit() -> None:
    w, codes = draw(), codes_of(SIZES)
    indicator = (codes[:, None] == np.arange(len(SIZES))).astype(float)
    sums = one_way.parts(w)
    means = w.mean(axis=1)
    residual = means - np.stack([means[codes == g].mean(axis=0) for g in range(len(SIZES))])[codes]
    basis = indicator / np.sqrt(indicator.sum(axis=0))
    expected = one_way.components(sums._replace(between=np.square(residual).sum(axis=-1), design=basis))
    found, _ = estimate(w, codes, claim="these groups")
    for name in ("between", "within", "reliability", "reliability_replicate", "df"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("method", METHODS)
def test_moments_are_unbiased_under_unequal_noise_and_variances_of_groups(method: Any) -> None:
    """The mean over 4000 weights; maximum likelihood, which assumes equal noise, is another number."""
    sizes, units = (2, 3, 4, 8), 4000
    codes, rng = codes_of(sizes), np.random.default_rng(0)
    spread = np.array([3.0, 1.0, 1.0, 0.5])[codes][:, None, None, None]
    groups = rng.normal(size=(4, 1, units, 1))[codes]
    clients = spread * rng.normal(size=(len(codes), 1, units, 1))
    w = groups + clients + spread * rng.normal(size=(len(codes), 2, units, 1))
    sums = reml.gram(w)
    _, found = nested.components(sums.pooled(), codes, method=method)
    error = np.std(nested.components(sums, codes)[1].between) / np.sqrt(units)
    is_unbiased = abs(found.between[0] - 1) < 3 * error
    assert is_unbiased == (method == "moments")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("claim", CLAIMS)
def test_units_do_not_depend_on_other_units_or_on_the_kind_of_array(method: Any, claim: Any) -> None:
    w, codes = draw(), codes_of(SIZES)
    whole = estimate(w, codes, method=method, claim=claim)
    for i in range(w.shape[2]):
        for all_units, alone in zip(
            whole, estimate(w[:, :, i : i + 1], codes, method=method, claim=claim), strict=True
        ):
            for a, b in zip(all_units, alone, strict=True):
                np.testing.assert_allclose(a[i] if np.ndim(a) else a, b[0] if np.ndim(b) else b, rtol=1e-6)
    for a, b in zip(whole, estimate(torch.tensor(w), codes, method=method, claim=claim), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_sums_add_over_weights_and_pool_over_units() -> None:
    w, codes = draw(), codes_of(SIZES)
    whole = reml.gram(w)
    joined = reml.gram(w.reshape(len(codes), 2, 1, -1))
    pairs = (whole, reml.gram(w[..., :8]) + reml.gram(w[..., 8:])), (whole.pooled(), joined)
    for first, second in pairs:
        for a, b in zip(nested.components(first, codes), nested.components(second, codes), strict=True):
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-6)


def test_the_mean_of_all_clients_costs_no_digits() -> None:
    w, codes = draw(), codes_of(SIZES)
    for a, b in zip(estimate(w, codes), estimate(w + 1e6, codes), strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


def test_equal_clients_of_a_group_have_no_reliability() -> None:
    w, codes = draw(), codes_of(SIZES)
    first = np.unique(codes, return_index=True)[1][codes]
    w[:, :, 1] = w[first][:, :, 1]
    clients, groups = estimate(w, codes)
    assert clients.identical.tolist() == [False, True, False]
    for found in (clients.reliability, groups.proportion, groups.between, groups.p_value):
        assert np.isnan(found).tolist() == [False, True, False]


def test_intervals_of_clients_need_five_groups_of_clients() -> None:
    sizes = (1, 1, 4, 3, 5, 2)
    clients, groups = estimate(draw(sizes), codes_of(sizes))
    assert np.isnan(clients.conf_low).all()
    assert np.isfinite(groups.conf_low).all()
    assert np.isfinite(estimate(draw((2, *sizes[1:])), codes_of((2, *sizes[1:])))[0].conf_low).all()


def test_groups_are_strata_of_the_jackknife() -> None:
    """Leaving out single clients estimates the error of a mean over groups as the sum of the groups' errors."""
    rng, codes = np.random.default_rng(0), codes_of(SIZES)
    y = rng.normal(size=len(codes)) + 10 * rng.normal(size=len(SIZES))[codes]
    size = np.bincount(codes)
    means = np.array([y[codes == g].mean() for g in range(len(size))])
    left = means.mean() - (y - means[codes]) / (size[codes] - 1) / len(size)
    error, _ = resampling.jackknife(left[:, None], 10, codes)
    expected = np.sqrt(sum(y[codes == g].var(ddof=1) / n for g, n in enumerate(size))) / len(size)
    assert error[0] == pytest.approx(expected)


def test_the_search_of_the_likelihood_finds_the_smallest_of_several_minima() -> None:
    t = reml.minimize(lambda t: np.cos(3 * np.log(t)) + 0.1 * np.log(t) ** 2, (2,), 1.0)
    expected = scipy.optimize.minimize_scalar(
        lambda x: np.cos(3 * x) + 0.1 * x**2, bounds=(-2, 0), method="bounded", options={"xatol": 1e-10}
    ).x
    np.testing.assert_allclose(np.log(t), expected, atol=1e-6)
