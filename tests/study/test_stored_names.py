"""Stores keep the names of settings that they were first written with; today's settings find and continue them."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest

import fedstat
from fedstat import open_run, store
from fedstat.fl import algorithms
from fedstat.fl.stored import from_stored, to_stored
from fedstat.reporting import report
from fedstat.store.encoding import algorithm_of
from fedstat.study import collect, compare_runs, experiment, grid, leaderboard
from fedstat.study import report as run_report
from fedstat.study.run_settings import Settings

# What the version before the names changed stored of these settings, and the file name that it gave the run.
SETTINGS = Settings.of(
    scenario="A", clients=8, max_samples=40, min_samples=5, test_fraction=0.25, validation_fraction=0.2,
    unseen_fraction=0.25, class_labels="permuted", participation=1.0, rounds=2, net_options=["hidden=6"],
    algorithm="random-personal-head", shared_fraction=0.4, prediction_rules=["random-personal-head+"],
    probe=["split-half", "trained-weights"],
)  # fmt: skip
STORED = {
    "label": "A", "samples": 40, "min_size": 5, "test": 0.25, "validation": 0.2, "new_share": 0.25,
    "labels": "permuted", "algorithm": "random-private-head", "options": ("share=0.4",),
    "readouts": ("random-private-head+",), "probe": ("halves", "uploads"),
}  # fmt: skip
NAME = "digits-dirichlet-0.1-random-private-head-seed0-d13f77ab"
SHRUNKEN = "digits-dirichlet-0.1-fedprox-private-head-shrunken-seed0-1c60a360"


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
    assert grid.name_of(Settings.of(algorithm="fedprox-personal-head-shrunken", mu=0.3)) == SHRUNKEN


def test_a_run_with_the_names_of_before_is_found_continued_compared_and_reported(folder):
    path = folder / f"{NAME}.zarr"
    config = store.config_of(path)
    for name in ("label", "samples", "test", "labels", "algorithm"):
        assert config[name] == STORED[name]
    assert config["probe"] == ["halves", "uploads"]
    assert config["algorithm_settings"] == {"layers": None, "share": 0.4}
    assert config["readouts"]["random-private-head+"]["share"] == 0.4
    assert Settings(**experiment.settings_of(path)) == SETTINGS
    assert [made for _, _, made in grid.run_all([SETTINGS], folder, threads=1)] == [False]
    table = collect.collect(folder).table
    assert table[["scenario", "method"]].to_numpy().tolist() == [["A", "random-personal-head"]]
    run = open_run(path)
    assert run["readouts/readout"].values.tolist() == ["random-private-head+"]
    assert leaderboard.scores(run)["method"].tolist() == ["random-personal-head", "random-personal-head+"]
    assert set(leaderboard.steps(run)["readout"]) == {"random-personal-head+"}
    assert "  random-personal-head+ (B: 1)" in run_report.report(run)
    assert fedstat.split(run, layer="fc1").algorithm == "random-personal-head"
    assert list(compare_runs(path).scenarios) == ["A"]
    text = report(path).html
    assert "--max-samples 40" in text
    assert "shared_fraction=0.4" in text
    assert "--algorithm random-personal-head" in text
    assert "private-head" not in text.replace(NAME, "")
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


def test_titles_of_earlier_runs_are_shown_by_todays_names(folder):
    run = open_run(folder / f"{NAME}.zarr").load()
    run.attrs["title"] = "random-private-head, 2 rounds"
    assert str(run_report.summary(run)).startswith("random-personal-head, 2 rounds\n")


@pytest.mark.parametrize("name", ["fedavg-private-head", "fedprox-private-head+", "random-private-head-shrunken"])
def test_an_earlier_name_of_an_algorithm_is_refused_with_todays(name):
    with pytest.raises(ValueError, match=rf"got '{re.escape(name)}'. Did you mean .*'{re.escape(algorithm_of(name))}'"):
        algorithms.named(name)


def test_parts_of_paths_are_not_renamed():
    paths = ("/a/my-private-head/b.py:c", "/a/x-private-head, y/b.py:c", "/a/x-private-head.py:c")
    for name in (*paths, "fedavg-private"):
        assert algorithm_of(name) == name
    assert algorithm_of("/a/b.py:c-private-head-shrunken") == "/a/b.py:c-personal-head-shrunken"
