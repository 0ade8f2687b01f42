"""Units drawn towards their layer, and the split by the probability that a unit is shared."""

from __future__ import annotations

import numpy as np
import pytest
import scipy
from made_results import made, pooled_units

import fedstat
from fedstat.results import IccResult, ShrunkenResult
from fedstat.stats.pooling import pool


@pytest.fixture(scope="module")
def agreement() -> IccResult:
    """Agreement on 12 units, of which one is constant, and one identical in all clients."""
    w = np.random.default_rng(0).normal(size=(9, 14, 40)) + np.linspace(0, 2, 14)[:, None] * np.random.default_rng(
        1
    ).normal(size=(14, 40))
    w[:, 3], w[:, 5] = 0, w[0, 5]
    return fedstat.icc(w)


@pytest.fixture(scope="module")
def replicates() -> np.ndarray:
    """Weights (client, replicate, unit, weight); one unit is identical in all clients, but not in replicates."""
    rng = np.random.default_rng(2)
    differences = np.exp(rng.normal(size=16))[:, None] * rng.normal(size=(10, 1, 16, 40))
    w = differences + rng.normal(size=(10, 2, 16, 40))
    w[:, :, 4] = w[:1, :, 4]
    return w


def test_standard_errors_are_those_of_a_plain_jackknife() -> None:
    w = pooled_units().to_numpy()
    found = fedstat.icc(w)
    without = np.array([-np.log1p(-fedstat.icc(np.delete(w, c, axis=0)).agreement) for c in range(len(w))])
    v = (without - without.mean(axis=0)) ** 2
    assert found.errors is not None
    np.testing.assert_allclose(found.errors.std_error, np.sqrt(7 / 8 * v.sum(axis=0)), rtol=1e-9)
    np.testing.assert_allclose(found.errors.df, np.clip(v.sum(axis=0) ** 2 / (v**2).sum(axis=0), 1, 7), rtol=1e-9)
    half = scipy.stats.t.ppf(0.975, found.errors.df) * found.errors.std_error
    np.testing.assert_allclose(found.coefficients.conf_high[:, 1], -np.expm1(np.log1p(-found.agreement) - half))


def test_units_are_pooled_on_the_scale_of_their_intervals(agreement: IccResult) -> None:
    found = agreement.shrunken(margin=0.4)
    with np.errstate(divide="ignore"):
        pooled = pool(-np.log1p(-agreement.agreement), *agreement.errors, most=8)
    table = found.tidy()
    np.testing.assert_array_equal(table["estimate"], -np.expm1(-pooled.estimate))
    np.testing.assert_array_equal(table[["conf_low", "conf_high"]].T, -np.expm1(-np.array(pooled.ends(0.95))))
    is_pooled = ~np.isnan(pooled.estimate)
    assert np.flatnonzero(~is_pooled).tolist() == [3, 5]
    posterior = scipy.stats.t(pooled.df, pooled.estimate, pooled.std_error)
    np.testing.assert_allclose(table["probability"][is_pooled], posterior.sf(-np.log(0.6))[is_pooled])
    assert (table["conf_low"] <= table["estimate"])[is_pooled].all()
    assert found.glance()["n_pooled"].item() == 12


def test_identical_units_are_shared_and_constant_ones_are_not(agreement: IccResult, replicates: np.ndarray) -> None:
    found = agreement.shrunken()
    assert found.probability[5] == 1
    assert np.isnan(found.probability[3])
    assert found.split().group[[3, 5]].tolist() == ["constant", "shared"]
    of_reliability = fedstat.variance_components(replicates).shrunken()
    assert of_reliability.probability[4] == 1
    assert of_reliability.split().shared[4]


def test_low_reliability_is_shared(replicates: np.ndarray) -> None:
    components = fedstat.variance_components(replicates)
    found = components.shrunken(margin=0.4)
    c = components.components
    pooled = pool(-np.log1p(-c.reliability), c.std_error, c.df_interval, most=9)
    others = np.arange(16) != 4
    below = scipy.stats.t(pooled.df, pooled.estimate, pooled.std_error).cdf(-np.log(0.6))
    np.testing.assert_allclose(found.probability[others], below[others])
    assert found.event == "reliability < 0.4"
    assert (components.split(margin=0.4).conclusion[found.split().shared] != "personal").all()
    table = found.split(prob=0.9).tidy()
    np.testing.assert_array_equal(table["icc"], components.agreement)
    assert ((table["probability"] >= 0.9) == (table["group"] == "shared")).all()


