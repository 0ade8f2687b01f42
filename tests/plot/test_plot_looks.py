"""How methods look: the same in every figure, and apart for colour-blind readers."""

from __future__ import annotations

from itertools import combinations

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

import fedstat
from fedstat import plot
from fedstat.fl import algorithms
from fedstat.ntk.descent import METHODS as NTK
from fedstat.plot._figure import sequential_colors
from fedstat.plot._styles import STYLES, ordered, style_of, styles_of
from fedstat.plot.training import score_curves
from fedstat.sim.experiment import METHODS as SPLITS

# Machado, Oliveira and Fernandes (2009), table 1, severity 1: on linear RGB.
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "none": np.eye(3).tolist(),
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, matrix):
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(np.array(matrix) @ linear, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("blind", BLIND)
def test_colours_that_share_a_figure_are_apart_for_every_reader(blind):
    """A difference of 2.3 is just noticeable; these are at least 10."""
    figures = {"Fig. 6": SPLITS, "Theorem 1": NTK, "FedFac": ["local", "fedavg", "fedper", "fedfac-dynamic", "random"]}
    for name, methods in figures.items():
        for x, y in combinations(methods, 2):
            apart = np.linalg.norm(lab(style_of(x).colour, BLIND[blind]) - lab(style_of(y).colour, BLIND[blind]))
            assert apart > 10, f"{name}: {x} and {y} are {apart:.1f} apart"


@pytest.mark.parametrize("blind", BLIND)
def test_known_groups_of_clients_are_apart_for_every_reader(blind):
    vectors = np.random.default_rng(0).normal(size=(20, 9))
    for n in (2, 4, 10):
        groups = np.arange(20) % n
        result = fedstat.client_clusters(vectors, n_clusters=2, groups=groups, n_permutations=9, n_subsamples=2)
        strip = plot.client_similarity(result).child_axes[0].images[0]
        colours = [strip.cmap(strip.norm(group))[:3] for group in range(n)]
        for x, y in combinations(colours, 2):
            assert np.linalg.norm(lab(x, BLIND[blind]) - lab(y, BLIND[blind])) > 10


def test_no_color_is_lost_on_a_dark_page():
    with plt.style.context("dark_background"):
        drawn = {name: style_of(name).colour for name in STYLES}
        shades = {palette: sequential_colors(palette, 4) for palette in ("viridis", "plasma", "crest")}
        assert all(style.colour == style_of(name).colour for name, style in styles_of(STYLES).items())
    for colour in (*drawn.values(), *(shade for of_palette in shades.values() for shade in of_palette)):
        assert lab(colour, BLIND["none"])[0] > 25, "L* of CIELAB, 0 is black"
    assert mpl.colors.same_color(drawn["fedsplit"], "white")
    assert drawn["fedavg-matched"] == STYLES["fedavg-matched"].colour, "light colors are kept"
    for palette, of_dark in shades.items():
        assert lab(sequential_colors(palette, 4)[0], BLIND["none"])[0] != lab(of_dark[0], BLIND["none"])[0]
        assert max(lab(shade, BLIND["none"])[0] for shade in sequential_colors(palette, 4)) < 90


def test_every_method_has_a_style_that_no_other_has():
    assert set(algorithms.ALGORITHMS) <= set(STYLES)
    assert len({(own.colour, own.marker, own.dashes) for own in STYLES.values()}) == len(STYLES)
    assert len({(own.marker, own.dashes) for own in map(style_of, SPLITS)}) == len(SPLITS), "grey keeps them apart too"
    assert all(mpl.markers.MarkerStyle(own.marker).is_filled() for own in STYLES.values())


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("fedprox, mu=0.1", "fedprox"),
        ("local-low-rank", "local"),
        ("FedAvg, personal head", "fedavg"),
        ("fedper+", "fedper"),
    ],
)
def test_a_variant_has_its_methods_colour_and_a_style_of_its_own(method, base):
    assert style_of(method).colour == style_of(base).colour
    assert style_of(method) != style_of(base)
    assert style_of(method) == style_of(method)


def test_an_unknown_name_has_the_same_look_whatever_stands_beside_it():
    assert style_of("mine") == style_of("mine")
    assert style_of("mine") != style_of("other")
    assert style_of("mine").colour not in {style_of(m).colour for m in SPLITS}
    assert style_of("").colour


def test_the_order_is_that_of_the_tables_of_methods():
    names = list(algorithms.ALGORITHMS)
    assert ordered(reversed(names)) == names
    assert ordered(SPLITS)[:3] == ["local", "fedavg", "true"]


def test_a_curve_has_the_colour_of_its_method_whatever_else_is_drawn():
    rows = [(m, s, r, r / 10 + s) for m in ("fedfac-dynamic", "fedavg", "local") for s in range(3) for r in range(1, 4)]
    data = pd.DataFrame(rows, columns=["method", "seed", "round", "accuracy"])
    for part in (data, data[data["method"] != "local"], data[data["method"] == "fedavg"]):
        ax = score_curves(part, ax=plt.figure().gca())
        names = [text.get_text() for text in ax.get_legend().get_texts()]
        colours = dict(zip(names, (line.get_color() for line in ax.lines), strict=False))
        assert mpl.colors.same_color(colours["FedAvg"], style_of("fedavg").colour)


def test_methods_that_one_table_compares_are_apart_in_colour_and_in_grey():
    for x, y in combinations(STYLES, 2):
        one, other = STYLES[x], STYLES[y]
        apart = np.linalg.norm(lab(one.colour, BLIND["none"]) - lab(other.colour, BLIND["none"]))
        assert apart > 10 or (one.marker, one.dashes) != (other.marker, other.dashes), f"{x} and {y}"
