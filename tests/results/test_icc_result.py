"""Agreement of clients: which units are estimated, and where test and interval differ."""

from __future__ import annotations

from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pytest

import fedstat
from fedstat import plot
from fedstat.results import IccResult

RANGE = 1 + 1 / 19  # of ICC2 with 20 clients


def simulated(clients: int, icc: float, units: int = 200, weights: int = 60, seed: int = 0) -> np.ndarray:
    """Normal weights with a true ICC2."""
    rng = np.random.default_rng(seed)
    common, rest = rng.normal(size=(1, units, weights)), rng.normal(size=(clients, units, weights))
    return np.sqrt(icc) * common + np.sqrt(1 - icc) * rest


@pytest.fixture(scope="module")
def dominated() -> IccResult:
    """Twenty clients, of which single ones dominate the variance of some units, and one constant unit."""
    rng = np.random.default_rng(0)
    noise = np.exp(2 * rng.normal(size=(20, 40, 1))) * rng.normal(size=(20, 40, 60))
    w = rng.normal(size=(1, 40, 60)) + noise
    w[:, 7] = 0
    return fedstat.icc(w)


def test_a_unit_whose_interval_spans_more_than_half_of_the_range_is_not_estimated(dominated: IccResult) -> None:
    c = dominated.coefficients
    width = c.conf_high[:, 1] - c.conf_low[:, 1]
    assert dominated.estimated.tolist() == (width <= RANGE / 2).tolist()
    table = dominated.tidy()
    for type_, single in (("ICC2", "ICC2"), ("ICC3k", "ICC3")):
        rows, base = table[table["type"] == type_], table[table["type"] == single]
        expected = (base["conf_high"] - base["conf_low"] <= RANGE / 2).tolist()
        assert rows["estimated"].tolist() == expected
    row = dominated.glance().iloc[0]
    assert row["n_not_estimated"] == (width > RANGE / 2).sum() > 5
    assert dominated.estimated.sum() > 5
    assert np.isfinite(dominated.agreement[width > RANGE / 2]).all(), "the estimate stays"


def test_the_print_counts_units_that_are_not_estimated_and_intervals_that_include_0(dominated: IccResult) -> None:
    low, high = dominated.coefficients.conf_low[:, 1], dominated.coefficients.conf_high[:, 1]
    agree = dominated.p_adjusted[:, 1] <= 0.05
    n = int((agree & (low <= 0) & (high >= 0)).sum())
    assert dominated.glance()["n_including_0"][0] == n > 0
    text = repr(dominated)
    assert f"\n  CI includes 0 on {n} of the {agree.sum()} units with one direction: agreement not shown\n" in text
    n_missing = dominated.glance()["n_not_estimated"][0]
    assert f"\n  {n_missing} of 40 units not estimated (CI missing or wider than half of [-0.05, 1])\n" in text
    named = [line for line in text.splitlines() if line.startswith(("  highest:", "  lowest:"))]
    units = {int(one.split()[0]) for line in named for one in line.split(":")[1].removesuffix(" ...").split(",")}
    assert dominated.estimated[list(units)].all()
    assert "includes 0" not in repr(fedstat.icc(simulated(20, 0.6)))


def test_the_conclusion_of_the_test_stays_where_a_unit_is_not_estimated(dominated: IccResult) -> None:
    agree = dominated.p_adjusted[:, 1] <= 0.05
    expected = np.where(agree, "one direction", "no evidence")
    expected[7] = "not tested"
    assert dominated.conclusion.tolist() == expected.tolist() == dominated.augment()["conclusion"].tolist()
    assert (agree & ~dominated.estimated).any()
    rows = dominated.to_markdown().splitlines()[4:]
    for j in np.flatnonzero(~dominated.estimated & np.isfinite(dominated.agreement)):
        assert rows[j].startswith(f"| {j} | {expected[j]} | {dominated.agreement[j]:.3f} | not estimated |")
    assert rows[7] == "| 7 | not tested | – | – | – |"
    assert dominated.to_latex().count("not estimated") == dominated.glance()["n_not_estimated"][0] + 1  # caption
    assert "<td>not estimated</td>" in dominated._repr_html_()
    assert "not estimated" in dominated.summary().partition("\nUnits (")[2] + dominated.to_markdown()


