"""Names of methods, runs, settings and layers: shown as they are, and apart within a figure, in every figure."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from made_results import made
from matplotlib.text import Text

import fedstat
from fedstat import plot
from fedstat.fl.algorithms import ALGORITHMS
from fedstat.plot import papers
from fedstat.plot._styles import STYLES, style_of, styles_of, title_of
from fedstat.results import LeakageResult

AWKWARD = ["_hidden", "$x^2$", "cost_$", "a $ b $ c", "__init__", r"\alpha $\beta$", "plain"]
OWN = ["ours", "gpfl", "mine", "yours", "fedx", "cfl", "moon", "scaffold"]
RNG = np.random.default_rng(0)


def table(names: Sequence[str]) -> pd.DataFrame:
    rows = [
        {"scenario": label, "method": m, "seed": s, "round": r, "accuracy": RNG.uniform(), "train_loss": RNG.uniform(),
         "bytes": 1e6 * r, "elapsed": 0.1 * r, "worst": RNG.uniform(), "client": s}
        for label in ("a", "b") for m in names for s in range(3) for r in (1, 2)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def differences(names: Sequence[str], labels: Sequence[str] = ("a", "b")) -> pd.DataFrame:
    rows = [{"scenario": x, "method": m, "difference": 0.1, "low": 0.0, "high": 0.2} for x in labels for m in names]
    return pd.DataFrame(rows)


def one(data: pd.DataFrame) -> pd.DataFrame:
    return data[data["scenario"] == "a"]


METHODS: dict[str, Callable[[Sequence[str]], Any]] = {
    "client_boxplot": lambda names: plot.client_boxplot(one(table(names))),
    "loss_curves": lambda names: plot.loss_curves(one(table(names))),
    "score_curves": lambda names: plot.score_curves(one(table(names))),
    "differences": lambda names: plot.differences(differences(names)),
    "critical_difference": lambda names: plot.critical_difference(
        pd.DataFrame(RNG.normal(size=(6, len(names))), columns=list(names)), highlight=names
    ),
    "method_courses": lambda names: plot.method_courses(one(table(names)), highlight=names),
    "trade_off": lambda names: plot.trade_off(one(table(names)), highlight=names),
    "by_setting": lambda names: plot.by_setting(table(names), plot.method_courses, highlight=names),
    "forest": lambda names: plot.forest(
        fedstat.compare(one(table(names)).query("round == 1"), reference=names[-1])
    ),
}  # fmt: skip
OTHERS: dict[str, Callable[[Sequence[str]], Any]] = {
    "settings of differences": lambda names: plot.differences(differences(["x"], names)),
    "settings of by_setting": lambda names: plot.by_setting(
        pd.concat([one(table(["x"])).assign(scenario=n) for n in names]), plot.method_courses, highlight=["x"]
    ),
    "layers of profile": lambda names: plot.profile(layers(names, rounds=1)),
    "layers of profile over rounds": lambda names: plot.profile(layers(names, rounds=2)),
    "layers of components": lambda names: plot.profile(dict.fromkeys(names, made("ComponentsResult")), parts=True),
    "layers of shares": lambda names: plot.shares(
        layers(names, rounds=1).rename(columns={"conf_low": "low", "conf_high": "high"})
        .assign(scenario="a", place=range(len(names)))
    ),
    "clients and units of weights": lambda names: plot.weights(
        xr.DataArray(RNG.normal(size=(7, 7, 3)), {"client": [*names], "unit": [*names]}, ("client", "unit", "weight"))
    ),
    "groups of client_similarity": lambda names: plot.client_similarity(
        fedstat.client_clusters(RNG.normal(size=(14, 9)), n_clusters=2, groups=[*names, *names], n_subsamples=2,
                                n_permutations=9)
    ),
}  # fmt: skip
WITHOUT = {
    "accuracy", "accuracy_grid", "convergence", "freezing", "generalization", "recovery", "recovery_grid",
    "sensitivity", "stability", "stability_grid", "study_grid", "spectrum", "spectrum_grid", "kappa_window",
    "heatmap", "entropies", "relation", "fig1", "fig2", "motivation_grid", "partition", "rounds",
    "scree", "communality", "loadings", "split_map",
    "client_lines", "similarity_over_rounds", "leakage", "leakage_grid", "profile", "shares", "client_similarity",
    "weights",
}  # fmt: skip
"""Figures whose names are fedstat's own, or whose users' names (runs, layers, groups) have a row of their own."""


def layers(names: Sequence[str], rounds: int) -> pd.DataFrame:
    share = {"reliability": 0.5, "conf_low": 0.4, "conf_high": 0.6}
    return pd.DataFrame([{"layer": n, "round": r, **share} for n in names for r in range(rounds)])


def test_every_figure_has_a_row() -> None:
    made = {name for place in (plot, papers) for name in place.__all__ if inspect.isfunction(getattr(place, name))}
    assert made == {*METHODS} | WITHOUT


def drawn(made: Any) -> list[str]:
    """What a reader sees: texts after Matplotlib's own reading of them; a text that is mathematics is an error."""
    figure = made.figure if hasattr(made, "figure") else made
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*layout not applied.*")
        figure.draw_without_rendering()
    found = []
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text():
            shown, mathematics = text._preprocess_math(text.get_text())
            found.append(f"MATH {shown}" if mathematics else shown)
    return found


