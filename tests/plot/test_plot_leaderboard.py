"""Figures of many methods: what they show, and that names do not cover one another."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest

from fedstat import plot
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.plot._styles import style_of
from fedstat.plot.study import _spread
from fedstat.stats import ranking
from fedstat.study.collect import title_of

NAMES = [name for name in ALGORITHMS if name != "fedsplit"]


def courses():
    rng = np.random.default_rng(0)
    rows = [
        {"scenario": "a", "method": m, "seed": s, "round": r, "accuracy": 0.3 + 0.1 * r + rng.normal() / 20,
         "bytes": 0 if m == "local" else 1e6 * r, "elapsed": 0.1 * r, "worst": rng.uniform()}
        for m in NAMES for s in range(3) for r in (1, 2, 3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_rows_stand_in_the_order_of_mean_ranks_and_bars_span_what_does_not_differ():
    wide = pd.DataFrame(np.random.default_rng(2).normal(size=(30, 6)) + 1.2 * np.arange(6), columns=NAMES[:6])
    ax = plot.critical_difference(wide)
    found = ranking.friedman(wide.to_numpy())
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [title_of(wide.columns[i]) for i in np.argsort(found.mean_ranks)]
    apart = ranking.critical_difference(6, 30)
    bars = [line for line in ax.lines if len(line.get_xdata()) == 2 and line.get_xdata()[0] == line.get_xdata()[1]]
    assert len(bars) == len(ranking.groups(found.mean_ranks, apart)) > 1
    (ruler,) = (line for line in ax.lines if list(line.get_ydata()) == [-1.6, -1.6])
    assert np.ptp(ruler.get_xdata()) == pytest.approx(apart)


BEST = {
    "an accuracy": ({}, "c", "rank by accuracy in 4 scenarios, 1 is best"),
    "a loss": ({"value": "test_loss"}, "a", "rank by test_loss in 4 scenarios, 1 is best"),
    "perplexity": ({"value": "Perplexity"}, "a", "rank by Perplexity in 4 scenarios, 1 is best"),
    "AUC": ({"value": "val AUC"}, "c", "rank by val AUC in 4 scenarios, 1 is best"),
    "a score": ({"value": "score", "higher_is_better": True}, "c", "rank by score in 4 scenarios, 1 is best"),
    "a distance": ({"value": "distance", "higher_is_better": False}, "a", "rank by distance in 4 scenarios, 1 is best"),
    "the user's choice": ({"value": "loss", "higher_is_better": True}, "c", "rank by loss in 4 scenarios, 1 is best"),
}


@pytest.mark.parametrize(("how", "best", "label"), BEST.values(), ids=BEST)
def test_the_best_method_by_the_measure_stands_on_top(how, best, label):
    table = pd.DataFrame([[0.1, 0.2, 0.3], [0.1, 0.3, 0.4], [0.2, 0.3, 0.5], [0.1, 0.2, 0.6]], columns=list("abc"))
    ax = plot.critical_difference(table, **how)
    assert ax.get_yticklabels()[0].get_text() == best
    assert ax.get_xlabel() == label


@pytest.mark.parametrize("value", ["score", "accuracy loss", "lossless"])
def test_the_direction_is_asked_for_where_the_name_does_not_tell(value):
    table = pd.DataFrame(np.eye(3), columns=list("abc"))
    with pytest.raises(ValueError, match=f"higher_is_better is required, since the name '{value}' does not tell"):
        plot.critical_difference(table, value=value)
    with pytest.raises(ValueError, match="higher_is_better must be one of True, False"):
        plot.critical_difference(table, value=value, higher_is_better="low")


@pytest.mark.parametrize("x", ["round", "bytes", "elapsed"])
def test_a_few_methods_are_named_in_their_colours_and_all_others_are_grey(x):
    ax = plot.method_courses(courses(), x=x, highlight=("local", "fedavg"))
    assert {text.get_text() for text in ax.texts} == {"Local", "FedAvg"}
    colours = {line.get_color() for line in ax.lines}
    assert colours == {style_of("local").colour, style_of("fedavg").colour, "0.78"}
    assert len(ax.lines) == len(NAMES)


def test_methods_that_none_beats_in_both_are_named():
    table = pd.DataFrame(
        {"method": ["fedper", "fedrep", "fedem"], "accuracy": [0.9, 0.7, 0.6], "bytes": [9e6, 2e6, 5e6]}
    )
    ax = plot.trade_off(table, highlight=())
    assert {text.get_text() for text in ax.texts} == {title_of("fedper"), title_of("fedrep")}
    worst = table.assign(worst=[0.1, 0.2, 0.3])
    assert len(plot.trade_off(worst, x="worst", highlight=()).texts) == 3


def test_names_are_moved_as_little_as_needs_be_to_be_apart():
    values = [0.1, 0.11, 0.12, 0.5, 0.9]
    moved = _spread(values, 0.1)
    assert all(b - a >= 0.1 - 1e-12 for a, b in pairwise(moved))
    np.testing.assert_allclose(moved[3:], [0.5, 0.9])
    assert moved[:3].mean() == pytest.approx(0.11)


def test_a_panel_for_every_setting():
    data = pd.concat([courses(), courses().assign(scenario="b")])
    figure = plot.by_setting(data, plot.method_courses, x="round", highlight=("fedavg",))
    assert [ax.get_title() for ax in figure.axes] == ["a", "b"]


def test_what_is_no_table_or_lacks_a_column_is_refused():
    with pytest.raises(TypeError, match=r"plot\.trade_off takes a table"):
        plot.trade_off([1, 2])
    with pytest.raises(ValueError, match="a column of data"):
        plot.method_courses(courses().drop(columns="bytes"), x="bytes")
