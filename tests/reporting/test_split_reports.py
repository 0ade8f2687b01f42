"""Reports of splits: whose weights they are of, in whatever form these were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from fl_stores import write

import fedstat
from fedstat.decompose import __main__ as decompose


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights of five clients and what they started from, and a run of six."""
    folder, rng = tmp_path_factory.mktemp("given"), np.random.default_rng(0)
    (folder / "clients").mkdir()
    start = rng.normal(size=(12, 9))
    for i in range(5):
        np.savez(folder / "clients" / f"{i}.npz", **{"fc1.weight": start + rng.normal(size=(12, 9))})
    np.savez(folder / "start.npz", **{"fc1.weight": start})
    write(folder / "run.zarr", weights=True)
    return folder


@pytest.mark.parametrize(
    ("weights", "more", "n"),
    [
        ("clients", [], 5),
        ("clients/*.npz", [], 5),
        ("run.zarr", ["--stage", "aggregated"], 6),
        ("clients", ["--method", "icc"], 5),
    ],
)
def test_clients_are_counted_and_not_the_paths_that_hold_them(
    given: Path, tmp_path: Path, weights: str, more: list[str], n: int
) -> None:
    out = tmp_path / "split.zarr"
    assert decompose.main([str(given / weights), *more, "--out", str(out)]) == 0
    text = fedstat.report(out).html
    assert f"of {n} clients, from {given / weights}" in text
    assert f"Hidden units of {n} clients&#39; networks were split" in text
    assert "were subtracted first" not in text


def test_a_common_start_that_was_subtracted_is_said(given: Path, tmp_path: Path) -> None:
    out, start = tmp_path / "split.zarr", given / "start.npz"
    options = ["--baseline", str(start), "--n-factors", "2", "--out", str(out)]
    assert decompose.main([str(given / "clients"), *options]) == 0
    text = fedstat.report(out).html
    assert f"{start}, subtracted from every client&#39;s weights" in text
    assert "The common initial parameters of the clients were subtracted first." in text
    assert "pa, 2 factors, τ = 0.5" in text


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> xr.DataTree:
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("two")
    for i in range(5):
        np.savez(folder / f"{i}.npz", **{f"fc{n}.weight": rng.normal(size=(9, 9)) for n in (1, 2)})
    out = folder / "split.zarr"
    assert decompose.main([str(folder), "--layer", "*", "--method", "icc", "--out", str(out)]) == 0
    return fedstat.open_run(out).load()


@pytest.fixture
def stored(two_layers: xr.DataTree) -> xr.DataTree:
    """A split of two layers, as it is stored."""
    return two_layers.copy(deep=True)


def test_results_that_cannot_be_read_do_not_take_the_others_with_them(stored: xr.DataTree) -> None:
    stored["result/bootstrap"] = stored["result/split"].copy(deep=True)
    stored["result/bootstrap"].attrs["result"] = "{"
    made = fedstat.report(stored)
    (part,) = made.parts
    assert "bootstrap (" in next(one.text for one in made.cautions if one.title == "Not in this report")
    assert [section.title for section in part.sections] == ["Layer fc1", "Layer fc2"]
    assert part.summary.startswith("fc1: Split of")
    assert "Hidden units of 5 clients&#39; networks were split" in made.html
    stored["result/split"].attrs["result"] = "{"
    assert not fedstat.report(stored).parts[0].sections


def test_a_split_that_was_not_resampled_says_nothing_of_certainty(stored: xr.DataTree) -> None:
    told = [one.text for one in fedstat.report(stored).cautions if one.title == "Certainty not estimated"]
    assert [text.partition(":")[0] for text in told] == ["layer fc1", "layer fc2"]
