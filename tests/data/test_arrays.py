"""A user's own arrays: from a file to a run, and what is said where something is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest
import xarray as xr
from fl_runs import command

from fedstat import data, fl, store
from fedstat.data import partition
from fedstat.fl import algorithms, nets
from fedstat.study import Settings, experiment

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (120, 6, 6), dtype=np.uint8)
CLASSES = np.array(["cat", "dog", "eel"])[RNG.integers(0, 3, 120)]


def saved(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("given", ["uint8", "float", "tokens"])
def test_arrays_of_every_kind_train_by_the_command(tmp_path, given):
    x = {"uint8": IMAGES, "float": RNG.normal(size=(120, 5)), "tokens": RNG.integers(0, 9, (120, 7))}[given]
    path, net = saved(tmp_path / "own.npz", x=x, y=CLASSES), "fasttext" if given == "tokens" else "mlp"
    assert command("--data", path, "--net", net, "--algorithm", "fedavg", "--clients", 4, "--rounds", 1,
                   "--min-samples", 5, "--participation", 1, "--out", tmp_path / "run.zarr") == 0  # fmt: skip
    noted = json.loads(store.attributes(tmp_path / "run.zarr")["config"])
    assert noted["scenario"] == "own.npz, dirichlet:0.1"
    assert noted["data"] == str(path)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    path = saved(tmp_path / "own.npz", x=IMAGES, y=CLASSES, client=np.repeat(["a", "b", "c"], 40),
                 split=np.tile(["train", "train", "train", "test"], 30))  # fmt: skip
    found = data.load(path.as_posix())
    assert found.x.dims == ("sample", "channel", "row", "column")
    np.testing.assert_array_equal(found.x.values[:, 0], IMAGES)
    assert [found.y.attrs["names"][i] for i in found.y.values] == CLASSES.tolist()
    assert data.load(str(path), split="test").sizes["sample"] == 30
    run = Settings.of(data=str(path), partition="natural", algorithm="local", min_samples=2)
    fed, _ = experiment.federated(run)
    assert np.bincount(fed["client"]).tolist() == [40, 40, 40]
    assert (fed["split"] == "test").sum() == 30
    assert fed.x.dtype == np.uint8
    train = data.to_float(fed).isel(sample=np.flatnonzero(fed["split"] == "train")).x
    assert abs(float(train.mean())) < 1e-5  # standardised by the training samples
    assert float(train.std()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(("arrays", "says"), [
    ({"X": IMAGES, "y": CLASSES}, "lacks x; it holds X, y.*It must hold x .sample"),
    ({"x": IMAGES, "y": CLASSES[:5]}, r"y in .* must have shape \(120,\).*but has \(5,\)"),
    ({"x": CLASSES, "y": CLASSES}, "x in .* must be numbers"),
    ({"x": IMAGES, "y": CLASSES, "split": np.full(120, "valid")}, "split in .* one of 'train', 'test', 'validation'"),
    ({"x": np.full((120, 3), -1), "y": CLASSES}, r"the smallest is -1\. Number the tokens from 0; save"),
    ({"x": np.array([None]), "y": np.array([0])}, "own.npz could not be read .*'x' holds Python objects"),
])  # fmt: skip
def test_arrays_that_cannot_be_data_are_named(tmp_path, arrays, says):
    with pytest.raises(ValueError, match=says):
        data.load(str(saved(tmp_path / "own.npz", **arrays)))
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none.npz. It must hold x"):
        data.load(str(tmp_path / "none.npz"))


def test_a_data_set_of_bytes_without_subsets_is_told_what_it_lacks():
    own = xr.Dataset(
        {"x": (("sample", "channel", "row", "column"), IMAGES[:, None]), "y": ("sample", np.arange(120) % 3)}
    )
    net, how = nets.mlp([36, 5, 3]), {"rounds": 1}
    with pytest.raises(ValueError, match=r"partition.iid.data, clients=10.*partition.train_test"):
        fl.train(own, net, algorithms.fedavg(), **how)
    fed = partition.iid(own, clients=4)
    with pytest.raises(ValueError, match=r"needs test samples.*have none\. .*partition.train_test"):
        fl.train(fed, net, algorithms.fedavg(), **how)
    fed = partition.train_test(fed, test=0.25)
    with pytest.raises(ValueError, match=r"x must be floating point, but is uint8 of shape \(1, 6, 6\).*data.to_float"):
        fl.train(fed, net, algorithms.fedavg(), **how)
    run = fl.train(data.to_float(fed), net, algorithms.fedavg(), **how)
    assert data.to_float(fed).x.max() == 1
    assert np.isfinite(run["metrics/accuracy"]).all()


def test_real_numbers_are_targets_and_one_class_is_refused(tmp_path):
    y = RNG.normal(size=(120, 2))
    found = data.load(str(saved(tmp_path / "own.npz", x=IMAGES, y=y)))
    np.testing.assert_array_equal(found.y, y)
    assert (found.y.dims, found.y.dtype, found.y.attrs) == (("sample", "target"), np.float64, {})
    one = data.load(str(saved(tmp_path / "own.npz", x=IMAGES, y=y[:, 0].astype(np.float32))))
    np.testing.assert_array_equal(one.y, y[:, 0].astype(np.float32))
    numbered = saved(tmp_path / "own.npz", x=IMAGES, y=np.arange(120) % 3)
    assert data.load(str(numbered), task="regression").y.dtype == np.float64
    for y, says in (
        (np.full(120, "cat"), r"y in .*own\.npz must hold at least two classes, but all 120 .* of the class cat"),
        (np.zeros((120, 1), int), r"one class for each sample, but has shape \(120, 1\)"),
        (np.where(np.arange(120) == 3, np.inf, 0.5), "must be finite, but is inf in sample 3"),
        (np.where(np.arange(120) == 3, np.nan, 0.5), "it is missing for 3"),
    ):
        with pytest.raises(ValueError, match=says):
            data.load(str(saved(tmp_path / "own.npz", x=IMAGES, y=y)))
