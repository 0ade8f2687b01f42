"""Dynamic FedFac's analyses start from the last round's communalities where that is sound."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from fedstat.stats import factor

FEDFAC = importlib.import_module("fedstat.fl.algorithms.fedfac")


def correlation(rows, moved=0.0, d=12, k=3):
    """Of units with some factors; ``moved``: how far the rows went since the round before."""
    rng, after = np.random.default_rng(0), np.random.default_rng(1)
    z = rng.normal(size=(rows, k)) @ rng.normal(size=(k, d)) + rng.normal(size=(rows, d))
    return np.corrcoef(z + moved * after.normal(size=z.shape), rowvar=False)


@pytest.fixture
def starts(monkeypatch):
    """What each analysis was started from."""
    found, plain = [], factor.fit

    def fit(r, **options):
        found.append(options.get("init"))
        return plain(r, **options)

    monkeypatch.setattr(factor, "fit", fit)
    return found


def test_a_round_starts_from_the_last_ones_communalities(starts):
    before = factor.fit(correlation(200), kappa=0.6)
    starts.clear()
    r = correlation(200, moved=0.3)
    fit = FEDFAC._analyze(r, 0.6, "pa", before)
    (given,) = starts
    np.testing.assert_array_equal(given, before.communality)
    end, cold = (factor.fit(r, kappa=0.6, init=s, tol=1e-10, max_iter=5000) for s in (before.communality, "pc"))
    np.testing.assert_allclose(end.communality, cold.communality, atol=1e-8)  # one fixed point
    assert int(fit.n_iter) < int(factor.fit(r, kappa=0.6).n_iter)


def test_of_many_factors_there_may_be_one_more_or_less(starts):
    r = correlation(400, moved=0.3, d=60, k=60)
    g = int(factor.fit(r, kappa=0.75).n_factors)
    assert g >= 20
    before = factor.fit(correlation(400, d=60, k=60), n_factors=g + 1)
    starts.clear()
    fit = FEDFAC._analyze(r, 0.75, "pa", before)
    assert [start is None for start in starts] == [False]
    assert int(fit.n_factors) == g
    assert int(fit.n_iter) < int(factor.fit(r, kappa=0.75).n_iter)


@pytest.mark.parametrize(
    "why", ["not converged", "heywood", "did not converge from there", "another estimator", "other factors"]
)
def test_otherwise_it_starts_from_the_principal_components(why, starts):
    r, before = correlation(200), factor.fit(correlation(200), kappa=0.6)
    kappa, method, expected = 0.6, "pa", [None]
    if why == "not converged":
        before = before._replace(converged=np.False_)
    elif why == "heywood":
        before = before._replace(heywood=np.arange(12) == 3)
    elif why == "another estimator":
        method = "minres"
    elif why == "other factors":
        before, expected = factor.fit(r, n_factors=2), [r, None]
        assert int(factor.fit(r, kappa=kappa).n_factors) == 3
    else:
        r, kappa = correlation(14), 0.97
        assert not bool(factor.fit(r, kappa=kappa, init=before.communality).converged)
        expected = [before.communality, None]
    starts.clear()
    fit = FEDFAC._analyze(r, kappa, method, before)
    assert [start is None for start in starts] == [start is None for start in expected]
    np.testing.assert_array_equal(fit.communality, factor.fit(r, kappa=kappa, method=method).communality)
