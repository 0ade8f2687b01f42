"""Captions, intervals and legends that figures share; the figures of a whole study."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from scipy import stats

from fedstat import sim
from fedstat.plot._figure import caption, interval, one_legend
from fedstat.plot.papers import accuracy, accuracy_grid, stability_grid, study_grid

SMALL = {"clients": 6, "d": 10, "m": 12, "n_train": 20, "n_test": 20, "rounds": 2, "replicates": 2}


@pytest.fixture(scope="module")
def run():
    return sim.study(p=[0.25, 0.5], alpha=0.4, methods=("true", "dynamic", "fedavg", "local"), **SMALL)


def inside(figure, text):
    box = text.get_window_extent(figure.canvas.get_renderer())
    return box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0


@pytest.mark.parametrize("width", [2.5, 5, 12])
def test_no_caption_is_cut_off_at_the_edge_or_lies_on_the_axes(width):
    figure, ax = plt.subplots(figsize=(width, 5), layout="constrained")
    ax.set_xlabel("round")
    caption(
        figure, "MMMMMMMMMM " + "many words of a caption, WITH CAPITALS AMONG THEM, " * 4, "", "commit 2b6f3374c548"
    )
    figure.draw_without_rendering()
    assert inside(figure, figure._supxlabel)
    top = figure._supxlabel.get_window_extent().y1
    assert top <= ax.get_tightbbox().y0
    words = " ".join(figure.get_supxlabel().split())
    assert words.count("many words") == 4
    assert words.endswith("commit 2b6f3374c548")


def test_the_interval_is_scipys():
    x = np.random.default_rng(0).normal(size=7)
    expected = stats.ttest_1samp(x, 0).confidence_interval(0.95)
    np.testing.assert_allclose(interval([*x, np.nan]), expected)
    assert np.isnan(interval([1.0])).all()


def test_one_legend_names_everything_once():
    figure, axes = plt.subplots(1, 2, layout="constrained")
    for ax, names in zip(axes, ("ab", "bc"), strict=True):
        for name in names:
            ax.plot([0, 1], label=name)
        ax.legend()
    one_legend(figure, axes)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert all(ax.get_legend() is None for ax in axes)


def points(ax):
    """What is drawn of each method, by legend."""
    return [line.get_xydata() for line in ax.lines if line.get_marker() != "None" and len(line.get_xdata())]


def test_intervals_of_differences_are_those_of_the_table(run):
    table = sim.summary(run).set_index(["method", "p"])
    ax = accuracy(run, relative_to="true", ax=plt.figure().gca())
    bars = {tuple(np.round(line.get_ydata(), 9)) for line in ax.lines if line.get_marker() == "None"}
    for method in ("fedavg", "dynamic", "local"):
        for p in (0.25, 0.5):
            row = table.loc[(method, p)]
            assert tuple(np.round([row["difference_low"], row["difference_high"]], 9)) in bars


def test_what_lies_far_off_has_axes_of_its_own_and_every_method_is_drawn_once(run):
    far = run.copy(deep=True)
    metrics = far["metrics"].to_dataset()
    metrics["accuracy"] = metrics["accuracy"] - (metrics["method"] == "fedavg")
    far["metrics"] = metrics
    plain, apart = accuracy_grid(run), accuracy_grid(far)
    assert len(apart.axes) == 3
    top, bottom = apart.axes[1:]
    assert top.get_ylim()[0] > bottom.get_ylim()[0] + 0.1
    drawn = [np.isfinite(np.vstack(points(ax))[:, 1]).sum() for ax in (top, bottom)]
    assert drawn == [3 * 2, 2 * 2], "all but FedAvg above; FedAvg, and true for comparison, below"
    for figure in (plain, apart):
        figure.draw_without_rendering()
        assert inside(figure, figure._supxlabel)
        assert len(figure.legends) == 1
        assert "95% t intervals of the mean over replicates" in figure.get_supxlabel()


def test_a_study_of_several_p_and_alpha_has_a_row_for_every_alpha():
    run = sim.study(p=[0.25, 0.5], alpha=[0.3, 0.6], methods=("true", "dynamic"), **SMALL | {"replicates": 1})
    assert len({round(ax.get_subplotspec().rowspan.start) for ax in study_grid(run).axes}) >= 2
    panels = stability_grid(run).axes
    assert [ax.get_title() for ax in panels] == [
        rf"$p$ = {p}, $\alpha$ = {alpha}" for alpha in (0.3, 0.6) for p in (0.25, 0.5)
    ]
    assert len({ax.get_ylim() for ax in panels}) == 1


def test_stability_needs_dynamic_fedfac():
    run = sim.study(p=0.5, alpha=0.4, methods=("true", "local"), **SMALL | {"replicates": 1})
    with pytest.raises(ValueError, match="add `dynamic`"):
        stability_grid(run)
    assert len(accuracy_grid(run).axes) == 2