def test_the_verb_splits_by_agreement_of_pooled_units() -> None:
    w = pooled_units()
    found = fedstat.split(w, method="icc", tau="posterior", margin=0.3, prob=0.9)
    expected = fedstat.icc(w).shrunken(margin=0.3).split(prob=0.9)
    assert isinstance(found.fit, ShrunkenResult)
    assert found.tidy().equals(expected.tidy())
    assert found.threshold == 0.9
    assert found.fit.margin == 0.3
    assert {"shared", "personal"} == set(found.group)
    text = " ".join(repr(found).split())
    assert "Rule: shared if P(ICC2 > 0.3) >= 0.9 (empirical Bayes); other units are personal" in text
    default = fedstat.split(w, method="icc", tau="posterior")
    assert (default.threshold, default.fit.margin) == (0.95, 0.5)


def test_plots_show_estimates_with_and_without_pooling() -> None:
    found = made("ShrunkenResult")
    for result in (found, found.split()):
        ax = fedstat.plot.forest(result)
        points = [np.asarray(c.get_offsets())[:, 0] for c in ax.collections if len(c.get_offsets()) == 12]
        for values in (found.estimate, found.fit.agreement):
            assert any(np.allclose(np.sort(drawn), np.sort(values)) for drawn in points)
        assert "without pooling" in " ".join(ax.get_xlabel().split())
    lines = [line.get_xdata()[0] for line in fedstat.plot.forest(found.split()).lines]
    assert lines == [0, found.margin]


def test_what_cannot_be_pooled_is_refused() -> None:
    w = pooled_units()
    with pytest.raises(ValueError, match=r"standard errors over clients, but F tests have none\."):
        fedstat.icc(w, inference="F").shrunken()
    with pytest.raises(ValueError, match=r"standard errors over clients, but 2 clients have none\."):
        fedstat.icc(w[:2]).shrunken()
    with pytest.raises(ValueError, match="pooling needs at least 10 units with an interval, but got 6"):
        fedstat.icc(w[:, :6]).shrunken()
    alike = np.random.default_rng(0).normal(size=(8, 12, 30))
    with pytest.raises(ValueError, match="units that differ at least as much as their errors, but beyond"):
        fedstat.icc(alike).shrunken()
    layers = {f"client {c}": {"a.weight": w[c].to_numpy(), "b.weight": alike[c]} for c in range(8)}
    with pytest.raises(ValueError, match="layer 'b': pooling needs units that differ"):
        fedstat.split(layers, layer=["a", "b"], method="icc", tau="posterior")
    for margin in (-0.1, 1.0):
        with pytest.raises(ValueError, match="margin must be a finite number"):
            fedstat.icc(w).shrunken(margin=margin)
    with pytest.raises(ValueError, match="prob must be a finite number"):
        fedstat.icc(w).shrunken().split(prob=1.0)


def test_options_without_effect_are_refused(replicates: np.ndarray) -> None:
    w = pooled_units()
    for options, message in (
        ({"method": "icc", "tau": "posterior", "fdr": 0.1}, "fdr has no effect without method='icc' and tau='test'"),
        ({"method": "icc", "tau": 0.5, "prob": 0.9}, "prob has no effect without method='icc' and tau='posterior'"),
        ({"method": "icc", "margin": 0.9}, "margin has no effect without .* tau='test' or tau='posterior'"),
        ({"tau": "posterior"}, "tau='posterior' is by agreement of clients and needs method='icc'"),
        ({"tau": "posterior", "prob": 0.9}, "prob has no effect without method='icc'"),
        ({"method": "icc", "tau": "later"}, "tau must be"),
    ):
        with pytest.raises(ValueError, match=message):
            fedstat.split(w, **options)
    with pytest.raises(ValueError, match="prob has no effect without"):
        fedstat.split(replicates, method="icc", tau="test", prob=0.9)
    with pytest.raises(ValueError, match="update needs a factor analysis or a split without a test"):
        fedstat.update(fedstat.split(w, method="icc", tau="posterior"), w)


def test_cautions_of_the_analysis_stay() -> None:
    w = pooled_units().to_numpy()
    w[0] *= 2
    found = fedstat.icc(w)
    assert [one.title for one in found.shrunken().cautions()] == ["Clients of unlike size"]
    assert found.shrunken().cautions() == found.cautions()
