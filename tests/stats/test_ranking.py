"""Friedman's test and Nemenyi's comparison against scipy, Demšar's published example, and scikit-posthocs."""

from __future__ import annotations

import json
import math
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
import scipy

from fedstat.stats import ranking

# Demšar (2006), Table 6: ranks of C4.5 and three variants of it on 14 data sets.
DEMSAR = np.array(
    [
        [4, 3, 2, 1], [1, 2, 3, 4], [4, 1, 2, 3], [4, 1, 3, 2], [4, 2, 3, 1], [1, 2.5, 4, 2.5], [3, 2, 4, 1],
        [2.5, 2.5, 4, 1], [4, 3, 2, 1], [2.5, 2.5, 2.5, 2.5], [4, 2.5, 1, 2.5], [3, 2, 4, 1], [4, 1, 2, 3],
        [3, 1, 4, 2],
    ]
)  # fmt: skip
GOLDEN = json.loads((Path(__file__).parents[1] / "golden/ranking.json").read_text())


def test_the_published_example_of_demsar():
    """Its χ²_F = 9.28 and F_F = 3.69 have no correction for ties, and its CD is rounded."""
    found = ranking.friedman(-DEMSAR)
    np.testing.assert_array_equal(found.ranks, DEMSAR)
    np.testing.assert_allclose(found.mean_ranks, [3.143, 2.000, 2.893, 1.964], atol=5e-4)
    ties = 1 - (60 + 3 * 6) / (14 * (4**3 - 4))  # one data set with four alike, three with two
    plain = found.statistic * ties
    assert plain == pytest.approx(9.28, abs=0.005)
    assert 13 * plain / (14 * 3 - plain) == pytest.approx(3.69, abs=0.005)
    assert ranking.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert ranking.critical_difference(4, 14, level=0.9) == pytest.approx(1.12, abs=0.005)


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_values_are_those_of_demsars_table(k, q):
    assert ranking.critical_difference(k, 20) == pytest.approx(q * math.sqrt(k * (k + 1) / 120), rel=3e-4)


@pytest.mark.parametrize("ties", [False, True])
def test_the_statistic_is_scipys(ties):
    rng = np.random.default_rng(4)
    x = rng.normal(size=(7, 6)) + np.arange(6) / 3
    x = x.round() if ties else x
    found = ranking.friedman(x)
    assert found.statistic == pytest.approx(scipy.stats.friedmanchisquare(*x.T).statistic)


def enumerated(ranks):
    """Share of all permutations within blocks with as large a sum of squared rank sums: a plain loop."""
    found = [np.square(np.sum(every, axis=0)).sum() for every in product(*(permutations(block) for block in ranks))]
    return np.mean(np.array(found) >= np.square(ranks.sum(axis=0)).sum() - 1e-9)


@pytest.mark.parametrize("shape", [(2, 3), (3, 3), (4, 3), (3, 4), (2, 5), (5, 3)])
@pytest.mark.parametrize("ties", [False, True])
def test_p_values_are_shares_of_all_permutations(shape, ties):
    x = np.random.default_rng(shape).normal(size=shape)
    found = ranking.friedman((2 * x).round() if ties else x)
    assert found.exact
    assert found.p_value == pytest.approx(enumerated(found.ranks))


# Siegel (1956), Nonparametric statistics for the behavioral sciences, Table N: blocks, methods, χ², p.
SIEGEL = [(3, 3, 6.0, 0.028), (3, 3, 14 / 3, 0.194), (4, 3, 6.5, 0.042), (4, 3, 6.0, 0.069), (4, 3, 8.0, 0.0046),
          (2, 4, 6.0, 0.042), (3, 4, 7.4, 0.033), (3, 4, 7.0, 0.054)]  # fmt: skip


@pytest.mark.parametrize(("blocks", "methods", "statistic", "p"), SIEGEL)
def test_p_values_are_those_of_siegels_table(blocks, methods, statistic, p):
    rng = np.random.default_rng(0)
    drawn = (ranking.friedman(rng.normal(size=(blocks, methods))) for _ in range(3000))
    found = next(one for one in drawn if one.statistic == pytest.approx(statistic))
    assert found.p_value == pytest.approx(p, abs=6e-4)


def test_where_permutations_are_too_many_random_ones_give_the_p_value_of_the_f_distribution():
    """With 40 blocks F's distribution is as good as exact."""
    rng = np.random.default_rng(3)
    for _ in range(5):
        found = ranking.friedman(rng.normal(size=(40, 12)) + np.arange(12) / 30)
        assert not found.exact
        p = scipy.stats.f.sf(found.f, found.df, found.f_df)
        assert found.p_value == pytest.approx(p, abs=4 * math.sqrt(p / 10_000) + 2e-3)


def test_f_is_that_of_an_analysis_of_variance_of_the_ranks():
    """Without ties Iman and Davenport's F is the F of ranks = method + block."""
    import pandas as pd
    import statsmodels.api as sm
    from statsmodels.formula.api import ols

    x = np.random.default_rng(0).normal(size=(5, 4)) + np.arange(4) / 2
    found = ranking.friedman(x)
    long = {"rank": found.ranks.ravel(), "method": np.tile(np.arange(4), 5), "block": np.repeat(np.arange(5), 4)}
    table = sm.stats.anova_lm(ols("rank ~ C(method) + C(block)", pd.DataFrame(long)).fit(), typ=2)
    assert found.f == pytest.approx(table.loc["C(method)", "F"])
    assert (found.df, found.f_df) == tuple(table["df"].iloc[[0, 2]])


def test_all_pairs_are_those_of_scikit_posthocs():
    found = ranking.friedman(GOLDEN["values"])
    np.testing.assert_allclose(ranking.nemenyi(found.mean_ranks, len(GOLDEN["values"])), GOLDEN["p"], atol=1e-6)


def test_a_difference_is_critical_where_its_p_value_is_five_percent():
    distance = ranking.critical_difference(33, 6)
    assert ranking.nemenyi([1.0, 1.0 + distance, *np.full(31, 5.0)], 6)[0, 1] == pytest.approx(0.05, abs=1e-6)


def test_groups_are_the_largest_and_together_hold_every_pair_that_is_close():
    rng = np.random.default_rng(1)
    for distance in (0.1, 1.0, 3.0, 20.0):
        rank = rng.uniform(1, 10, 12)
        found = ranking.groups(rank, distance)
        close = {(i, j) for i in range(12) for j in range(12) if i != j and abs(rank[i] - rank[j]) <= distance}
        assert {(i, j) for own in found for i in own for j in own if i != j} == close
        assert not any(set(a) < set(b) for a in found for b in found)


def test_blocks_that_say_nothing_and_blocks_that_agree():
    alike = ranking.friedman(np.ones((3, 4)))
    assert math.isnan(alike.statistic)
    assert math.isnan(alike.p_value)
    assert (alike.mean_ranks == 2.5).all()
    agreed = ranking.friedman(np.tile([3.0, 1.0, 2.0], (4, 1)))
    assert (agreed.f, agreed.statistic, agreed.p_value) == (math.inf, 8.0, pytest.approx(6**-3))


@pytest.mark.parametrize(
    ("values", "said"),
    [([[1, 2, 3]], "2 blocks"), ([[1, 2], [3, 4]], "3 methods"), ([[1, 2, 3], [4, np.nan, 6]], "block 1, method 1")],
)
def test_what_cannot_be_ranked_is_named(values, said):
    with pytest.raises(ValueError, match=said):
        ranking.friedman(values)
