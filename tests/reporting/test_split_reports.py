"""Reports of splits: whose weights they are of, in whatever form these were given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
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
    [("clients", [], 5), ("clients/*.npz", [], 5), ("run.zarr", [], 6), ("clients", ["--method", "icc"], 5)],
)
def test_clients_are_counted_and_not_the_paths_that_hold_them(
    given: Path, tmp_path: Path, weights: str, more: list[str], n: int
) -> None:
    out = tmp_path / "split.zarr"
    assert decompose.main([str(given / weights), *more, "--out", str(out)]) == 0
    text = fedstat.report(out).html
    assert f"of {n} clients, from {given / weights}" in text
    assert f"Hidden units of {n} clients&#39; networks were split" in text
    assert "started from had been subtracted" not in text


def test_a_common_start_that_was_subtracted_is_said(given: Path, tmp_path: Path) -> None:
    out, start = tmp_path / "split.zarr", given / "start.npz"
    options = ["--minus", str(start), "--n-factors", "2", "--out", str(out)]
    assert decompose.main([str(given / "clients"), *options]) == 0
    text = fedstat.report(out).html
    assert f"{start}, subtracted from every client&#39;s weights" in text
    assert "The weights that all clients started from had been subtracted." in text
    assert "pa, 2 factors, τ = 0.5" in text


def test_a_split_whose_numbers_cannot_be_read_is_of_clients_without_their_number(given: Path, tmp_path: Path) -> None:
    out = tmp_path / "split.zarr"
    assert decompose.main([str(given / "clients"), "--method", "icc", "--out", str(out)]) == 0
    tree = fedstat.open_run(out).load()
    tree["split/fc1"].attrs["glance"] = "{"
    text = fedstat.report(tree).html
    assert f"of clients, from {given / 'clients'}" in text
    assert "Hidden units of the clients&#39; networks were split" in text
