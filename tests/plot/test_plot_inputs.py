"""Every figure takes all that it could mean, and says of the rest what it takes."""

from __future__ import annotations

import inspect
from functools import cache
from itertools import pairwise
from operator import attrgetter

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from layers import weights
from made_results import MADE, TABLE, W, made
from matplotlib import pyplot as plt

import fedstat
from fedstat import plot, sim, store
from fedstat.plot.simulation import study_dataset
from fedstat.results import BootstrapResult, LayerResults
from fedstat.study import run_table

OF_FACTORS = {
    "FactorResult", "SplitResult", "BootstrapResult", "JackknifeResult", "PermutationResult", "SensitivityResult"
}  # fmt: skip
MEANT = {
    "client_similarity": {"ClientClustersResult"},
    "communality": OF_FACTORS | {"IccResult", "StoredSplitResult"},
    "convergence": {"ConvergenceResult"},
    "differences": {"ComparisonResult", "RunsResult"},
    "entropies": {"EntropyResult"},
    "forest": {
        "BootstrapResult", "ComparisonResult", "ComponentsResult", "EffectiveRankResult", "EntropyResult",
        "ExtremeEigenvalues", "GroupIccResult", "IccResult", "LeakageResult", "RunsResult", "ShrunkenResult",
    },
    "freezing": {"ConvergenceResult"},
    "generalization": {"GeneralizationResult"},
    "leakage": {"LeakageResult"},
    "leakage_grid": {"LeakageResult"},
    "loadings": OF_FACTORS,
    "scree": OF_FACTORS | {"NFactorsResult"},
    "split_map": {"SplitMapResult"},
    "sensitivity": {"SensitivityResult"},
}  # fmt: skip
OF_LAYERS = (*OF_FACTORS, "IccResult", "ComponentsResult", "ClientClustersResult", "NFactorsResult", "SplitMapResult")
FIGURES = sorted({*plot.__all__, *(f"papers.{name}" for name in plot.papers.__all__)} - {"papers"})
OF_SEVERAL = {"communality", "forest"}


def contents(ax):
    arrays = [line.get_xydata() for line in ax.lines]
    arrays += [image.get_array() for image in ax.images]
    arrays += [points.get_offsets() for points in ax.collections]
    arrays += [path.vertices for areas in ax.collections for path in areas.get_paths()]
    arrays += [bar.get_patch_transform().transform(bar.get_path().vertices) for bar in ax.patches]
    return [np.ma.filled(np.ma.asarray(array, float), np.nan) for array in arrays if np.size(array)]


def drawn_on(canvas):
    """Labels of axes or a figure, and numbers of what is drawn on them, to the bit."""
    figure = canvas if isinstance(canvas, mpl.figure.Figure) else canvas.figure
    labels = [(ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) for ax in figure.axes]
    numbers = [array for ax in figure.axes for array in contents(ax)]
    plt.close(figure)
    assert numbers
    return labels, [(array.shape, array.tobytes()) for array in numbers]


def draw(figure, data):
    """Draw a figure, whose arguments are its data alone where there is no choice."""
    return attrgetter(figure)(plot)(data, **({"case": "iid"} if figure == "papers.relation" else {}))


@pytest.mark.parametrize("figure", [figure for figure in FIGURES if figure != "by_setting"])
def test_a_figure_names_what_it_takes_where_it_gets_another_result_or_those_of_several_layers(figure):
    for name in sorted(set(MADE) - MEANT.get(figure, set())):
        with pytest.raises(TypeError, match=rf"plot\.{figure} takes .*, but got {name}\."):
            draw(figure, made(name))
    if figure in OF_SEVERAL:
        return
    several = LayerResults({"fc1": made("SplitResult"), "fc2": made("SplitResult")})
    message = (
        rf"plot\.{figure} takes .*, but got LayerResults\. Choose one of the layers fc1, fc2, "
        rf"as plot\.{figure}\(result\["
    )
    with pytest.raises(TypeError, match=message):
        draw(figure, several)


def test_no_figure_draws_on_the_current_axes():
    _, current = plt.subplots()
    first = plot.scree(made("SplitResult"))
    second = plot.profile(
        pd.DataFrame({"layer": ["a"], "round": [1], "reliability": [0.1], "conf_low": [0], "conf_high": [0.2]})
    )
    assert first.figure is not second.figure
    assert plot.communality(made("PermutationResult"), ax=second) is second
    assert not current.has_data()
    for figure in FIGURES:
        if "ax" in inspect.signature(attrgetter(figure)(plot)).parameters:
            assert inspect.signature(attrgetter(figure)(plot)).parameters["ax"].default is None


