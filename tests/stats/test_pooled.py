"""Many methods against one with a common residual variance: against R's multcomp, scipy and closed forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from fedstat.stats import compare, pooled

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "dunnett.json").read_text())
COLUMNS = ["pooled_difference", "pooled_error", "pooled_df", "pooled_p", "pooled_low", "pooled_high"]


def drawn(methods: int, seeds: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    level, of_method = rng.normal(scale=0.1, size=seeds), 0.02 * np.arange(methods)
    x = 0.7 + of_method[:, None] + level + rng.normal(scale=0.01, size=(methods, seeds))
    rows = [(f"m{i}", s, x[i, s]) for i in range(methods) for s in range(seeds)]
    return pd.DataFrame(rows, columns=["method", "seed", "accuracy"])


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: c["name"])
def test_pooled_comparisons_are_those_of_multcomp(case):
    found = compare.paired(pd.DataFrame(case["data"]), reference="m0", level=case["level"]).table.iloc[1:]
    assert_allclose(found["pooled_difference"], case["estimate"], rtol=1e-9)
    assert_allclose(found["pooled_error"], case["std_error"], rtol=1e-9)
    assert (found["pooled_df"] == case["df"]).all()
    half, theirs = found["pooled_high"] - found["pooled_difference"], np.subtract(case["high"], case["estimate"])
    if case["name"] == "unbalanced":  # a bound, which holds whatever the correlations
        assert (half >= theirs).all()
        assert_allclose(half, theirs, rtol=0.05)
        assert (found["pooled_p"] >= np.array(case["p_value"]) - case["tolerance"]).all()
    else:
        assert_allclose(half, theirs, rtol=case["tolerance"])
        assert_allclose(found["pooled_p"], case["p_value"], atol=case["tolerance"])


def test_two_seeds_and_twelve_methods_give_an_interval_that_tells_something():
    row = compare.paired(drawn(12, 2), reference="m0").table.iloc[5]
    assert row["all_high"] - row["all_low"] > 1  # of accuracies: each method's own variance has one degree of freedom
    assert row["pooled_high"] - row["pooled_low"] < 0.1
    assert row["pooled_df"] == 11


def test_two_methods_are_the_paired_t_test():
    row = compare.paired(drawn(2, 5), reference="m0").table.iloc[1]
    plain = ["difference", "std_error", "df", "p_value", "conf_low", "conf_high"]
    assert_allclose(row[COLUMNS].astype(float), row[plain].astype(float), rtol=1e-9)


@pytest.mark.parametrize(("m", "df", "correlation"), [(2, 10, 0.5), (5, 2, 0.5), (11, 11, 0.5), (4, 6, 0.0)])
def test_the_quantile_is_that_of_the_multivariate_t(m, df, correlation):
    c = pooled.quantile(0.95, m, df, correlation=correlation)
    shape = np.full((m, m), correlation) + (1 - correlation) * np.eye(m)
    t = stats.multivariate_t(shape=shape, df=df, seed=0)
    assert_allclose(t.cdf(np.full(m, c), lower_limit=np.full(m, -c), maxpts=200_000), 0.95, atol=2e-4)
    assert_allclose(pooled.p_value(c, m, df, correlation=correlation), 0.05, atol=1e-9)


def test_intervals_hold_together_as_often_as_they_say():
    rng = np.random.default_rng(0)
    half = pooled.quantile(0.9, 4, 8) * np.sqrt(2 / 3)
    x = rng.normal(size=(4000, 5, 3)) + rng.normal(size=(4000, 1, 3))
    residual = x - x.mean(1, keepdims=True) - x.mean(2, keepdims=True) + x.mean((1, 2), keepdims=True)
    sigma = np.sqrt(np.square(residual).sum((1, 2)) / 8)
    apart = np.abs(x[:, 1:].mean(2) - x[:, :1].mean(2)).max(1)
    assert (apart <= half * sigma).mean() == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(("methods", "seeds", "df"), [(2, 1, 0), (12, 1, 0), (2, 2, 1)])
def test_where_blocks_are_too_few_that_is_said_in_place_of_a_number(methods, seeds, df):
    found = compare.paired(drawn(methods, seeds), reference="m0")
    rows = found.table.iloc[1:]
    assert np.isfinite(rows["pooled_difference"]).all()
    assert rows[["pooled_error", "pooled_p", "pooled_low", "pooled_high"]].isna().all(axis=None)
    assert any(re.search(f"too few blocks for any claim: {df} residual", note) for note in found.notes)


def test_a_difference_that_is_constant_has_no_pooled_error():
    data = drawn(3, 4)
    data["accuracy"] = data["seed"] + data["method"].map({"m0": 0.0, "m1": 0.5, "m2": 0.25})
    rows = compare.paired(data, reference="m0").table.iloc[1:]
    assert_allclose(rows["pooled_difference"], [0.5, 0.25])
    assert rows[["pooled_error", "pooled_p", "pooled_low"]].isna().all(axis=None)


def test_a_method_that_shares_no_block_with_the_reference_is_not_compared():
    data = drawn(3, 4)
    alone = data["method"].eq("m2")
    data.loc[alone, "seed"] += 10
    rows = compare.paired(data, reference="m0").table.set_index("method")
    assert rows.loc["m2", COLUMNS].isna().all()
    full = compare.paired(data[~alone], reference="m0").table.set_index("method")
    assert_allclose(rows.loc["m1", COLUMNS].astype(float), full.loc["m1", COLUMNS].astype(float))
