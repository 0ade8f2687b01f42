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
def test_refits_are_analyses_without_each_group(method: factor.Method) -> None:
    """With the initial values and the number of iterations of the split."""
    w = np.random.default_rng(0).normal(size=(9, 20, 12))
    result = fedstat.jackknife(w, n_groups=4, seed=3, kappa=0.75, method=method)
    assert method != "pa" or not result.converged.any()
    assert np.bincount(result.client_groups).tolist() == [3, 2, 2, 2]
    expected = [communality(w[result.client_groups != g], kappa=0.75, method=method) for g in range(4)]
    assert_allclose(result.communality, expected, atol=1e-7)
    assert_allclose(result.std_error, np.sqrt(3 * np.var(expected, axis=0)), atol=1e-7)


def test_groups_are_clients_or_random_or_clusters() -> None:
    w = sample(np.random.default_rng(0), 60)
    assert len(fedstat.jackknife(w[:7], n_factors=2).communality) == 7
    by_default = fedstat.jackknife(w, n_factors=2)
    assert len(by_default.communality) == 50
    other = fedstat.jackknife(w, n_factors=2, seed=1)
    assert (by_default.client_groups != other.client_groups).any()
    assert (resampling.divide_clients(60, 60, seed=1) == np.arange(60)).all()
    names = np.array(["b", "a", "c"])[generator(0, "names").integers(0, 3, 60)]
    clusters = fedstat.jackknife(w, n_factors=2, clusters=names)
    assert_allclose(clusters.communality[0], communality(w[names != "a"], n_factors=2), atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_groups": 1}, "n_groups must be"),
        ({"n_groups": 8}, "n_groups must be"),
        ({"clusters": ["a"] * 7}, r"clusters must be at least 2, but got 1 \(a\)"),
        ({"clusters": [0, 1]}, "clusters"),
        ({"clusters": [0, 0, 0, 1, 1, 1, 1], "n_groups": 2}, "n_groups has no effect"),
        ({"method": "icc"}, "jackknife needs a method of factor analysis"),
    ],
)
def test_groups_that_do_not_exist_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fedstat.jackknife(sample(np.random.default_rng(0), 7), n_factors=2, **options)


def test_a_single_client_has_no_standard_error() -> None:
    with pytest.raises(ValueError, match="at least 2 clients"):
        fedstat.jackknife(sample(np.random.default_rng(0), 1), n_factors=2)


def test_a_constant_unit_has_no_standard_error() -> None:
    w = sample(np.random.default_rng(0), 8)
    w[:, 3] = 0
    w[1:, 4] = 0  # varies in one client only
    result = fedstat.jackknife(w, n_factors=2, method="pc")
    assert np.flatnonzero(np.isnan(result.std_error)).tolist() == [3, 4]
    assert np.flatnonzero(np.isnan(result.df)).tolist() == [3, 4]
