"""Figures can be read: names apart, colors of one scale, intervals in range, no empty panel, no text twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from made_results import made
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

import fedstat
from fedstat import plot, sim
from fedstat.plot import papers
from fedstat.plot._figure import caption, panel_grid, wrap_panels
from fedstat.plot._styles import style_of, title_of
from fedstat.results import LayerResults, LeakageResult
from fedstat.study.collect import METHODS

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
MANY = RNG.normal(size=(30, 40, 20)) + RNG.normal(size=(40, 20))  # 40 units


def overlaps(axis: Any) -> list[tuple[str, str]]:
    """Neighboring tick labels of an axis whose boxes overlap, of those that are drawn."""
    labels = [label for label in axis.get_ticklabels() if label.get_visible() and label.get_text()]
    i, (low, high) = int(axis is axis.axes.yaxis), sorted(axis.get_view_interval())
    labels = [label for label in labels if low <= label.get_position()[i] <= high]
    boxes = sorted((tuple(label.get_window_extent().get_points()[:, i]), label.get_text()) for label in labels)
    return [(one, other) for (a, one), (b, other) in pairwise(boxes) if a[1] > b[0] + 0.5]


NAMED: dict[str, Callable[[Axes], Axes]] = {
    "loadings": lambda ax: plot.loadings(fedstat.split(MANY, method="pc"), ax=ax),
    "forest": lambda ax: plot.forest(fedstat.icc(MANY), ax=ax),
    "split_map": lambda ax: plot.split_map(MANY, kappas=np.arange(0.3, 0.95, 0.03), methods=("pc", "icc"), ax=ax),
    "sensitivity": lambda ax: plot.sensitivity(fedstat.sensitivity(MANY[:, :9], method="pc"), ax=ax),
    "weights": lambda ax: plot.weights(MANY, ax=ax),
    "client_similarity": lambda ax: plot.client_similarity(clusters(np.vstack([MANY, MANY + 1])[:, 0]), ax=ax),
}  # fmt: skip


@pytest.mark.parametrize("layout", ["none", "tight", "constrained"])
@pytest.mark.parametrize("size", [(4, 3), (5, 4), (9, 8)])
@pytest.mark.parametrize("figure", NAMED)
def test_names_of_rows_and_columns_do_not_overlap_after_the_layout(
    figure: str, size: tuple[float, float], layout: str
) -> None:
    canvas, axes = plt.subplots(1, 2, figsize=(2 * size[0], size[1]), layout=layout)
    ax = NAMED[figure](axes[1])
    caption(canvas, "A caption takes room. " * 9)
    canvas.draw_without_rendering()
    assert len(ax.get_yticklabels()) + len(ax.get_xticklabels()) > 5
    assert overlaps(ax.xaxis) + overlaps(ax.yaxis) == []
    assert min(text.get_fontsize() for text in ax.get_yticklabels() + ax.get_xticklabels()) >= 6


@pytest.mark.parametrize("width", [4.5, 6.4, 12])
def test_a_legend_above_the_axes_keeps_to_the_figure(width: float) -> None:
    names = [*METHODS][:9]
    data = pd.DataFrame([{"scenario": "a", "method": m, "difference": 0.1, "low": 0, "high": 0.2} for m in names])
    figure, ax = plt.subplots(figsize=(width, 4), layout="constrained")
    legend = plot.differences(data, ax=ax).get_legend()
    figure.draw_without_rendering()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [METHODS[name] for name in names]
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("span", [1.5, 2.7, 5, 9, 30, 90, 300, 1e4])
@pytest.mark.parametrize("draw", [plot.method_courses, plot.trade_off])
def test_numbers_of_a_cost_do_not_overlap(draw: Callable[..., Axes], span: float) -> None:
    data = table(["fedavg", "fedper"])
    data["bytes"] = 23e3 * np.geomspace(1, span, len(data))
    for width in (3.0, 6.4):
        ax = draw(data, x="bytes", ax=plt.subplots(figsize=(width, 3), layout="constrained")[1])
        ax.figure.draw_without_rendering()
        assert overlaps(ax.xaxis) == []
        low, high = ax.get_xlim()
        assert sum(low <= tick <= high for tick in ax.get_xticks()) >= 2


def clusters(vectors: Any, **options: Any) -> Any:
    return fedstat.client_clusters(vectors, n_clusters=2, n_permutations=9, n_subsamples=2, **options)


def test_signed_similarities_have_diverging_colors_symmetric_about_0() -> None:
    signed, positive = clusters(RNG.normal(size=(8, 9))), clusters(1 + RNG.uniform(size=(8, 9)))
    image = plot.client_similarity(signed).images[0]
    drawn = np.ma.filled(image.get_array(), np.nan)
    limit = np.nanmax(np.abs(drawn))
    assert image.get_clim() == (-limit, limit)
    middle, low, high = (np.array(image.cmap(x)[:3]) for x in (0.5, 0.0, 1.0))
    assert middle.min() > 0.9, "0 is nearly white"
    assert low[2] > low[0] + 0.3, "negative values are blue"
    assert high[0] > high[2] + 0.3, "positive values are red, which color-blind readers tell from blue"
    sequential = plot.client_similarity(positive).images[0]
    assert sequential.get_clim()[0] > 0, "else all cells had one color"
    assert sequential.cmap.name != image.cmap.name


def test_similarities_side_by_side_share_a_scale() -> None:
    panels = [plot.client_similarity(clusters(RNG.normal(size=(8, n))), vmax=1).images[0] for n in (3, 50)]
    assert {image.get_clim() for image in panels} == {(-1, 1)}
    assert len({image.cmap.name for image in panels}) == 1
    x = xr.DataArray(RNG.normal(size=(3, 8, 8)), {"round": [1, 2, 3]}, ("round", "client", "other"))
    images = [ax.images[0] for ax in plot.similarity_over_rounds(x).axes if ax.get_title()]
    shown = np.where(np.eye(8, dtype=bool), np.nan, x)
    assert [image.get_clim() for image in images] == 3 * [(-np.nanmax(abs(shown)), np.nanmax(abs(shown)))]


def table(methods: list[str]) -> pd.DataFrame:
    """Accuracies near 1 and losses near 0 of three seeds that differ much."""
    rows = [
        {"scenario": "a", "method": m, "seed": s, "round": r, "accuracy": (0.6, 1, 1)[s], "train_loss": (0.9, 0, 0)[s],
         "bytes": 1e6 * r, "elapsed": r, "worst": 0.5, "client": s}
        for m in methods for s in range(3) for r in (1, 2, 3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def study(rounds_done: int = 4) -> xr.Dataset:
    """Study of two p, three replicates and two methods, of which a replicate differs much."""
    accuracy = np.ones((2, 1, 2, 3)) * [0.5, 1, 1]
    unchanged = np.ones((2, 1, 3, 4)) * np.reshape([0.5, 1, 1], (3, 1))
    unchanged[..., rounds_done:] = np.nan
    coords = {"p": [0.25, 0.5], "alpha": [0.4], "method": np.array(["true", "dynamic"], object), "round": range(2, 6)}
    variables = {
        "accuracy": (("p", "alpha", "method", "replicate"), accuracy),
        "prop_unchanged": (("p", "alpha", "replicate", "round"), unchanged),
    }
    return xr.Dataset(variables, coords)


def recovered() -> xr.Dataset:
    dims = ("p", "alpha", "kappa", "method", "replicate")
    coords = {"p": [0.5], "alpha": [0.4], "kappa": [0.5, 0.7], "method": np.array(["pa", "icc"], object)}
    return xr.Dataset({"auc": (dims, np.ones((1, 1, 2, 2, 3)) * [0.5, 1, 1])}, coords)


PROPORTIONS: dict[str, Callable[[], Axes]] = {
    "papers.stability": lambda: papers.stability(study()),
    "papers.accuracy": lambda: papers.accuracy(study()),
    "papers.recovery": lambda: papers.recovery(recovered()),
    "score_curves": lambda: plot.score_curves(table(["fedavg"])),
    "method_courses": lambda: plot.method_courses(table(["fedavg"])),
    "generalization": lambda: plot.generalization(made("GeneralizationResult")),
}


def vertices(ax: Axes) -> np.ndarray:
    """y of all bands and intervals, in data units, where they have limits."""
    bands = [area for area in ax.collections if area.get_offset_transform() != ax.transData]
    bars = [line for line in ax.lines if line.get_transform() == ax.transData and len(line.get_xdata()) == 2]
    drawn = [path.vertices[:, 1] for band in bands for path in band.get_paths()] + [bar.get_ydata() for bar in bars]
    y = np.concatenate(drawn).astype(float)
    return y[np.isfinite(y)]


@pytest.mark.parametrize("figure", [name for name in PROPORTIONS if name != "generalization"])
def test_intervals_of_proportions_stay_between_0_and_1(figure: str) -> None:
    y = vertices(PROPORTIONS[figure]())
    assert y.max() == 1, "the interval reaches the limit, and is cut off there"
    assert y.min() >= 0


def test_a_difference_and_a_loss_are_cut_off_at_possible_values_only() -> None:
    ax = papers.accuracy(study().assign(accuracy=study()["accuracy"] * [[1], [0.2]]), relative_to="true")
    assert vertices(ax).min() < -1, "differences of accuracies are not proportions"
    y = vertices(plot.loss_curves(table(["fedavg"])))
    assert (y.min(), y.max() > 1) == (0, True)
    box = plot.client_boxplot(table(["fedavg"]))
    (line,) = box.containers[0].lines[2][0].get_segments()
    assert line[:, 0].max() == 1


def test_panels_of_a_shorter_row_leave_no_frame_and_no_axis_without_numbers() -> None:
    figure, axes = panel_grid([3, 2], (2, 2), sharex=True)
    for ax in axes:
        ax.plot([0, 1], [0, 1])
        ax.set_xlabel("round")
    figure.draw_without_rendering()
    assert figure.axes == axes
    numbered = [any(t.get_visible() for t in ax.get_xticklabels()) for ax in axes]
    assert numbered == [False, False, True, True, True]
    assert [ax.xaxis.label.get_visible() for ax in axes] == numbered
    assert wrap_panels(7, 3) == [3, 3, 1]


SMALL = {"clients": 4, "d": 6, "m": 8, "n_train": 10, "n_test": 5, "replicates": 2, "methods": ("true", "dynamic")}


def test_settings_without_two_rounds_have_no_panel() -> None:
    run = sim.study(p=[0.25, 0.5], alpha=0.4, rounds=3, **SMALL)
    done = run["metrics"].to_dataset()
    done["rounds_done"] = done["rounds_done"] * (done["p"] == 0.5)
    run["metrics"] = done
    assert [ax.get_title() for ax in papers.stability_grid(run).axes] == [r"$p$ = 0.5, $\alpha$ = 0.4"]
    short = sim.study(p=0.5, alpha=0.4, rounds=1, **SMALL)
    with pytest.raises(ValueError, match=r"no study has a second round\. Run it with more rounds"):
        papers.stability_grid(short)
    with pytest.raises(ValueError, match="has no second round"):
        papers.stability(short)
    assert "proportion of units in the same group" not in [ax.get_ylabel() for ax in papers.study_grid(short).axes]


def test_a_line_at_1_stands_below_the_frame() -> None:
    run = sim.study(p=1.0, alpha=0.4, rounds=3, **SMALL)
    ax = papers.stability_grid(run).axes[0]
    low, high = ax.get_ylim()
    assert (1 - low) / (high - low) < 0.97


def test_a_caption_says_nothing_twice() -> None:
    runs = [sim.study(p=0.5, alpha=alpha, rounds=2, **SMALL) for alpha in (0.25, 0.5)]
    runs[1].attrs["revision"] = "of another commit"
    for figure in (papers.stability_grid(*runs), papers.accuracy_grid(*runs)):
        words = " ".join(figure.get_supxlabel().split())
        assert words.count("95% t intervals") == 1
        assert words.count("C = 4, d = 6, m = 8") == 1
        assert words.endswith(f"{runs[0].attrs['revision']}, of another commit")
        titles = [ax.get_title() for ax in figure.axes if ax.get_title()]
        assert len(titles) == len(set(titles))


def texts(canvas: Any) -> str:
    figure = canvas if isinstance(canvas, Figure) else canvas.figure
    figure.draw_without_rendering()
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_splits_of_the_simulation_have_the_titles_of_its_print() -> None:
    run = sim.study(p=[0.25, 0.5], alpha=0.4, rounds=2, **SMALL | {"methods": sim.experiment.METHODS})
    printed = sim.experiment.report(run)
    for figure in (papers.accuracy(run), papers.accuracy_grid(run), papers.study_grid(run)):
        shown = texts(figure)
        for name, title in sim.experiment.TITLES.items():
            assert title in shown
            assert f"\n  {title} " in printed
            assert not re.search(rf"^{name}$", shown, re.MULTILINE)
    assert {title_of(name) for name in ("static", "random")} <= set(METHODS.values())


def test_runs_of_an_attack_have_the_titles_and_colors_of_their_methods() -> None:
    data = made("LeakageResult").to_dataset().assign_coords(run=["fedavg", "fedfac-static, seed 1"])
    result = LeakageResult(data)
    ax = plot.leakage(result)
    names = [text.get_text() for text in ax.get_legend().get_texts()]
    assert names[-2:] == ["FedAvg", "FedFac static, seed 1"]
    colors = [container.lines[0].get_color() for container in ax.containers]
    assert colors == [style_of(run).colour for run in data["run"].values]
    assert {"FedAvg", "FedFac static, seed 1"} <= set(texts(plot.leakage_grid(result)).splitlines())


def words_of(path: Path) -> Iterator[str]:
    """Texts of a file of Python: docstrings and other strings, without names of methods and variables."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_texts_of_figures_have_the_terms_of_the_glossary_in_us_spelling() -> None:
    folders = (ROOT / name for name in ("fedstat/plot", "fedstat/reporting", "paper_figs"))
    files = [path for folder in folders for path in folder.glob("*.py")]
    wrong = re.compile(r"[Nn]euron|(?<![`.(])[Cc]olour(?!=| :)|\bgrey|\w+isation|standardised|neighbour")
    found = [(path.name, match.group()) for path in files for text in words_of(path) for match in wrong.finditer(text)]
    assert len(files) > 30
    assert found == []


