"""One contract of results: every result of the package prints itself, gives its tables and leaves as plain values."""

from __future__ import annotations

import json
import pkgutil
import re
import warnings
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields
from importlib import import_module
from importlib.util import find_spec

import matplotlib as mpl
import numpy as np
import pytest
import torch
import xarray as xr
from made_results import DATA, MADE, NAMES, TABLE, made, outputs
from matplotlib import pyplot as plt
from pages import Page

import fedstat
from fedstat.results.base import TERMINAL, Caution, LayerResults, Result


def classes(of: type = Result) -> Iterator[type]:
    for sub in of.__subclasses__():
        yield from (sub, *classes(sub))


def test_every_result_of_the_package_is_checked_here() -> None:
    for found in pkgutil.walk_packages(fedstat.__path__, "fedstat.", onerror=lambda _: None):
        if not found.name.endswith("__main__") and (find_spec("flwr") or ".flower" not in found.name):
            import_module(found.name)
    assert {c.__name__ for c in classes() if not c.__name__.startswith("_")} == set(MADE)


@pytest.mark.parametrize("name", MADE)
def test_results_keep_the_contract(name: str) -> None:
    result = made(name)
    assert type(result).__name__ == name
    text = repr(result)
    most = 100 if name == "RunsResult" else TERMINAL  # rows of its tables are wider, and are not wrapped
    assert max(map(len, text.splitlines())) <= most
    assert len(result.summary()) >= len(text)
    assert " ".join(text.split()).endswith(" ".join(map(str, result.cautions())))
    tidy, glance = result.tidy(), result.glance()
    assert len(tidy) >= 1
    assert tidy.columns.is_unique
    assert len(glance) == 1
    plain = json.loads(json.dumps(result.to_dict()))
    assert list(plain["tidy"]) == [str(c) for c in tidy]
    assert list(plain["glance"]) == [str(c) for c in glance]
    with pytest.raises(FrozenInstanceError):
        setattr(result, fields(result)[0].name, None)


@pytest.fixture
def stopped() -> fedstat.results.SplitResult:
    """A split whose iteration was stopped early, with Heywood cases."""
    w = np.random.default_rng(0).normal(size=(4, 12, 9))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fedstat.split(w, n_factors=5, max_iter=40)


def test_a_result_words_its_cautions_once_and_a_split_has_those_of_its_analysis(stopped) -> None:
    found = {one.title: one for one in stopped.cautions()}
    assert set(found) == {"Factor analysis not converged", "Heywood cases"}
    assert stopped.cautions() == stopped.fit.cautions()
    assert f"{int(stopped.fit.heywood.sum())} of 12 units" in found["Heywood cases"].text
    text = " ".join(repr(stopped).split())
    for caution in found.values():
        assert text.count(f"Caution: {caution.text}") == 1
    assert LayerResults({"fc1": stopped}).cautions()[0].text == f"layer fc1: {stopped.cautions()[0].text}"


def test_severe_cautions_are_printed_as_warnings() -> None:
    assert [str(Caution("What", "so much", severe=flag)) for flag in (True, False)] == [
        "Warning: so much",
        "Caution: so much",
    ]


@pytest.mark.parametrize("name", MADE)
def test_names_are_shown_and_not_executed(name: str) -> None:
    result = made(name)
    shown = Page(result._repr_html_())
    assert set(shown.tags) <= {"pre", "table", "thead", "tbody", "tr", "th", "td", "h4", "div", "details", "summary"}
    assert " ".join(repr(result).splitlines()[0].split(",")[0].split()) in shown.text
    text, printed = result.to_markdown(), result._printed()
    assert not re.search("<[a-z]", text)
    caption, gap, *rows = text.splitlines()
    assert (caption[:7], gap) == ("Table: ", "")
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {printed.shape[1] + 1}
    assert len(rows) == len(printed) + 2
    body = result.to_latex().split("\\midrule\n")[1].split("\\bottomrule")[0]
    assert not re.search(r"(?<!\\)[_%#<>|~]", re.sub(r"\$[<>]\$", "", body))
    assert all(len(re.findall(r"(?<!\\)&", row)) == printed.shape[1] - 1 for row in body.strip().splitlines())
    if hasattr(result, "split") and name != "SplitResult" and "term" in result.tidy():
        assert "&lt;b&gt;bold&lt;/b&gt;" in text


