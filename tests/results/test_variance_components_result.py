"""The result of variance components: tables, words, conclusions, the layer from which on personalising pays, figure."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from statsmodels.stats.multitest import multipletests

import fedstat
from fedstat.results import ComponentsResult, personal_from
from fedstat.results.variance_components import conclude


def result(
    scale: tuple[float, ...] = (0, 0.3, 1, 3, 3, 0), *, dead: bool = True, clients: int = 12
) -> ComponentsResult:
    rng = np.random.default_rng(0)
    own = rng.normal(size=(clients, 1, len(scale), 30)) * np.array(scale)[:, None]
    w = own + rng.normal(size=(clients, 2, len(scale), 30))
    if dead:
        w[:, :, -1] = 0
    return fedstat.variance_components(w)


def test_tables_hold_one_row_a_unit_and_p_values_adjusted_over_live_units() -> None:
    found = result()
    tidy = found.tidy()
    assert list(tidy) == [
        "unit", "reliability", "conf_low", "conf_high", "p_adjusted", "p_value", "between", "within"
    ]  # fmt: skip
    np.testing.assert_allclose(tidy["p_adjusted"][:5], multipletests(tidy["p_value"][:5], method="fdr_bh")[1])
    assert tidy.iloc[5, 1:6].isna().all()
    live = tidy[:5]
    assert ((live["conf_low"] < live["reliability"]) & (live["reliability"] < live["conf_high"])).all()
    augmented = found.augment()
    assert augmented["shrink"][:5].between(0, 1).all()
    assert augmented["conclusion"].tolist()[3:] == ["client", "client", "undefined"]
    assert augmented["constant"].tolist() == [False] * 5 + [True]


def test_glance_and_words_say_what_the_tables_hold() -> None:
    found = result()
    row = found.glance().iloc[0]
    assert row["layer_reliability"] == found.layer["reliability"][0]
    assert row["n_above_half"] == (found.tidy()["conf_low"] > 0.5).sum()
    assert row["n_beyond_noise"] == (found.tidy()["p_adjusted"] <= 0.05).sum()
    assert (row["n_constant"], row["df"], row["conclusion"]) == (1, 11, "client")
    text = repr(found)
    assert (
        f"reliability = {row['layer_reliability']:.2f}, 95% CI [{row['layer_low']:.2f}, {row['layer_high']:.2f}]"
        in text
    )
    assert "Above 0.5: a client's weights estimate its true weights with lower expected" in text
    assert "\n  constant: 5" in text
    assert max(map(len, found.summary().splitlines())) <= 110
    assert "the 3 highest of 6" in found.summary(rows=3)
    assert ">Reliability of client differences: 6 units" in found._repr_html_()
    assert json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("scale", "expected", "said"),
    [
        (0.0, "no difference shown beyond noise", "No evidence of differences beyond training noise"),
        (0.45, "average", "Below 0.5: the average over clients estimates"),
        (0.72, "inconclusive", "Inconclusive: the CI includes 0.5"),
        (2, "client", "Above 0.5: a client's weights estimate"),
    ],
)
def test_conclusion_on_a_layer(scale: float, expected: str, said: str) -> None:
    """Shares 0, 0.29, 0.51 and 0.89."""
    found = result((scale,) * 4, dead=False)
    assert found.conclusion == expected
    assert said in repr(found)


def test_conclusion_on_equal_models_is_undefined() -> None:
    found = fedstat.variance_components(np.ones((4, 2, 3, 5)))
    assert found.conclusion == "undefined"
    assert "No differences: all units are identical in all clients" in repr(found)
    assert conclude(0.7, 0.6, 0.8, 0.08, level=0.9) == "client"


def test_a_layer_whose_replicates_differ_in_too_few_clients_has_no_interval_and_no_conclusion() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(4, 1, 3, 20)) + rng.normal(size=(4, 2, 3, 20))
    w[0, 1] = w[0, 0]
    with pytest.warns(UserWarning, match="identical"):
        found = fedstat.variance_components(w)
    assert found.conclusion == "undefined"
    assert "; no CI\n  No conclusion: a CI needs weights that vary in 4 clients\n" in repr(found)


def layers(*rows: tuple[float, float, float, float]) -> pd.DataFrame:
    table = pd.DataFrame(rows, columns=["reliability", "conf_low", "conf_high", "p_value"])
    return table.assign(layer=[f"l{i}" for i in range(len(rows))], other="kept out")


OWN, SHARED, OPEN, NONE = (0.8, 0.7, 0.9, 0.0), (0.2, 0.1, 0.3, 0.01), (0.6, 0.3, 0.8, 0.01), (0.1, -2, 0.6, 0.4)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((SHARED, OWN, OWN), "is above 0.5 from layer l1 on l1 0.80 [0.70, 0.90], l2 0.80 [0.70, 0.90] Layer before"),
        ((SHARED, OWN, OWN), "Layer before: l0 0.20 [0.10, 0.30], below 0.5 95% CIs"),
        (
            (OWN, OPEN, OWN),
            "Layer before: l1 0.60 [0.30, 0.80], inconclusive: the CI includes 0.5 Before it, but above 0.5: l0 0.80",
        ),
        ((OWN, OWN), "from layer l0 on l0 0.80 [0.70, 0.90], l1 0.80 [0.70, 0.90] 95% CIs"),
        (
            (OWN, SHARED),
            "in the last layer Last layer: l1 0.20 [0.10, 0.30], below 0.5 Before it, but above 0.5: l0 0.80",
        ),
        ((OWN, NONE), "Last layer: l1 0.10 [-2.00, 0.60], no evidence of differences beyond training noise Before it"),
        ((NONE, OWN), "Layer before: l0 0.10 [-2.00, 0.60], no evidence of differences beyond training noise"),
        ((OWN,), "from layer l0 on l0 0.80 [0.70, 0.90] 95% CIs"),
    ],
)
def test_personalising_pays_from_the_first_layer_after_which_all_are_own(
    rows: tuple[tuple[float, float, float, float], ...], words: str
) -> None:
    report = personal_from(layers(*rows))
    assert words in " ".join(report.split())
    assert max(map(len, report.splitlines())) <= 80


def test_results_of_layers_are_read_in_their_order_and_at_their_level() -> None:
    of = {"conv1": result((0.3, 0.3), dead=False), "fc1": result((2, 2), dead=False), "fc2": result((3, 3), dead=False)}
    assert personal_from(of).startswith("Reliability of client differences is above 0.5 from layer fc1 on")
    backwards = personal_from(dict(reversed(of.items())))
    assert backwards.startswith("No evidence that reliability is above 0.5 in the last layer\n  Last layer: conv1")


def test_tables_of_layers_that_say_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="but lacks conf_low, p_value"):
        personal_from(layers(OWN).drop(columns=["conf_low", "p_value"]))
    for empty in ({}, layers()):
        with pytest.raises(ValueError, match="at least one row, but is empty"):
            personal_from(empty)


def test_forest_draws_shares_with_a_line_at_one_half() -> None:
    found = result()
    axes = fedstat.plot.forest(found, ax=plt.figure().add_subplot())
    assert axes.get_xlabel() == "reliability, 95% CI\n● differ beyond training noise (FDR 0.05)   ○ no evidence"
    assert axes.get_title() == "undefined units left out: 1"
    order = np.argsort(-found.reliability)[:5]
    assert [t.get_text() for t in axes.get_yticklabels()] == [*map(str, order), "layer"]
    np.testing.assert_allclose(axes.collections[1].get_offsets()[:, 0], found.reliability[order])
    assert [line.get_xdata()[0] for line in axes.lines] == [0, 0.5]
    segments = axes.collections[0].get_segments()
    assert min(s[0, 0] for s in segments) >= -1
    plt.close("all")


def test_layers_are_named_once_and_tables_are_tables() -> None:
    with pytest.raises(ValueError, match=r"one row per layer, but has 2 for 'l0'.*window=10"):
        personal_from(pd.concat([layers(OWN, OWN)] * 2))
    for wrong in (result((0, 1)), {"fc1": layers(OWN)}, xr.DataTree(children={"trained": xr.DataTree()}), "fc1"):
        with pytest.raises(ValueError, match=f"results must be .* but got {type(wrong).__name__}. Of a run, pass"):
            personal_from(wrong)  # type: ignore[arg-type]