def test_units_that_are_not_estimated_are_drawn_hollow_and_without_a_bar(dominated: IccResult) -> None:
    ax = plot.forest(dominated)
    order = [int(label.get_text()) for label in ax.get_yticklabels()[:-1]]
    has_bar = [segment.size > 0 for segment in ax.collections[0].get_segments()]
    faces = ax.collections[1].get_facecolors()[:, 0]
    is_estimated = dominated.estimated[order]
    assert has_bar == is_estimated.tolist()
    assert (faces < 0.5).tolist() == (is_estimated & (dominated.conclusion[order] == "one direction")).tolist()
    assert ax.get_title().endswith(f"not estimated, without bar: {(~is_estimated).sum()}")
    assert "○ no evidence or not estimated" in ax.get_xlabel()
    ax = plot.forest(dominated.split())
    assert sum(segment.size == 0 for segment in ax.collections[0].get_segments()) == (~is_estimated).sum()
    assert "not estimated" in ax.get_title()
    assert "estimated" not in plot.forest(fedstat.icc(simulated(20, 0.6, units=9))).get_xlabel()
    plt.close("all")


def test_with_few_clients_one_line_says_that_no_unit_is_estimated() -> None:
    found = fedstat.icc(simulated(3, 0, units=4, weights=5))
    assert not found.estimated.any()
    lines = repr(found).splitlines()
    assert lines.count("  No unit estimated (CI missing or wider than half of [-0.50, 1])") == 1
    assert not [line for line in lines if line.startswith(("  highest", "  lowest"))]
    assert "No unit estimated" in found.to_markdown()
    assert "jackknife" not in found.to_markdown()


@pytest.mark.parametrize(
    ("clients", "icc", "marked"), [(3, 0.0, 0.71), (3, 0.6, 0.32), (4, 0.2, 0.44), (6, 0.2, 0.07), (10, 0.2, 0.0)]
)
def test_the_proportion_of_units_that_are_not_estimated_is_that_of_the_pages(
    clients: int, icc: float, marked: float
) -> None:
    found = fedstat.icc(simulated(clients, icc, seed=1))
    assert 1 - found.estimated.mean() == pytest.approx(marked, abs=4 * np.sqrt(marked * (1 - marked) / 200) + 0.005)


@pytest.mark.parametrize(("inference", "line"), [("sign-flip", "flips"), ("permutation", "permutations"), ("F", None)])
def test_the_print_says_that_p_values_of_units_are_pooled(inference: str, line: str | None) -> None:
    found = fedstat.icc(simulated(14, 0.6, units=30), inference=inference)
    text = f"p values of units: {line} pooled over units"
    assert (text in repr(found)) == (line is not None)
    if inference == "sign-flip":
        assert found.p_adjusted.min() < 1 / found.test.n_patterns, "smaller than the flips of one unit allow"
    assert "pooled" not in repr(fedstat.icc(simulated(4, 0.6, units=5)))


def test_common_initial_parameters_are_suspected_only_where_agreement_is_near_1() -> None:
    w = simulated(40, 0.02, units=20)
    w[:, 0] = w[0, 0]  # equal in all clients
    found = fedstat.icc(w)
    assert found.n_one_direction > 1
    moderate = fedstat.icc(simulated(40, 0.3, units=20))
    for result, known in ((found, False), (moderate, True)):
        assert not result.cautions()
        assert bool(replace(result, common_start=True).cautions()) == known, "clients are known to start alike"
    start = np.random.default_rng(3).normal(size=(1, 20, 60))
    assert [c.title for c in fedstat.icc(start + 0.1 * w).cautions()] == ["Common initial parameters"]
