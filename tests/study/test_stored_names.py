"""Stores keep the names of settings that they were first written with; today's settings find and continue them."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from fedstat import open_run, store
from fedstat.fl.stored_names import from_stored, to_stored
from fedstat.reporting import report
from fedstat.study import collect, compare_runs, experiment, grid
from fedstat.study.run_settings import Settings

# What the version before the names changed stored of these settings, and the file name that it gave the run.
SETTINGS = Settings.of(
    scenario="A", clients=8, max_samples=40, min_samples=5, test_fraction=0.25, validation_fraction=0.2,
    unseen_fraction=0.25, class_labels="permuted", participation=1.0, rounds=2, net_options=["hidden=6"],
    algorithm="random-private-head", shared_fraction=0.4, prediction_rules=["random-private-head+"],
    probe=["split-half", "trained-weights"],
)  # fmt: skip
STORED = {
    "label": "A", "samples": 40, "min_size": 5, "test": 0.25, "validation": 0.2, "new_share": 0.25,
    "labels": "permuted", "options": ("share=0.4",), "readouts": ("random-private-head+",),
    "probe": ("halves", "uploads"),
}  # fmt: skip
NAME = "digits-dirichlet-0.1-random-private-head-seed0-d13f77ab"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs")
    experiment.run(SETTINGS, out=path / f"{NAME}.zarr", threads=1)
    return path


def test_stores_and_their_files_have_the_names_of_before():
    about = experiment.about(SETTINGS)
    assert {name: about[name] for name in STORED} == STORED
    assert not (about.keys() & {"scenario", "max_samples", "test_fraction", "prediction_rules"})
    assert grid.name_of(SETTINGS) == NAME


def test_a_run_with_the_names_of_before_is_found_continued_compared_and_reported(folder):
    path = folder / f"{NAME}.zarr"
    config = store.config_of(path)
    for name in ("label", "samples", "test", "labels"):
        assert config[name] == STORED[name]
    assert config["probe"] == ["halves", "uploads"]
    assert config["algorithm_settings"] == {"layers": None, "share": 0.4}
    assert config["readouts"]["random-private-head+"]["share"] == 0.4
    assert Settings(**experiment.settings_of(path)) == SETTINGS
    assert [made for _, _, made in grid.run_all([SETTINGS], folder, threads=1)] == [False]
    assert collect.collect(folder).table["scenario"].tolist() == ["A"]
    assert list(compare_runs(path).settings) == ["A"]
    text = report(path).html
    assert "--max-samples 40" in text
    assert "shared_fraction=0.4" in text
    with pytest.raises(ValueError, match=r"max_samples: 40 stored, 30 now"):
        experiment.run(SETTINGS.but(max_samples=30), out=path, resume=True, threads=1)


def test_a_longer_run_equals_one_without_interruption(folder, tmp_path):
    longer = SETTINGS.but(rounds=3)
    shutil.copytree(folder / f"{NAME}.zarr", tmp_path / "a.zarr")
    experiment.run(longer, out=tmp_path / "a.zarr", resume=True, threads=1)
    alone = experiment.run(longer, threads=1)
    np.testing.assert_array_equal(open_run(tmp_path / "a.zarr")["metrics/accuracy"], alone["metrics/accuracy"])


def test_names_are_translated_both_ways_and_settings_of_other_algorithms_are_left():
    about = json.loads(store.to_json(experiment.about(SETTINGS)))
    assert to_stored(from_stored(about)) == about
    own = {"algorithm": "mine.py:ditto", "options": ["share=0.4"], "algorithm_settings": {"share": 0.4}}
    assert from_stored(own) == to_stored(own) == own
