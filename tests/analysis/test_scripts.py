"""Scripts outside the package: store -> table, store -> figure."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pandas as pd
import pytest
from scripts import load

from fedstat import sim

ROOT = Path(__file__).parents[2]
SMALL = {"clients": 4, "d": 6, "m": 8, "n_train": 10, "n_test": 10, "rounds": 2, "replicates": 2}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    sim.study(p=[0.25, 0.5], alpha=0.4, out=folder / "vary_p-tiny.zarr", **SMALL)
    some = ("true", "dynamic", "fedavg", "local")
    sim.study(p=0.5, alpha=[0.25, 0.5], methods=some, out=folder / "vary_alpha-tiny.zarr", **SMALL)
    return folder


@pytest.mark.parametrize("name", ["fig06", "fig07"])
def test_a_figure_is_made_from_stores(name, runs, tmp_path):
    arguments = ["--scale", "tiny", "--runs", str(runs), "--out", str(tmp_path / "figure.png")]
    assert load(f"paper_figs/{name}.py").main(arguments) == 0
    assert (tmp_path / "figure.png").stat().st_size > 20_000


def test_a_figure_of_ones_own_study_is_made_from_any_folder(runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = runs / "vary_p-tiny.zarr"
    for name in ("fig06", "fig07"):
        assert load(f"paper_figs/{name}.py").main(["--run", str(store), "--out", "figure.png"]) == 0
        assert (tmp_path / "figure.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fig01", "python -m fedstat.motivation --data digits --out"),
        ("fig02", "make figures-motivation"),
        ("fig06", "make figures SCALE=quick"),
    ],
)
def test_a_figure_says_what_to_run_first(name, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        load(f"paper_figs/{name}.py").main(["--runs", str(tmp_path), "--out", "figure.png"])
    assert "there is no run at" in (message := capsys.readouterr().err)
    assert said in message


def test_the_table_is_written(runs, tmp_path):
    assert load("analysis/sim_table.py").main([str(runs / "vary_p-tiny.zarr"), str(tmp_path / "table.csv")]) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert len(table) == 2 * 8
    assert table["accuracy"].between(0, 1).all()


@pytest.mark.parametrize("grid", ["vary_p", "vary_alpha"])
@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_the_papers_grids_are_valid_settings(grid, scale):
    read = tomllib.loads((ROOT / "simulations" / f"{grid}.toml").read_text())
    settings = sim.Settings(**{k: v for k, v in read.items() if not isinstance(v, dict)} | read[scale])
    assert 0.5 in settings.p
    if scale == "paper":
        assert (settings.clients, settings.d, settings.m) == (100, 100, 200)
        assert settings.replicates >= 10