@pytest.mark.parametrize("name", MADE)
def test_tables_for_papers_have_the_columns_that_were_chosen(name: str) -> None:
    result = made(name)
    first, *_, last = result.tidy()
    text = result.to_latex(columns=[last, first], digits=1, caption="95 % of $x$", label="tab:x")
    assert text.splitlines()[:3] == [r"\begin{table}", r"\caption{95 \% of $x$}", r"\label{tab:x}"]
    head = text.split("\\toprule\n")[1].split("\n")[0].replace("\\_", "_")
    assert head == f"{last} & {first} \\\\"
    bare = result.to_markdown(columns=[last, first], caption="").splitlines()
    assert bare[0] == f"| {last} | {first} |"
    assert len(bare) == len(result.tidy()) + 2
    assert result.to_latex(columns=first, caption="").startswith(r"\begin{tabular}")
    with pytest.raises(ValueError, match=r"a column must be one of .* but got 'none_such'"):
        result.to_markdown(columns=["none_such"])


@pytest.mark.parametrize("name", MADE)
def test_every_result_draws_itself_on_axes_of_its_own_or_on_those_given(name: str) -> None:
    mpl.use("Agg")
    result = made(name)
    _, theirs = plt.subplots(figsize=(6, 5))
    own = result.plot()
    assert isinstance(own, mpl.axes.Axes)
    assert own.figure is not theirs.figure
    assert not theirs.has_data()
    own.figure.draw_without_rendering()  # names such as 5$ must not be read as formulas
    assert result.plot(theirs) is theirs
    assert theirs.has_data()
    assert own.get_xlabel()
    assert own.get_ylabel() or own.get_yticklabels() or own.child_axes
    plt.close("all")


def test_a_notebook_shows_both_ends_of_a_long_table() -> None:
    w = np.random.default_rng(0).normal(size=(4, 32, 20))
    w[:, 5] = 0
    result = fedstat.split(w, n_factors=2, method="pc")
    page = result._repr_html_()
    cells = [re.findall("<td>(.*?)</td>", row) for row in page.partition("<details>")[0].split("<tr>")]
    shown = [int(row[0]) for row in cells if row]
    order = [int(j) for j in np.argsort(-result.communality) if j != 5]
    assert shown == [*order[:5], *order[-5:]]
    assert "22 more, in the order of communality; 1 of them without a value" in page
    assert "more" not in fedstat.split(w[:, :5], n_factors=2, method="pc")._repr_html_().split("<table>")[1]


def test_a_constant_unit_in_a_short_table_is_shown_last() -> None:
    w = np.random.default_rng(0).normal(size=(4, 6, 20))
    w[:, 0] = 0
    page = fedstat.split(w, n_factors=2, method="pc")._repr_html_()
    assert page.rindex("<td>constant</td>") > page.rindex("<td>personal</td>")
    assert NAMES[0] not in made("SplitResult")._repr_html_()


def test_entropy_says_what_its_fields_hold() -> None:
    found = fedstat.knn_entropy(outputs(), ties="atoms")
    assert list(found.tidy()) == [
        "unit", "estimate", "conf_low", "conf_high", "n", "std_error", "n_tied", "clustered", "n_atoms",
        "atom_mass",
    ]  # fmt: skip
    assert found.tidy()["estimate"].tolist() == found["entropy"].values.tolist() == np.asarray(found).tolist()
    row = found.glance().iloc[0]
    assert (row["n_series"], row["n_min"], row["n_max"], row["n_with_atoms"]) == (6, 18, 30, 1)
    assert row["entropy_median"] == np.median(found.entropy)
    assert "6 units, 18 to 30 samples each: median" in repr(found)
    assert "1 with atoms (equal samples), up to 40% of the samples" in repr(found)
    assert found.to_dataset()["entropy"].attrs == {"units": "nats"}
    assert row["level"] == 0.95
    assert row["interval_width_median"] == (found.tidy()["conf_high"] - found.tidy()["conf_low"]).median()
    text = " ".join(repr(found).split())
    assert "95% CIs, widened for bias: median width" in text
    assert "they assume no narrow groups of fewer than 90 samples" in text
    bare = fedstat.knn_entropy(torch.from_numpy(outputs().values), ties="atoms")
    assert isinstance(bare.entropy, torch.Tensor)
    xr.testing.assert_allclose(bare.to_dataset(), found.to_dataset().drop_vars("unit").rename(unit="axis_0"))
    one = fedstat.knn_entropy(outputs()[:, 0].values)
    assert one.tidy()["estimate"].tolist() == [float(np.asarray(one))]
    assert "1 series, 30 samples: median" in repr(one)
    with pytest.raises(KeyError, match="estimate"):
        one["estimate"]