@pytest.fixture(scope="module")
def trained():
    data = sim.generate(clients=4, d=8, m=10, n_train=20, n_test=10)
    method = fedstat.fl.algorithms.fedfac(["fc1"], kappa=0.7)
    return fedstat.fl.train(data, fedstat.fl.nets.mlp([8, 10, 1]), method, rounds=3, probe="split-half"), data


def test_a_run_is_drawn_by_every_figure_of_runs(trained):
    run, data = trained
    ax = plot.communality(run)
    assert ax.get_xlabel().endswith("in round 3")
    assert sum(p.get_height() for p in ax.patches) == 10
    node = plot.communality(run["split/fc1"])
    assert [p.get_height() for p in node.patches] == [p.get_height() for p in ax.patches]
    lines = plot.rounds(run).lines
    expected = plot.rounds(run["split/fc1/shared"]).lines
    for one, other in zip(lines, expected, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())
    assert lines[0].get_xdata().tolist() == [2, 3]
    clients = plot.client_lines(run).lines
    np.testing.assert_array_equal(clients[0].get_ydata(), run["metrics/accuracy"][:, 0])
    assert [t.get_text() for t in plot.client_boxplot({"mine": run}).get_yticklabels()] == ["mine"]
    assert len(plot.client_boxplot([run]).get_yticklabels()) == 1
    assert plot.loss_curves(run).get_ylabel() == "training loss"
    np.testing.assert_allclose(
        plot.score_curves(run).lines[0].get_ydata(), run_table.curve(run, "accuracy")["accuracy"]
    )
    assert plot.profile(run).get_xlabel() == "round"
    sizes = sorted(plot.partition(run).collections[0].get_sizes())
    assert sizes == sorted(plot.partition(data, split="train").collections[0].get_sizes())
    with pytest.raises(ValueError, match=r"layer must be one of 'fc[12]', 'fc[12]', but got 'fc3'"):
        plot.rounds(run, layer="fc3")
    with pytest.raises(ValueError, match="must have one array over client, other, round, but has none"):
        plot.similarity_over_rounds(run)
    with pytest.raises(ValueError, match="its algorithm splits no layer"):
        plot.communality(xr.DataTree.from_dict({"/metrics": run["metrics"].to_dataset()}))


def test_a_study_is_drawn_without_taking_it_apart(studies):
    run, _ = studies("sim")
    for draw in (plot.papers.accuracy, plot.papers.stability):
        assert drawn_on(draw(run)) == drawn_on(draw(study_dataset(run)))
    with pytest.raises(TypeError, match=r"plot.papers.stability takes a run of fedstat.sim.study"):
        plot.papers.stability(run["metrics"])


def test_the_forest_of_a_bootstrap_has_its_intervals_and_the_threshold():
    result = fedstat.bootstrap(weights(clients=8), n_factors=2, n_boot=9)
    assert isinstance(result, BootstrapResult)
    ax, table = plot.forest(result), result.tidy().sort_values("estimate", ascending=False)
    label = ax.get_xlabel().replace("\n", " ")
    assert "95% CIs: expected communality in samples of 8 clients, not the population's" in label
    segments = np.array(ax.collections[0].get_segments())
    np.testing.assert_allclose(segments[:, :, 0], table[["conf_low", "conf_high"]])
    assert ax.lines[0].get_xdata()[0] == result.split.threshold
    faces = ax.collections[1].get_facecolors()[:, 0]
    assert (faces < 0.5).tolist() == (table["group"] == "shared").tolist()


def test_a_dark_style_draws_text_and_points_light_on_dark():
    result = made("BootstrapResult")
    shared = (result.tidy().sort_values("estimate", ascending=False)["group"] == "shared").tolist()
    for style, page in (("default", 1.0), ("dark_background", 0.0)):
        with plt.style.context(style):
            ax = plot.forest(result)
        faces = ax.collections[1].get_facecolors()[:, 0]
        assert (abs(faces - page) > 0.5).tolist() == shared, "filled is what differs from the background"
        assert abs(ax.collections[1].get_edgecolors()[:, 0] - page).min() > 0.5
        lines = [mpl.colors.to_rgb(line.get_color())[0] for line in ax.lines]
        assert all(abs(line - page) > 0.25 for line in lines)


def test_the_forest_of_a_comparison_has_the_simultaneous_intervals_in_the_order_of_the_methods():
    result = fedstat.compare(TABLE, reference="a")
    ax, table = plot.forest(result), result.tidy()
    segments = np.array(ax.collections[0].get_segments())
    np.testing.assert_allclose(segments[:, :, 0], table[["sim_conf_low", "sim_conf_high"]])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["b", "c"]
    tidy = plot.forest(result.tidy())
    np.testing.assert_allclose(np.array(tidy.collections[0].get_segments())[:, :, 0], table[["conf_low", "conf_high"]])
    with pytest.raises(ValueError, match=r"must have the columns .* lacks \['conf_high'\]"):
        plot.forest(result.tidy().drop(columns="conf_high"))