@pytest.mark.parametrize("figure", [*METHODS, *OTHERS])
def test_names_are_shown_as_they_are(figure: str) -> None:
    texts = [text.strip() for text in drawn((METHODS | OTHERS)[figure](AWKWARD))]
    reference = [AWKWARD[-1]] if figure == "forest" else []
    for name in AWKWARD:
        assert name in texts or (name in reference and any(name in text for text in texts)), (name, texts)


@pytest.mark.parametrize("figure", METHODS)
def test_methods_have_the_titles_of_tables(figure: str) -> None:
    names = ["fedavg", "random-redrawn", "fedfac-static", "fedprox, mu=0.1"]
    shown = "\n".join(drawn(METHODS[figure](names)))
    for name in names:
        assert title_of(name) in shown
        assert name not in shown
    assert title_of("fedprox, mu=0.1") == "FedProx, mu=0.1"


def test_runs_of_an_attack_are_shown_as_they_are() -> None:
    class Given(LeakageResult):
        """The table that the figure reads."""

        def tidy(self) -> pd.DataFrame:
            estimate = {
                "labels": "given",
                "estimate": 12.0,
                "conf_low": 11.0,
                "conf_high": 13.0,
                "class_mean_psnr": 10.0,
            }
            return pd.DataFrame([{"run": n, "round": r, **estimate} for n in AWKWARD for r in (1, 2)])

    texts = [text.strip() for text in drawn(plot.leakage(Given(xr.Dataset(coords={"labels": ["given"]}))))]
    assert set(AWKWARD) <= set(texts)


def test_no_two_methods_of_a_figure_share_colour_and_marker_or_colour_and_line() -> None:
    """Of 1000 figures of 8 own methods and the published ones, and of variants of one method."""
    rng = np.random.default_rng(1)
    alone = 0
    for _ in range(300):
        names = ["".join(rng.choice([*"abcdefghij"], 6)) for _ in range(8)]
        alone += len({style_of(name)[:2] for name in names}) < 8
        found = styles_of([*names, *ALGORITHMS])
        assert found == styles_of([*ALGORITHMS, *reversed(names)])
        for part in (slice(0, 2), slice(0, 3, 2)):
            styles = [tuple(found[name])[part] for name in names]
            assert len(set(styles)) == 8
        assert {name: found[name] for name in ALGORITHMS} == {name: STYLES[name] for name in ALGORITHMS}
    assert alone > 30, "without regard for one another a tenth of them and more had such a pair"
    variants = ["fedprox", *(f"fedprox, mu={mu}" for mu in range(9))]
    found = styles_of(variants)
    assert len({(one.colour, one.marker) for one in found.values()}) == 10
    assert {one.colour for one in found.values()} == {STYLES["fedprox"].colour}
    many = styles_of([f"m{i}" for i in range(60)])
    assert len({one[:2] for one in many.values()}) == 60
    assert len(styles_of([f"m{i}" for i in range(70)])) == 70


@pytest.mark.parametrize("figure", ["score_curves", "differences", "critical_difference", "trade_off"])
def test_points_and_lines_of_a_figure_are_apart(figure: str) -> None:
    ax = METHODS[figure](OWN)
    if figure == "score_curves":
        lines = [line for line in ax.lines if line.get_linewidth() == 1.8 and len(line.get_xdata())]
        seen = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines]
    else:
        lines = [line for line in ax.lines if line.get_marker() not in ("None", "", "|", None)]
        seen = [(line.get_color(), line.get_marker()) for line in lines]
    assert len(seen) == 8
    assert all(x != y for x, y in combinations(seen, 2))
