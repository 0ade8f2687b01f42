"""The delete-a-group jackknife of communalities: against refits without clients, and against repeated sampling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

import fedstat
from fedstat._utils.streams import generator
from fedstat.stats import factor, resampling
from fedstat.stats.moments import correlation, moments

LOADINGS = np.zeros((12, 2))
LOADINGS[:5, 0], LOADINGS[5:9, 1] = 1.2, 0.8


def sample(rng: np.random.Generator, clients: int, *, noise: float = 1.0) -> np.ndarray:
    """Two factors, drawn anew for each client; the last three units have none."""
    factors = rng.normal(size=(clients, 2, 30))
    return np.einsum("uf,kfw->kuw", LOADINGS, factors) + noise * rng.normal(size=(clients, 12, 30))


def communality(w: np.ndarray, **options: Any) -> np.ndarray:
    return np.asarray(factor.fit(correlation(moments(w.swapaxes(1, 2).reshape(-1, w.shape[1]))), **options).communality)


def rms_error(errors: list[np.ndarray]) -> np.ndarray:
    return np.sqrt(np.mean(np.square(errors), axis=0))


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
@pytest.mark.parametrize("method", factor.METHODS)
def test_refits_are_analyses_without_each_block(method: factor.Method) -> None:
    """With the initial values and the number of iterations of the split."""
    w = np.random.default_rng(0).normal(size=(9, 20, 12))
    result = fedstat.jackknife(w, n_blocks=4, seed=3, kappa=0.75, method=method)
    assert method != "pa" or not result.converged.any()
    assert np.bincount(result.client_blocks).tolist() == [3, 2, 2, 2]
    expected = [communality(w[result.client_blocks != g], kappa=0.75, method=method) for g in range(4)]
    assert_allclose(result.communality, expected, atol=1e-7)
    assert_allclose(result.std_error, np.sqrt(3 * np.var(expected, axis=0)), atol=1e-7)


def test_blocks_are_clients_or_random_or_groups() -> None:
    w = sample(np.random.default_rng(0), 60)
    assert len(fedstat.jackknife(w[:7], n_factors=2).communality) == 7
    by_default = fedstat.jackknife(w, n_factors=2)
    assert len(by_default.communality) == 50
    other = fedstat.jackknife(w, n_factors=2, seed=1)
    assert (by_default.client_blocks != other.client_blocks).any()
    assert (resampling.divide_clients(60, 60, seed=1) == np.arange(60)).all()
    names = np.array(list("bacde"))[generator(0, "names").integers(0, 5, 60)]
    groups = fedstat.jackknife(w, n_factors=2, groups=names)
    assert_allclose(groups.communality[0], communality(w[names != "a"], n_factors=2), atol=1e-7)
    within = fedstat.jackknife(w, n_factors=2, groups=names, claim="these groups", n_blocks=20)
    assert (names[np.argmax(within.client_blocks == 3)] == names[within.client_blocks == 3]).all()
    n = np.bincount(within.block_groups)[within.block_groups]
    deviations = within.communality - within.communality.mean(axis=0)
    assert_allclose(within.std_error, np.sqrt((((n - 1) / n)[:, None] * deviations**2).sum(axis=0)), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_blocks": 1}, "n_blocks must be"),
        ({"n_blocks": 8}, "n_blocks must be"),
        ({"groups": ["a"] * 7}, r"groups must be at least 2, .* but got 1 group"),
        ({"groups": [0, 1]}, "groups"),
        ({"groups": [0, 0, 0, 1, 1, 1, 1]}, "a claim about new groups needs at least 5 groups, but got 2"),
        ({"groups": [0, 0, 0, 1, 2, 3, 4], "n_blocks": 2}, "n_blocks has no effect"),
        ({"groups": [0, 0, 0, 1, 2, 2, 2], "claim": "these groups"}, "needs at least 2 clients in each group, .* in 1"),
        ({"claim": "these groups"}, "claim has no effect without groups"),
        ({"method": "icc"}, "jackknife needs a method of factor analysis"),
    ],
)
def test_blocks_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedstat.jackknife(sample(np.random.default_rng(0), 7), n_factors=2, **options)


def test_a_constant_unit_has_no_standard_error() -> None:
    w = sample(np.random.default_rng(0), 8)
    w[:, 3] = 0
    w[1:, 4] = 0  # varies in one client only
    result = fedstat.jackknife(w, n_factors=2, method="pc")
    assert np.flatnonzero(np.isnan(result.std_error)).tolist() == [3, 4]
    assert np.flatnonzero(np.isnan(result.df)).tolist() == [3, 4]


def ratios_to_truth(draw: Any, *all_options: dict[str, Any]) -> list[float]:
    """Median over units: root mean square standard error / standard deviation over repeated sampling, by options."""
    rng = np.random.default_rng(1)
    truth = np.std([communality(draw(rng), n_factors=2) for _ in range(150)], axis=0, ddof=1)
    samples = [draw(rng) for _ in range(10)]
    errors = [[fedstat.jackknife(w, n_factors=2, **options).std_error for w in samples] for options in all_options]
    return [np.median(rms_error(one) / truth) for one in errors]


COUNTRIES = np.repeat([0, 1, 2], 7)
OF_COUNTRIES = LOADINGS + 0.6 * np.random.default_rng(6).normal(size=(3, 12, 2))


def of_countries(rng: np.random.Generator) -> np.ndarray:
    """Clients of three groups with loadings of their own, the same in all samples."""
    factors = rng.normal(size=(21, 2, 30))
    return np.einsum("kuf,kfw->kuw", OF_COUNTRIES[COUNTRIES], factors) + rng.normal(size=(21, 12, 30))


INITIAL = np.random.default_rng(5).uniform(-1, 1, size=(12, 30))
CASES: dict[str, tuple[Any, dict[str, Any], float]] = {
    "each client": (lambda rng: sample(rng, 20), {}, 0.2),
    "10 blocks": (lambda rng: sample(rng, 40), {"n_blocks": 10}, 0.2),
    "these groups": (of_countries, {"groups": COUNTRIES, "claim": "these groups"}, 0.2),
    "6 clients": (lambda rng: sample(rng, 6), {}, 0.25),
    "near common initial parameters": (lambda rng: INITIAL + 0.05 * sample(rng, 12), {}, 0.2),
}


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
@pytest.mark.parametrize("name", CASES)
def test_standard_errors_are_those_of_repeated_sampling(name: str) -> None:
    """Medians over units, whose Monte Carlo error is 6 to 10%; a unit without a factor has an unstable fit."""
    draw, options, tolerance = CASES[name]
    (ratio,) = ratios_to_truth(draw, options)
    assert abs(ratio - 1) < tolerance


@pytest.mark.filterwarnings("ignore::fedstat.results.ConvergenceWarning", "ignore::fedstat.results.AgreementWarning")
def test_dependent_clients_need_their_groups() -> None:
    """Clients of a group have common loadings: single clients give a third too little, groups do not."""
    groups = np.arange(40) // 4

    def draw(rng: np.random.Generator) -> np.ndarray:
        loadings = LOADINGS + 0.6 * rng.normal(size=(10, 12, 2))
        return np.einsum("kuf,kfw->kuw", loadings[groups], rng.normal(size=(40, 2, 30))) + rng.normal(size=(40, 12, 30))

    by_client, by_group = ratios_to_truth(draw, {}, {"groups": groups})
    assert 0.5 < by_client < 0.8
    assert 0.9 < by_group < 1.5


@pytest.mark.filterwarnings("ignore::fedstat.results.AgreementWarning")
def test_a_diverged_client_dominates_and_is_reported() -> None:
    w = sample(np.random.default_rng(0), 20)
    alike = fedstat.jackknife(w, n_factors=2)
    w[3] = 10 * np.random.default_rng(1).normal(size=w[3].shape)
    diverged = fedstat.jackknife(w, n_factors=2)
    assert np.median(diverged.df) < 1.5 < 4 < np.median(alike.df)
    titles = [[caution.title for caution in result.cautions()] for result in (alike, diverged)]
    assert "Few clients dominate" not in titles[0]
    assert "Few clients dominate" in titles[1]


@pytest.mark.filterwarnings("ignore::fedstat.results.AgreementWarning")
def test_factors_that_are_not_identified_are_reported_since_standard_errors_are_too_large() -> None:
    """Units without common factors: the eigenvalues at the cut are near each other."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        return rng.normal(size=(20, 12, 30))

    rng = np.random.default_rng(2)
    truth = np.std([communality(draw(rng), n_factors=4, method="pc") for _ in range(200)], axis=0, ddof=1)
    results = [fedstat.jackknife(draw(rng), n_factors=4, method="pc") for _ in range(20)]
    assert np.median(rms_error([result.std_error for result in results]) / truth) > 1.3
    reported = ["Factors not identified" in [caution.title for caution in result.cautions()] for result in results]
    assert np.mean(reported) > 0.8
    identified = fedstat.jackknife(sample(rng, 20), n_factors=2)
    assert not [caution for caution in identified.cautions() if caution.title == "Factors not identified"]