def test_entropy_says_why_there_is_no_interval() -> None:
    x = np.random.default_rng(0).normal(size=(50, 4))
    large = repr(fedstat.knn_entropy(x, k=10))
    assert "No CI where the bias is unknown: k > 7 with 50 samples" in large
    assert "SE" not in large, "no error without an interval"
    assert "No CIs: the bias is unknown in 4 dimensions" in repr(fedstat.knn_entropy(x, feature_axis=1))
    with pytest.warns(
        UserWarning, match=r"50 of 50 samples have an exact copy in .*; 1 of 4 series have ties\..*jitter"
    ):
        found = fedstat.knn_entropy(np.concatenate([np.repeat(x[:25, :1], 2, axis=0), x[:, 1:]], axis=1))
    row = found.glance().iloc[0]
    assert (row["n_with_ties"], row["n_without_interval"]) == (1, 1)
    assert "Caution: 1 with ties (up to 100% of the samples): entropy too low, no CI" in repr(found)
    grouped = np.random.default_rng(0).integers(0, 20, (50, 3)) + 1e-4 * x[:, :3]
    with pytest.warns(UserWarning, match="samples lie in narrow groups in 3 of 3 series"):
        found = fedstat.knn_entropy(grouped)
    assert "Caution: 3 with samples in narrow groups, too small" in repr(found)
    assert found.glance()["n_clustered"][0] == found.glance()["n_without_interval"][0] == 3


def test_comparison_says_what_the_paired_table_holds() -> None:
    found = fedstat.compare(TABLE, reference="a", level=0.9)
    assert found.tidy()["term"].tolist() == ["b", "c"]
    assert found.tidy()["estimate"].tolist() == found.table["difference"][1:].tolist()
    assert found.augment()["term"].tolist() == ["a", "b", "c"]
    row = found.glance().iloc[0]
    assert (row["reference"], row["n_methods"], row["n_blocks"], row["level"]) == ("a", 2, 3, 0.9)
    assert row["n_above"] == (found.table["p_holm"] <= 0.1).sum() == 2
    alone = fedstat.compare(TABLE[TABLE["seed"] == 0], reference="a")
    assert "fewer than 3 pairs, so no interval and no test: b, c" in alone.summary()
    assert "paired by seed (1 pair)" in repr(alone)
    assert "+3.200 (too few pairs)         –\n" in repr(alone)
    unequal = fedstat.compare(TABLE[(TABLE["method"] != "b") | (TABLE["seed"] > 0)], reference="a")
    assert [line.split()[-1] for line in repr(unequal).splitlines()[1:5]] == ["pairs", "reference", "3", "2"]


def test_glances_of_the_theorems_count_what_their_settings_say() -> None:
    found = MADE["GeneralizationResult"]()
    each, row = found.by_setting(), found.glance().iloc[0]
    expected = (len(each), each["holds"].sum(), each["vacuous"].sum())
    assert (row["n_settings"], row["n_held"], row["n_vacuous"]) == expected
    run = fedstat.ntk.convergence(DATA, widths=[8], rounds=2, replicates=2)
    row = run.glance().iloc[0]
    assert row["n_runs"] == len(run.rates())
    assert row["n_held"] == (run.rates()["max_loss_over_bound"] <= 1 + 1e-9).sum()
    assert row["n_bounded"] == run.rates()["max_loss_over_bound"].notna().sum()
