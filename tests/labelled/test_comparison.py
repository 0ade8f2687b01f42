"""Comparisons of methods against R, scipy, statsmodels and closed forms."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from _mixed import mixed
from numpy.testing import assert_allclose
from scipy import stats
from statsmodels.stats.multitest import multipletests

import fedstat
from fedstat.stats import ranking

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "compare.json").read_text())


def tidy(values: dict[str, list[float]]) -> pd.DataFrame:
    rows = [(m, s, x) for m, xs in values.items() for s, x in enumerate(xs)]
    return pd.DataFrame(rows, columns=["method", "seed", "accuracy"])


def drawn(methods: int, seeds: int, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    block = rng.normal(scale=0.1, size=seeds)
    return tidy(
        {f"m{i}": (0.7 + 0.01 * i + block + rng.normal(scale=0.01, size=seeds)).tolist() for i in range(methods)}
    )


@pytest.mark.parametrize("model", GOLDEN["models"], ids=lambda m: m["name"])
def test_the_mixed_model_is_that_of_nlme_and_lme4(model):
    found = mixed(pd.DataFrame(model["data"]), reference="fedavg")
    rtol = 2e-5 if model["singular"] else GOLDEN["tolerance"]  # nlme stops a little short of the boundary
    for column in ("estimate", "std_error", "df", "statistic"):
        assert_allclose(found.table[column], model[column], rtol=rtol, atol=1e-12)
    assert_allclose(np.log(found.table["p_value"]), np.log(model["p_value"]), rtol=1e-4, atol=1e-4)
    assert_allclose(found.group_variance, model["lme4_group_variance"], rtol=1e-4, atol=1e-12)
    assert_allclose(found.residual_variance, model["lme4_residual_variance"], rtol=1e-5)
    assert found.singular == model["singular"]
    assert found.converged
    assert found.note.startswith("singular fit" if model["singular"] else "")
    assert bool(found.note) == model["singular"]


def test_paired_tests_and_intervals_are_those_of_r():
    data, golden = pd.DataFrame(GOLDEN["models"][0]["data"]).query("heterogeneity == 'low'"), GOLDEN["paired"]
    found = fedstat.compare(data, reference="fedavg").table.iloc[1:]
    assert found["method"].tolist() == ["fedfac", "fedper"]
    for column in ("p_value", "p_holm", "statistic"):
        assert_allclose(found[column], golden[column], rtol=1e-10)
    for ours, theirs in (("conf", "conf"), ("sim_conf", "bonferroni")):
        expected = [golden[theirs][m] for m in found["method"]]
        assert_allclose(found[[f"{ours}_low", f"{ours}_high"]], expected, rtol=1e-10)


def test_paired_tests_are_those_of_scipy_and_holm_of_statsmodels():
    data = drawn(4, 7)
    found = fedstat.compare(data, reference="m0").table.set_index("method")
    wide = data.pivot(index="seed", columns="method", values="accuracy")
    p = []
    for m in ("m1", "m2", "m3"):
        test = stats.ttest_rel(wide[m], wide["m0"])
        flips = stats.permutation_test((wide[m] - wide["m0"],), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert_allclose(found.loc[m, ["statistic", "p_value"]].tolist(), [test.statistic, test.pvalue])
        assert_allclose(found.loc[m, ["conf_low", "conf_high"]].tolist(), list(test.confidence_interval()))
        assert_allclose(found.loc[m, "p_sign_flip"], flips.pvalue)
        p.append(test.pvalue)
    assert_allclose(found["p_holm"].iloc[1:], multipletests(p, method="holm")[1])
    assert_allclose(found["std_error_mean"], wide.sem())


@pytest.mark.parametrize("seed", range(8))
def test_an_interval_without_zero_is_never_against_holm(seed):
    found = fedstat.compare(drawn(5, 4, seed), reference="m0", level=0.9).table.iloc[1:]
    apart = (found["sim_conf_low"] > 0) | (found["sim_conf_high"] < 0)
    assert (found.loc[apart, "p_holm"] < 0.1).all()
    assert (found["sim_conf_low"] <= found["conf_low"]).all()
    assert (found["sim_conf_high"] >= found["conf_high"]).all()


def test_a_balanced_mixed_model_of_two_methods_is_the_paired_analysis():
    """At one level of heterogeneity a random intercept and a paired t test are the same inference."""
    data = drawn(2, 6).assign(heterogeneity="one")
    row = mixed(data).table.set_index("term").loc["method[m1]"]
    pair = fedstat.compare(data, reference="m0").table.iloc[1]
    for column in ("std_error", "statistic", "df", "p_value", "conf_low", "conf_high"):
        assert_allclose(row[column], pair[column], rtol=1e-6)
    assert_allclose(row["estimate"], pair["difference"])


def test_a_number_may_measure_heterogeneity():
    data = pd.concat([drawn(2, 4, i).assign(heterogeneity=h) for i, h in enumerate((0.1, 0.5, 1.0))])
    assert mixed(data).table["term"].tolist() == [
        "(intercept)", "method[m1]", "heterogeneity", "method[m1]:heterogeneity",
    ]  # fmt: skip


def test_blocks_that_lack_a_method_are_left_out_and_named():
    data = drawn(2, 4)
    data = data[~((data["method"] == "m1") & (data["seed"] == 2))]
    found = fedstat.compare(data, reference="m0")
    assert found.table["n"].tolist() == [0, 3]
    assert found.notes == ("m1: no pair with m0 in block 2; left out",)
    full = fedstat.compare(data[data["seed"] != 2], reference="m0").table
    assert found.table.loc[1, "difference"] == pytest.approx(full.loc[1, "difference"])


def test_one_seed_gives_a_difference_and_no_standard_error():
    found = fedstat.compare(drawn(2, 1), reference="m0")
    assert np.isfinite(found.table.loc[1, "difference"])
    assert found.table.loc[1, ["std_error", "p_value", "conf_low", "p_holm", "sim_conf_high"]].isna().all()
    assert found.notes == ("fewer than 3 pairs, so no interval and no test: m1",)


def test_two_seeds_give_no_interval_and_say_so():
    found = fedstat.compare(drawn(3, 2), reference="m0")
    claims = ["statistic", "p_value", "conf_low", "conf_high", "p_holm", "sim_conf_low", "sim_conf_high"]
    assert found.table[claims].isna().all(axis=None)
    assert found.table.loc[1:, ["difference", "std_error"]].notna().all(axis=None)
    first, _, *shown = repr(found).splitlines()
    assert first.endswith("paired by seed (2 pairs)")
    assert "[" not in "".join(shown)
    assert [line.split()[-1] for line in shown[1:3]] == ["–"] * 2
    assert shown[-1] == "No test and no CI: they need at least 3 pairs."
    assert all("(too few pairs)" in line for line in shown[1:3])


def test_a_method_of_its_own_spread_changes_nothing_for_the_others():
    """One variance for all methods would be too small for the one that varies more, and too large for the others."""
    values = np.random.default_rng(0).normal(size=(3, 5))
    alike, wide = (
        fedstat.compare(tidy(dict(zip("abcde", (values * spread).T.tolist(), strict=True))), reference="a").table
        for spread in ([1, 1, 1, 1, 1], [1, 20, 1, 1, 1])
    )
    columns = ["std_error", "p_value", "conf_low", "conf_high", "sim_conf_low", "sim_conf_high"]
    assert_allclose(wide.loc[2:, columns], alike.loc[2:, columns])
    assert wide.loc[1, "std_error"] > 10 * alike.loc[1, "std_error"]


def test_equal_methods_do_not_differ_and_a_constant_difference_is_not_tested():
    data = tidy({"a": [0.5, 0.7, 0.1], "same": [0.5, 0.7, 0.1], "more": [0.6, 0.8, 0.2]})
    found = fedstat.compare(data, reference="a")
    same, more = found.table.set_index("method").loc["same"], found.table.set_index("method").loc["more"]
    assert same[["difference", "p_value", "p_holm"]].tolist() == [0, 1, 1]
    assert same[["std_error", "conf_low", "conf_high", "sim_conf_low", "sim_conf_high"]].isna().all(), "not [0, 0]"
    assert more["difference"] == pytest.approx(0.1)
    assert more[["std_error", "p_value", "p_holm", "conf_low", "sim_conf_high"]].isna().all()
    assert found.notes == (
        "same: the same difference in every pair, so no standard error and no interval",
        "more: the same difference in every pair, so no standard error and no interval or test",
    )
    text = str(fedstat.compare(data, reference="a"))
    assert "+0.000, equal in all 3 pairs  " in text
    assert "+0.100, equal in all 3 pairs  " in text


def test_blocks_may_be_settings_and_seeds():
    data = pd.concat([drawn(2, 3, i).assign(label=label) for i, label in enumerate("xy")])
    found = fedstat.compare(data, reference="m0", block=["label", "seed"], sample="seed").table
    assert found[["n", "n_pairs"]].to_numpy().tolist() == [[0, 0], [3, 6]]
    wide = data.pivot(index="seed", columns=["label", "method"], values="accuracy")
    of_seeds = np.mean([wide[label]["m1"] - wide[label]["m0"] for label in "xy"], axis=0)
    of_labels = [np.mean(wide[label]["m1"] - wide[label]["m0"]) for label in "xyz" if label in wide]
    assert_allclose(found[["statistic", "p_value"]].iloc[1], stats.ttest_1samp(of_seeds, 0))
    assert_allclose(found["difference"].iloc[1], np.mean(of_labels))
    by_label = fedstat.compare(data, reference="m0", block=["label", "seed"], sample="label").table.iloc[1]
    assert by_label[["n", "n_pairs"]].tolist() == [2, 6]
    assert by_label["std_error"] == pytest.approx(stats.sem(of_labels))


def test_pairs_that_share_a_seed_or_a_data_set_need_a_sample():
    data = pd.concat([drawn(2, 3, i).assign(label=label) for i, label in enumerate("xy")])
    with pytest.raises(ValueError, match="sample must be one of the columns of block, 'label', 'seed', but got None"):
        fedstat.compare(data, reference="m0", block=["label", "seed"])
    with pytest.raises(ValueError, match="but got 'setting'"):
        fedstat.compare(data, reference="m0", block=["label", "seed"], sample="setting")
    with pytest.raises(ValueError, match="one value per block, but got 'm0' twice at seed = 0"):
        fedstat.compare(data, reference="m0")


def test_a_seed_without_a_pair_in_every_setting_is_left_out_and_named():
    data = pd.concat([drawn(2, 4, i).assign(label=label) for i, label in enumerate("xy")])
    data = data[~((data["label"] == "y") & (data["seed"] == 1) & (data["method"] == "m1"))]
    found = fedstat.compare(data, reference="m0", block=["label", "seed"], sample="seed")
    assert found.table["n"].tolist() == [0, 3]
    assert found.notes[-1] == "m1: seed 1 has pairs in some values of label only; left out"
    full = fedstat.compare(data[data["seed"] != 1], reference="m0", block=["label", "seed"], sample="seed").table
    assert found.table["difference"].iloc[1] == full["difference"].iloc[1]


def test_the_sign_flip_needs_few_blocks():
    assert ranking.sign_flip(np.array([1.0, 1.0, 1.0])) == 0.25
    assert np.isnan(ranking.sign_flip(np.ones(17)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda d: fedstat.compare(d, reference="m9"),
            "reference must be one of 'm0', 'm1', but got 'm9'. Did you mean",
        ),
        (lambda d: fedstat.compare(d, reference="m0", value="acuracy"), "got 'acuracy'. Did you mean 'accuracy'"),
        (lambda d: mixed(d[d["seed"] == 0]), "at least 2 values of 'seed', but got 1"),
        (lambda d: mixed(d[(d["method"] == "m0") | (d["heterogeneity"] == "x")]), "none for m1 in y"),
        (lambda d: mixed(d[(d["seed"] < 2) & (d["heterogeneity"] == "x")].iloc[:3]), "leave no residual"),
        (lambda d: mixed(d.assign(accuracy=0.5)), "does not vary within methods"),
        (lambda d: mixed(d.assign(heterogeneity=1.0)), "cannot be told apart"),
    ],
)
def test_what_cannot_be_compared_is_said(call, message):
    data = pd.concat([drawn(2, 3, i).assign(heterogeneity=h) for i, h in enumerate("xy")])
    with pytest.raises(ValueError, match=message):
        call(data)


def test_differences_that_vary_by_rounding_of_float32_alone_are_the_same():
    x = np.array([0.1, 0.7, 0.3, 0.9], np.float32).astype(float)
    data = pd.DataFrame({"method": list("aabb"), "seed": [0, 1, 0, 1], "accuracy": x})
    found = fedstat.compare(data, reference="a")
    row = found.table.set_index("method").loc["b"]
    assert np.isnan(row[["std_error", "p_value", "sim_conf_low"]].astype(float)).all()
    assert "the same difference in every pair" in found.notes[0]
    same = data.assign(accuracy=[*x[:2], *(x[:2] + 1e-9)])
    assert fedstat.compare(same, reference="a").table["p_value"].iloc[1] == 1


@pytest.mark.parametrize("column", ["seed", "method", "heterogeneity"])
@pytest.mark.parametrize("hole", [np.nan, None])
def test_a_row_whose_block_or_method_is_unknown_is_refused(column, hole):
    """Its value can be paired with no other, so every count that holds it is wrong."""
    data = pd.concat([drawn(3, 4, i).assign(heterogeneity=h) for i, h in enumerate("xy")]).astype({column: object})
    data.iloc[5, data.columns.get_loc(column)] = hole
    first = ", ".join(f"{c} = {data[c].iloc[5]}" for c in ("method", "heterogeneity", "seed"))
    with pytest.raises(ValueError, match=f"{column!r} is missing in 1 of 24 rows.*{first}"):
        fedstat.compare(data, reference="m0", block=["heterogeneity", "seed"], sample="seed")
    with pytest.raises(ValueError, match=f"{column!r} is missing in"):
        mixed(data)


def test_values_that_are_no_finite_number_are_refused_but_nan_is_left_out():
    data = drawn(2, 4).assign(heterogeneity="x")
    for bad, seen in ((np.inf, "inf"), (-np.inf, "-inf")):
        broken = data.assign(accuracy=data["accuracy"].where(data["seed"] != 2, bad))
        for call in (lambda d: fedstat.compare(d, reference="m0"), mixed):
            with pytest.raises(ValueError, match=f"'accuracy' must be finite or NaN, but got {seen}.*seed = 2"):
                call(broken)
    with pytest.raises(ValueError, match="'accuracy' must hold numbers, but got dtype complex128"):
        fedstat.compare(data.assign(accuracy=data["accuracy"] + 1j), reference="m0")
    with pytest.raises(ValueError, match="'heterogeneity' must be finite"):
        mixed(data.assign(heterogeneity=[np.inf, 1.0] * 4))
    with pytest.raises(ValueError, match="sign flip needs finite differences"):
        ranking.sign_flip(np.array([1.0, np.nan, 2.0]))


BAD_VALUES = {
    "81%": "Divide percentages by 100",
    "0,81": "Write a decimal point",
    "NA": "Enter NaN for a missing value",
    "": "Enter NaN for a missing value",
    "high": "Enter NaN for a missing value",
}


@pytest.mark.parametrize(("bad", "hint"), BAD_VALUES.items(), ids=[*BAD_VALUES])
def test_a_value_that_is_no_number_is_named_with_its_row(bad, hint):
    data = drawn(2, 4).assign(heterogeneity="x").astype({"accuracy": object})
    data.loc[6, "accuracy"] = bad
    message = f"'accuracy' must hold numbers, but got '{bad}' in the row with method = m1, seed = 2. {hint}"
    with pytest.raises(ValueError, match=re.escape(message)):
        fedstat.compare(data, reference="m0")
    with pytest.raises(ValueError, match=f"'accuracy' must hold numbers, but got '{bad}'"):
        mixed(data)


@pytest.mark.parametrize("missing", [None, pd.NA, np.nan, "nan"])
def test_missing_values_and_numbers_as_text_are_read(missing):
    data = drawn(2, 4)
    expected = fedstat.compare(data.drop(index=6), reference="m0").table
    text = data.assign(accuracy=data["accuracy"].map(repr)).astype({"accuracy": object})
    text.loc[6, "accuracy"] = missing
    pd.testing.assert_frame_equal(fedstat.compare(text, reference="m0").table, expected)


UNLIKE = {
    "text and numbers": (str, int, "'seed' holds 0 and '0', which are different blocks"),
    "text and whole floats": (str, float, "'seed' holds 0.0 and '0', which are different blocks"),
    "text with a space": (lambda seed: f"{seed} ", str, "'seed' holds '0' and '0 ', which are different blocks"),
    "integers and floats": (int, float, ""),
    "kinds of integers": (np.int64, int, ""),
}


@pytest.mark.parametrize(("of_m1", "of_m0", "message"), UNLIKE.values(), ids=UNLIKE)
def test_blocks_that_only_look_alike_are_named(of_m1, of_m0, message):
    data = drawn(2, 4)
    seeds = [of_m1(s) if m == "m1" else of_m0(s) for m, s in zip(data["method"], data["seed"], strict=True)]
    unlike = data.assign(seed=pd.Series(seeds, dtype=object))
    if message:
        with pytest.raises(ValueError, match=message):
            fedstat.compare(unlike, reference="m0")
    else:
        expected = fedstat.compare(data, reference="m0").table
        pd.testing.assert_frame_equal(fedstat.compare(unlike, reference="m0").table, expected)


def test_the_print_counts_the_comparisons_that_intervals_are_adjusted_for():
    data = drawn(4, 4)
    few = data[~((data["method"] == "m3") & (data["seed"] > 1))]
    apart = data.assign(seed=data["seed"].where(data["method"] != "m3", data["seed"] + 10))
    pair = fedstat.compare(data[data["method"] != "m3"], reference="m0").table
    for broken, cell in ((few, "(too few pairs)"), (apart, "– (no pairs)")):
        found = fedstat.compare(broken, reference="m0")
        assert_allclose(found.table["sim_conf_low"].iloc[1:3], pair["sim_conf_low"].iloc[1:3])
        lines = repr(found).splitlines()
        assert lines[-1] == "Paired t tests; CIs simultaneous over 2 of 3 comparisons (Bonferroni)."
        assert cell in next(line for line in lines if line.startswith("  m3"))
    assert repr(fedstat.compare(data, reference="m0")).endswith("CIs simultaneous over 3 comparisons (Bonferroni).")


@pytest.mark.parametrize("scale", [1e-200, 1e-300, 1e200, 1e300])
def test_a_comparison_does_not_depend_on_the_scale(scale):
    data = drawn(3, 5)
    a = fedstat.compare(data, reference="m0").table
    b = fedstat.compare(data.assign(accuracy=data["accuracy"] * scale), reference="m0").table
    for name in ("mean", "std_error_mean", "difference", "std_error", "conf_low", "sim_conf_high"):
        assert_allclose(b[name] / scale, a[name], rtol=1e-9)
    for name in ("statistic", "p_value", "p_holm", "p_sign_flip"):
        assert_allclose(b[name], a[name], rtol=1e-9)


def test_methods_of_one_name_are_one_method():
    """Tables name methods as text, so that 1 and '1' are one."""
    data = tidy({"a": [0.5, 0.7, 0.1], "1": [0.6, 0.8, 0.3]})
    mixed_up = pd.concat([data, data[data["method"] == "1"].assign(method=1)])
    with pytest.raises(ValueError, match="one value per block, but got '1' twice at seed = 0"):
        fedstat.compare(mixed_up, reference="a")


def test_a_mixed_model_counts_no_run_twice():
    data = pd.concat([drawn(2, 4, i).assign(heterogeneity=h) for i, h in enumerate("xy")])
    with pytest.raises(ValueError, match="one value per block, but got 'm0' twice at heterogeneity = x, seed = 0"):
        mixed(pd.concat([data, data]))
