"""Figures show what the results hold."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import fedstat.labelled as fs
from fedstat.plot import factor as plot
from fedstat.plot import forest, rounds
from fedstat.sim import generate


@pytest.fixture
def weights() -> np.ndarray:
    rng = np.random.default_rng(0)
    alike = rng.normal(size=(1, 2, 30)).repeat(8, axis=1) + 0.6 * rng.normal(size=(6, 16, 30))
    return np.concatenate([alike, rng.normal(size=(6, 8, 30))], axis=1)


def test_the_histogram_counts_every_live_unit_and_marks_the_threshold(weights: np.ndarray) -> None:
    weights[:, 3] = 0
    split = fs.split(weights, n_factors=2, method="pc", tau=0.4)
    ax = plot.communality(split)
    assert sum(p.get_height() for p in ax.patches) == 23
    assert ax.lines[0].get_xdata()[0] == split.threshold
    assert "nu" in ax.get_xlabel()


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_the_name_of_the_threshold_stands_within_the_frame(tau: float) -> None:
    weights = generate(clients=30, d=60, m=24, seed=0)["w"]
    ax = plot.communality(
        fs.split(weights + 0.5 * np.random.default_rng(1).normal(size=weights.shape), kappa=0.75, tau=tau)
    )
    ax.figure.draw_without_rendering()
    (name,) = ax.texts
    assert ax.get_window_extent().x0 < name.get_window_extent().x0
    assert name.get_window_extent().x1 < ax.get_window_extent().x1


def test_bootstrap_intervals_stand_above_the_histogram(weights: np.ndarray) -> None:
    clients = np.concatenate([weights, weights + 0.1 * np.random.default_rng(0).normal(size=weights.shape)])
    result = fs.bootstrap(clients, n_factors=2, method="pc", n_boot=20)
    ax = plot.communality(result)
    segments = ax.collections[0].get_segments()
    assert len(segments) == 24
    label = ax.get_xlabel().replace("\n", " ")
    assert label.endswith("95% CIs: expected communality in samples of 12 clients, not the population's")
    table = result.tidy().sort_values("estimate")
    np.testing.assert_allclose([s[0][0] for s in segments], table["conf_low"])
    top = max(p.get_y() + p.get_height() for p in ax.patches)
    assert all(s[0][1] > top for s in segments)


def test_a_jackknife_is_drawn_with_one_standard_error_either_side(weights: np.ndarray) -> None:
    clients = np.concatenate([weights, weights + 0.1 * np.random.default_rng(0).normal(size=weights.shape)])
    result = fs.jackknife(clients, n_factors=2, method="pc")
    ax = result.plot()
    table = result.tidy().sort_values("estimate")
    low, high = np.array([[segment[0][0], segment[1][0]] for segment in ax.collections[0].get_segments()]).T
    np.testing.assert_allclose((high - low) / 2, table["std_error"])
    np.testing.assert_allclose((high + low) / 2, table["estimate"])
    assert ax.get_xlabel().replace("\n", " ").endswith("one standard error either side (jackknife over clients)")


def test_the_threshold_is_not_drawn_where_it_is_infinite(weights: np.ndarray) -> None:
    assert not plot.communality(fs.split(weights, n_factors=2, method="pc", tau=float("inf"))).lines


def test_the_scree_marks_every_rule(weights: np.ndarray) -> None:
    z = fs.layer_matrix(weights)
    result = fs.n_factors(z)
    ax = plot.scree(result)
    legend = ax.get_legend()
    assert legend is not None
    text = " ".join(t.get_text() for t in legend.get_texts())
    for name, g in result.numbers_by_name().items():
        assert name in text
        assert f": {g}" in text
    assert "parallel analysis, PC" in text
    np.testing.assert_allclose(ax.lines[0].get_ydata(), result.curves["eigenvalues"])
    assert "n_factors: 2" in [t.get_text() for t in plot.scree(fs.fa(z, n_factors=2)).get_legend().get_texts()]


def test_the_heat_map_is_ordered_and_truncated(weights: np.ndarray) -> None:
    fit = fs.split(weights, n_factors=2, method="pc").fit
    ax = plot.loadings(fit, units=10)
    values = np.asarray(ax.collections[0].get_array()).reshape(10, 2)
    order = np.argsort(-fit.communality)
    np.testing.assert_allclose(values, fit.loadings[np.r_[order[:5], order[-5:]]])
    assert ax.get_title() == "5 highest and 5 lowest of 24 units"


def test_stability_over_rounds_is_the_share_of_units_that_keep_their_state() -> None:
    shared = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]], dtype=bool)
    ax = rounds(shared)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.75, 0.75, 1])
    assert ax.lines[1].get_ydata()[-1] == 1
    with pytest.raises(ValueError, match="at least 2 rounds"):
        rounds(shared[:1])


def test_the_forest_names_every_unit_beside_its_interval_and_the_layer_below(weights: np.ndarray) -> None:
    weights[:, 3] = 0
    named = xr.DataArray(weights, dims=("client", "unit", "weight"), coords={"unit": [f"u{j}" for j in range(24)]})
    result = fs.icc(named)
    ax = forest(result)
    table = result.tidy().query("type == 'ICC2'").dropna(subset="icc").sort_values("icc", ascending=False)
    names = [t.get_text() for t in ax.get_yticklabels()]
    assert names == [*table["unit"], "layer"]
    segments = np.array(ax.collections[0].get_segments())
    np.testing.assert_allclose(segments[:, :, 0], table[["conf_low", "conf_high"]])
    np.testing.assert_allclose(ax.collections[1].get_offsets(), np.c_[table["icc"], np.arange(23)])
    layer, bottom = result.layer.query("type == 'ICC2'").iloc[0], ax.get_yticks()[-1]
    np.testing.assert_allclose(
        ax.collections[2].get_segments(), [[[x, bottom] for x in layer[["conf_low", "conf_high"]]]]
    )
    np.testing.assert_allclose(ax.collections[3].get_offsets(), [[layer["icc"], bottom]])
    assert ax.get_title() == "undefined units left out: 1"
    ax = forest(fs.icc(named, n_boot=10), units=5, type="ICC3")
    assert ax.get_title() == "3 highest and 2 lowest of 23 units\nundefined units left out: 1"
    assert len(ax.get_yticklabels()) == 6
    assert ax.get_xlabel().startswith("ICC3, 95% CI (bootstrap over clients)\n")
    with pytest.raises(ValueError, match="Did you mean 'ICC"):
        forest(result, type="ICC4")  # type: ignore[arg-type]


def test_the_legend_of_communalities_covers_no_interval(weights: np.ndarray) -> None:
    ax = plot.communality(fs.bootstrap(weights, n_factors=2, n_boot=20))
    ax.figure.draw_without_rendering()
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["shared", "personal"]
    assert legend.get_window_extent().ymin >= ax.get_window_extent().ymax