def test_each_method_of_the_motivating_study_has_a_panel() -> None:
    run = fedstat.motivation.study(clients=10, hidden=6, local_epochs=1, common_samples=20, replicates=2)
    methods = run["split"].to_dataset()["method"].values
    points = [ax for ax in papers.motivation_grid(run).axes if "rank of communality" in ax.get_ylabel()]
    assert len(points) == 2 * len(methods)
    for ax in points:
        (dots,) = ax.collections
        assert len(dots.get_offsets()) == 6, "one point a unit"
        assert ax.get_legend() is None
    assert {ax.get_title().split("\n")[1].partition(":")[0] for ax in points} == set(methods)
    nu = run["split"].to_dataset()["communality"].sel({"case": "iid", "on": "weights", "method": "pc"}).to_series()
    drawn = papers.relation(run, case="iid", method="pc").collections[0].get_offsets()
    np.testing.assert_allclose(np.ma.filled(drawn[:, 1], np.nan), nu.rank(pct=True))


LAYERS = {"forest": "IccResult", "communality": "SplitResult"}


@pytest.mark.parametrize("figure", LAYERS)
def test_several_layers_have_a_panel_each_below_their_names_with_one_axis(figure: str) -> None:
    result = LayerResults({layer: made(LAYERS[figure]) for layer in ("conv1", "conv2", "fc1", "fc2", "fc3")})
    first = getattr(plot, figure)(result)
    panels = first.figure.axes
    assert [ax.get_title() for ax in panels] == [*result]
    assert first is panels[0]
    assert len({ax.get_xlim() for ax in panels}) == 1
    alone = getattr(plot, figure)(result["fc1"])
    assert [line.get_xdata()[0] for line in panels[2].lines] == [line.get_xdata()[0] for line in alone.lines]
    assert alone.get_title() == ""
    first.figure.draw_without_rendering()
    assert [any(t.get_visible() for t in ax.get_xticklabels()) for ax in panels] == [False, False, True, True, True]
    before = plt.get_fignums()
    with pytest.raises(ValueError, match=rf"ax must be None .*, as plot\.{figure}\(result\['conv1'\], ax=ax\)"):
        getattr(plot, figure)(result, ax=alone)
    with pytest.raises(TypeError, match=rf"plot\.{figure} takes .* but got ClientClustersResult"):
        getattr(plot, figure)(LayerResults({layer: made("ClientClustersResult") for layer in "ab"}))
    assert plt.get_fignums() == before, "an error leaves no empty figure"


def test_labels_below_panels_keep_to_their_width() -> None:
    of_layer = fedstat.bootstrap(MANY[:, :6], n_factors=2, method="pc", n_boot=9)
    result = LayerResults(dict.fromkeys(("fc1", "fc2", "fc3"), of_layer))
    for draw in (plot.forest, plot.communality):
        figure = draw(result).figure
        figure.draw_without_rendering()
        boxes = [ax.xaxis.label.get_window_extent() for ax in figure.axes]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_tab_offers_what_draws_and_no_helper() -> None:
    for place in (plot, papers):
        assert dir(place) == place.__all__
        kinds = [getattr(place, name).__annotations__["return"] for name in dir(place) if name != "papers"]
        assert {*kinds} <= {"Axes", "Figure"}
    assert len(dir(plot)) < 30
    assert not {"caption", "one_legend", "style_of", "study_dataset", "origins"} & {*dir(plot), *dir(papers)}
