"""Figures of the real-data study, and the feature maps that one of them shows."""

from __future__ import annotations

import _features as features
import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from fl_stores import grid
from numpy.testing import assert_allclose
from scipy import stats
from scripts import ROOT, load
from torch.nn import functional

import fedstat
from fedstat import plot
from fedstat.data import to_float
from fedstat.fl import nets
from fedstat.plot._styles import style_of
from fedstat.study import experiment, run_settings

DIGITS = {"clients": 6, "rounds": 1, "participation": 1.0, "net": "resnet8", "width": 0.25, "max_samples": 30}


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return grid(tmp_path_factory.mktemp("grid"), methods=("fedavg", "fedfac-static", "fedfac-dynamic"), seeds=2)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Real runs with a split convolution."""
    folder = tmp_path_factory.mktemp("digits")
    for algorithm, layers in (("fedavg", None), ("fedfac-dynamic", ("conv1",))):
        settings = run_settings.Settings.of(**DIGITS, algorithm=algorithm, layers=layers)
        experiment.run(settings, out=folder / f"{algorithm}.zarr")
    return folder


def figure(name, *arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert load(f"paper_figs/{name}.py").main([*map(str, arguments)]) == 0


@pytest.mark.parametrize("name", ["fig08", "fig09"])
def test_a_figure_is_made_from_a_grid(name, runs, tmp_path, monkeypatch):
    figure(name, "--runs", runs, "--out", tmp_path / "figure.png", monkeypatch=monkeypatch)
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_a_curve_that_was_not_run_is_said(runs, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        figure("fig09", "--runs", runs, "--methods", "fedavg", "fedrep", monkeypatch=monkeypatch)
    assert "not run: fedrep" in capsys.readouterr().err


def test_boxes_stand_in_the_order_of_all_figures_and_fedfac_is_filled():
    rng = np.random.default_rng(0)
    levels = {"fedfac-dynamic": 0.7, "mine": 0.9, "fedavg": 0.5}
    data = pd.concat(
        pd.DataFrame({"method": m, "seed": s, "accuracy": x + 0.01 * s + 0.01 * rng.normal(size=20)})
        for m, x in levels.items()
        for s in range(3)
    )
    ax = plot.client_boxplot(data)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["FedAvg", "FedFac dynamic", "mine"]
    faces = [patch.get_facecolor() for patch in ax.patches]
    assert [face[3] > 0.5 for face in faces] == [False, True, False]
    assert mpl.colors.same_color(faces[0][:3], style_of("fedavg").colour)
    of_seeds = data[data["method"] == "fedavg"].groupby("seed")["accuracy"].mean()
    (line,) = ax.containers[0].lines[2][0].get_segments()
    assert_allclose(line[:, 0], stats.ttest_1samp(of_seeds, 0).confidence_interval(0.95))


def test_loss_curves_have_a_line_a_method_and_a_band_over_seeds():
    rows = [(m, s, r, 2 / r + 0.1 * s) for m in ("fedavg", "fedfac-dynamic") for s in range(3) for r in range(1, 6)]
    ax = plot.loss_curves(pd.DataFrame(rows, columns=["method", "seed", "round", "train_loss"]))
    assert_allclose(ax.lines[0].get_ydata(), 2 / np.arange(1, 6) + 0.1)
    assert len(ax.collections) == 2
    with pytest.raises(ValueError, match="a column of data must be one of 'method'"):
        plot.loss_curves(pd.DataFrame({"method": [], "seed": []}))


def test_feature_maps_are_those_of_the_convolution_itself():
    net = nets.named("cnn", (3, 28, 28), 10, width=0.25)
    params = {name: p.unsqueeze(0) for name, p in net.init(np.random.default_rng(0)).items()}
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(2, 3, 28, 28)).astype(np.float32))
    first = functional.conv2d(x, params["conv1.weight"][0], params["conv1.bias"][0])
    assert_allclose(features.feature_maps(net, params, "conv1", x), first, atol=1e-5)
    second = functional.conv2d(
        functional.relu(functional.max_pool2d(first, 2)), params["conv2.weight"][0], params["conv2.bias"][0]
    )
    assert_allclose(features.feature_maps(net, params, "conv2", x), second, atol=1e-5)
    with pytest.raises(ValueError, match="must be a convolution, but got 'fc1'"):
        features.feature_maps(net, params, "fc1", x)


def test_filters_are_shown_by_kind_beside_fedavg(digits, tmp_path, monkeypatch):
    fig10, drawn = load("paper_figs/fig10.py"), features.feature_grid
    made, seen, shown, images = fig10.side_by_side, [], [], []
    monkeypatch.setattr(
        fig10, "side_by_side", lambda *a, **k: images.append(a[4]) or seen.append(made(*a, **k)) or seen[-1]
    )
    monkeypatch.setattr(features, "feature_grid", lambda *a: shown.append(a) or drawn(*a))
    assert fig10.main(["--runs", str(digits), "--out", str(tmp_path / "figure.png")]) == 0
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    for ours, theirs in zip(shown[0][1:], seen[0], strict=True):
        assert_allclose(ours, theirs)
    assert (shown[0][0].min(), shown[0][0].max()) == (0, 1)
    assert -2 < images[0].min() < -0.5, "as the networks were given it: standardised"
    assert 0.5 < images[0].max() < 3


def test_maps_are_those_of_each_runs_own_model_and_of_its_split(digits):
    fedfac, fedavg = (fedstat.open_run(digits / f"{name}.zarr") for name in ("fedfac-dynamic", "fedavg"))
    net = nets.named("resnet8", (1, 8, 8), 10, width=0.25)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 8, 8)).astype(np.float32))
    *maps, shared = load("paper_figs/fig10.py").side_by_side(fedfac, fedavg, net, "conv1", x, client=3)
    for run, seen in zip((fedfac, fedavg), maps, strict=True):
        w = run["weights/conv1/w"][-1, 3].to_numpy().reshape(-1, 1, 3, 3)
        assert_allclose(seen, functional.conv2d(x[None], torch.from_numpy(w), padding=1)[0], atol=1e-5)
    assert not np.allclose(maps[0], maps[1])
    np.testing.assert_array_equal(shared, fedfac["split/conv1/shared"][-1])


def test_rows_of_the_figure_are_of_the_filters_that_they_name():
    shared = np.array([True, False, False, True, True])
    maps = {name: np.random.default_rng(i).normal(size=(5, 4, 4)) for i, name in enumerate(("FedFac", "FedAvg"))}
    axes = features.feature_grid(np.zeros((4, 4)), maps["FedFac"], maps["FedAvg"], shared).axes[1:]
    of = [("FedFac", 1), ("FedFac", 2), ("FedAvg", 1), ("FedAvg", 2)]
    of += [(name, unit) for name in maps for unit in (0, 3, 4)]
    for ax, (name, unit) in zip(axes, of, strict=True):
        assert_allclose(ax.images[0].get_array(), maps[name][unit])
    said = [ax.get_ylabel() for ax in axes if ax.get_ylabel()]
    assert said == ["FedFac\npersonal", "FedAvg\nsame filters", "FedFac\nshared", "FedAvg\nsame filters"]


def test_stored_weights_predict_as_the_run_did(digits):
    """The last checkpoint of a client gives the accuracy that the run reports."""
    run = fedstat.open_run(digits / "fedavg.zarr")
    settings = run_settings.Settings(**DIGITS)
    fed, _ = experiment.federated(settings)
    net = experiment.network(settings, fed)
    params = features.stored(run, net.shapes, client=2)
    own = (fed["client"].to_numpy() == 2) & (fed["split"].to_numpy() == "test")
    here = to_float(fed.isel(sample=own))
    guess = net.apply(params, torch.from_numpy(here.x.values).unsqueeze(0)).argmax(-1)[0].numpy()
    assert_allclose((guess == here.y.values).mean(), run["metrics/accuracy"][-1, 2], atol=1e-6)


def test_a_layer_of_one_kind_has_nothing_to_compare():
    maps = np.random.default_rng(0).normal(size=(4, 5, 5))
    with pytest.raises(ValueError, match="all 4 are shared"):
        features.feature_grid(np.zeros((5, 5)), maps, maps, np.ones(4, dtype=bool))
    mixed = features.feature_grid(np.zeros((5, 5)), maps, maps, np.array([True, False, False, True]), units=2)
    assert len(mixed.axes) == 1 + 4 * 2


def test_runs_without_all_weights_are_refused(runs):
    run = fedstat.open_run(runs / "dirichlet-0.1-fedavg-0.zarr")
    with pytest.raises(ValueError, match="it lacks conv1"):
        features.stored(run, {"conv1.weight": (2, 1, 3, 3)}, client=0)