def test_a_split_without_intervals_says_how_to_get_them():
    with pytest.raises(TypeError, match=r"no intervals: draw fedstat.bootstrap\(weights\)"):
        plot.forest(made("SplitResult"))
    by_agreement = fedstat.split(W, method="icc")
    ax = plot.forest(by_agreement)
    assert by_agreement.threshold in [line.get_xdata()[0] for line in ax.lines]
    by_test = fedstat.split(xr.concat([W, W + 1e-3], "replicate"), method="icc", tau="test")
    assert "reliability of client differences" in by_test.plot().get_xlabel()
    assert "○ inconclusive" in plot.forest(by_test).get_xlabel()
    two = plot.forest(fedstat.icc(W.isel(client=slice(2)))).get_xlabel()
    assert "interval" not in two, "there is none"
    dead = fedstat.split(np.zeros((4, 2, 5, 6)), method="icc", tau="test")
    assert not dead.plot().patches


def test_many_units_are_named_where_names_fit_and_a_gap_parts_the_ends():
    many = fedstat.icc(np.random.default_rng(0).normal(size=(12, 200, 10)))
    ax = plot.forest(many)
    at = ax.get_yticks()
    assert np.diff(at).max() == 2, "a gap between the two ends"
    assert ax.get_title() == "20 highest and 20 lowest of 200 units"
    _, small = plt.subplots(figsize=(4, 4))
    plot.forest(many, units=200, ax=small)
    small.figure.draw_without_rendering()
    boxes = [t.get_window_extent() for t in small.get_yticklabels()]
    assert len(boxes) < 60
    assert all(below.y1 <= above.y0 + 1 for above, below in pairwise(boxes))


def test_shuffled_units_are_drawn_on_the_scale_of_the_units():
    result = made("PermutationResult")
    ax = plot.communality(result)
    outline = next(a for a in ax.get_children() if isinstance(a, mpl.patches.StepPatch))
    assert outline.get_data().values.sum() == pytest.approx(8)


def test_the_map_shows_the_labels_of_every_analysis():
    result = fedstat.split_map(W, kappas=(0.5, 0.75), methods=("pa", "pc", "icc"))
    ax = plot.split_map(W, kappas=(0.5, 0.75), methods=("pa", "pc", "icc"))
    shown = np.asarray(ax.images[0].get_array()).T == 2
    names = [t.get_text().replace(r"\$", "$") for t in ax.get_yticklabels()]
    order = [list(result.units).index(name) for name in names]
    np.testing.assert_array_equal(shown, result.shared[:, order])
    assert (np.diff(result.prop_shared[order]) <= 0).all()
    with pytest.raises(TypeError, match="options kappas need weights, but got a result"):
        plot.split_map(result, kappas=(0.5,))


