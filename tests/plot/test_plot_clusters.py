"""Pictures of who is like whom: order, groups, one colour scale, clients that were not active."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

import fedstat

RNG = np.random.default_rng(0)
V = np.repeat(RNG.normal(size=(2, 9)), 4, axis=0) + RNG.normal(size=(8, 9))
ROUNDS = np.arange(1, 10)
MEASURE = xr.DataArray(
    RNG.uniform(size=(9, 8, 8)), {"round": ROUNDS}, ("round", "client", "other"), "likeness", {"units": "nats"}
)


def test_clients_stand_in_the_order_of_the_tree_with_their_groups():
    groups = np.array(list("ababbaba"))
    found = fedstat.client_clusters(V, n_clusters=3, groups=groups, n_permutations=9, n_subsamples=2)
    ax = fedstat.plot.client_similarity(found)
    drawn = ax.images[0].get_array().filled(np.nan)
    expected = found.similarity[np.ix_(found.order, found.order)]
    np.fill_diagonal(expected, np.nan)
    np.testing.assert_array_equal(drawn, expected)
    assert [t.get_text() for t in ax.get_xticklabels()] == [str(i) for i in found.order]
    strip = ax.child_axes[0].images[0].get_array()[:, 0]
    np.testing.assert_array_equal(np.array(list("ab"))[strip], groups[found.order])
    assert sum(p.get_width() for p in ax.patches) == 8
    assert len(ax.patches) == 3
    with pytest.raises(TypeError, match="takes the result of client_clusters, but got ndarray"):
        fedstat.plot.client_similarity(V)


def test_rounds_share_one_colour_scale():
    x = MEASURE.where(MEASURE["round"] != 3)
    figure = fedstat.plot.similarity_over_rounds(x)
    shown = [ax for ax in figure.axes if ax.get_title()]
    assert [ax.get_title() for ax in shown] == [f"round {r}" for r in (1, 2, 5, 6, 8, 9)]
    assert len({ax.images[0].get_clim() for ax in shown}) == 1
    two = fedstat.plot.similarity_over_rounds(x, rounds=[9, 2], order=range(7, -1, -1))
    drawn = two.axes[0].images[0].get_array().filled(np.nan)
    expected = x.sel(round=9).values[::-1, ::-1]
    np.testing.assert_array_equal(drawn, np.where(np.eye(8), np.nan, expected))
    assert two.axes[-1].get_ylabel() == "likeness (nats)"
    with pytest.raises(ValueError, match=r"rounds must be one of .*, but got 3"):
        fedstat.plot.similarity_over_rounds(x, rounds=[3])
    with pytest.raises(ValueError, match="each of the 8 positions of clients once"):
        fedstat.plot.similarity_over_rounds(x, order=[0, 1])
    with pytest.raises(ValueError, match="is NaN in all"):
        fedstat.plot.similarity_over_rounds(x * np.nan)


def test_lines_are_of_active_clients_and_the_band_is_their_quartiles():
    x = MEASURE[:, :, 0].where(RNG.uniform(size=(9, 8)) < 0.7)
    x[4] = np.nan
    ax = fedstat.plot.client_lines(x)
    live = x.dropna("round", how="all")
    own = ax.lines[0].get_xydata()
    np.testing.assert_array_equal(own[:, 1], x[:, 0].dropna("round"))
    median = next(line for line in ax.lines if line.get_label() == "median client").get_xydata()
    np.testing.assert_allclose(median, np.column_stack([live["round"], live.median("client")]))
    corners = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose(corners.max(), live.quantile(0.75, "client").max())
    with pytest.raises(ValueError, match="must have the dims round and client, but got"):
        fedstat.plot.client_lines(MEASURE)