@pytest.fixture(scope="module")
def stored(trained, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    trained[0].to_zarr(path, consolidated=False, zarr_format=3)
    return path


RUNS = [
    "score_curves", "client_boxplot", "client_lines", "communality", "loss_curves", "partition", "profile", "rounds"
]  # fmt: skip


@pytest.mark.parametrize("figure", RUNS)
def test_the_path_of_a_run_is_drawn_as_the_run(trained, stored, figure):
    expected = drawn_on(draw(figure, trained[0]))
    several = figure in ("score_curves", "client_boxplot", "loss_curves")
    for data in (str(stored), *([[stored], {"fedfac": stored}] if several else [])):
        assert drawn_on(draw(figure, data)) == expected


SAVED = sorted((figure, name) for figure, names in MEANT.items() for name in names)
FIRST = {name: figure for figure, name in reversed(SAVED)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Function from the name of a result to the paths of its store and of its file."""
    folder = tmp_path_factory.mktemp("saved")

    @cache
    def paths(name):
        both = folder / f"{name}.zarr", str(folder / f"{name}.json")
        for path in both:
            made(name).save(path)
        return both

    return paths


@pytest.mark.parametrize(("figure", "name"), SAVED)
def test_a_result_is_drawn_from_its_path_and_as_that_of_the_only_layer(saved, figure, name):
    expected, (store_path, file_path) = drawn_on(draw(figure, made(name))), saved(name)
    assert drawn_on(draw(figure, store_path)) == expected
    if figure == FIRST[name]:  # all figures read paths by one function
        assert drawn_on(draw(figure, file_path)) == expected
    if name in OF_LAYERS:
        assert drawn_on(draw(figure, LayerResults({"fc1": made(name)}))) == expected


STUDIES = {
    "sim": [f"papers.{name}" for name in ("accuracy", "stability", "accuracy_grid", "study_grid", "stability_grid")],
    "recovery": ("papers.recovery", "papers.recovery_grid"),
    "motivation": ("entropies", *(f"papers.{name}" for name in ("relation", "fig1", "fig2", "motivation_grid"))),
    "convergence": ("convergence", "freezing"),
    "generalization": ("generalization",),
    "leakage": ("leakage", "leakage_grid"),
}


SMALL = {"p": 0.5, "alpha": 0.4, "clients": 4, "d": 6, "m": 8, "replicates": 2}
TRAINED = {"methods": ["true", "dynamic"], "n_train": 10, "n_test": 5, "rounds": 2}
MOTIVATION = {"clients": 10, "hidden": 6, "local_epochs": 1, "common_samples": 20, "replicates": 2}


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Function from the name of a study to its result, and the path of its store."""
    folder = tmp_path_factory.mktemp("studies")

    @cache
    def made_study(name):
        path = folder / f"{name}.zarr"
        if name == "sim":
            return sim.study(**SMALL, **TRAINED, out=path), path
        if name == "motivation":
            return fedstat.motivation.study(**MOTIVATION, out=path), path
        if name == "recovery":
            result = sim.recover(**SMALL, kappa=[0.5, 0.9])
            tree, command = xr.DataTree(result), "fedstat.sim.recovery"
        elif name == "leakage":
            result = made("LeakageResult")
            data = result.to_dataset()
            names = {name: coord.astype(object) for name, coord in data.coords.items() if coord.dtype.kind == "U"}
            tree, command = xr.DataTree.from_dict({"/leakage": data.assign_coords(names)}), "fedstat.attack"
        else:
            result = made(f"{name.capitalize()}Result")
            tree, command = result.to_datatree(), "fedstat.ntk"
        attrs = tree.attrs | store.provenance(name, {}, command=command)
        store.save(path, tree, attrs | ({"result": tree.attrs["result"]} if "result" in tree.attrs else {}))
        return result, path

    return made_study


@pytest.mark.parametrize(("study", "figure"), [(study, figure) for study, names in STUDIES.items() for figure in names])
def test_the_path_of_a_study_is_drawn_as_the_study(studies, study, figure):
    expected, drawn = (draw(figure, data) for data in studies(study))
    assert drawn_on(drawn) == drawn_on(expected)


def test_every_figure_of_a_run_or_a_study_takes_its_path():
    of_tables = {"critical_difference", "method_courses", "trade_off", "shares", "by_setting"}
    of_tables |= {f"papers.{name}" for name in ("heatmap", "spectrum", "spectrum_grid", "kappa_window")}
    of_weights = {"weights", "split_map"}
    tested = {*MEANT, *RUNS, *(figure for names in STUDIES.values() for figure in names)}
    assert tested | of_tables | of_weights | {"similarity_over_rounds"} == set(FIGURES)


def test_the_heat_map_of_weights_is_that_of_a_loop_over_clients_and_units():
    w = np.random.default_rng(0).normal(size=(5, 3, 2, 2))
    w[:, 1] = w[:1, 1]  # equal in all clients
    w[4] = np.nan  # not selected
    drawn = plot.weights(w).images[0].get_array()
    for client in range(4):
        for unit in range(3):
            deviation = w[client, unit] - np.mean([w[c, unit] for c in range(4)], axis=0)
            assert drawn[client, unit] == pytest.approx(np.sqrt(np.mean(deviation**2)), abs=1e-12)
    assert np.isnan(np.ma.filled(drawn, np.nan)[4]).all()
    size = plot.weights(w, baseline=None).images[0].get_array()
    np.testing.assert_allclose(size[:4], np.sqrt((w[:4] ** 2).mean((2, 3))))


def test_the_heat_map_of_weights_needs_one_layer(trained):
    run, _ = trained
    ax = plot.weights(run)  # of the layers, all but the output layer
    assert ax.get_title() == "fc1"
    assert ax.images[0].get_array().shape == (4, 10)
    with pytest.raises(ValueError, match=r"layer must be one of fc1, fc2, but got '\*'\. Pass one as layer="):
        plot.weights(run, layer="*")
    with pytest.raises(ValueError, match="baseline must be one of 'mean', None"):
        plot.weights(run, baseline="median")


@pytest.mark.parametrize(
    ("figure", "values"),
    [(plot.rounds, np.eye(3, 4) > 0), (plot.weights, np.ones((3, 2, 4)))],
    ids=["rounds", "weights"],
)
def test_masked_values_are_not_drawn_as_if_they_were_known(figure, values):
    masked = np.ma.masked_array(values, mask=np.arange(values.size).reshape(values.shape) == 1)
    with pytest.raises(ValueError, match="but got a masked array with 1 masked values"):
        figure(masked)
