"""The command line prints a theorem check, writes a store and fails with advice."""

import json

import numpy as np
import xarray as xr

import fedstat
from fedstat.ntk import ConvergenceResult, GeneralizationResult, descent
from fedstat.ntk.__main__ import main

FAST = ["--quiet", "--widths", "16", "--rounds", "5", "--replicates", "2", "--n-test", "4"]


def test_theorem_1_prints_assumption_constants_bound_and_verdict(capsys, tmp_path):
    out = tmp_path / "runs" / "a.zarr"
    assert main([*FAST, "--clients", "3", "--n", "4", "--d", "6", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for part in (
        "assumption 1 holds",
        "λ^s =",
        "ρ1 =",
        "rounds_ratio",
        "fedsplit vs fedavg",
        "the bound holds in 2 of 2 runs",
    ):
        assert part in text
    tree = fedstat.open_run(out)
    assert tree.attrs["title"].startswith("Theorem 1 on unit sphere")
    assert json.loads(tree.attrs["config"])["widths"] == [16]
    assert ConvergenceResult.from_datatree(tree).summary() in text


def test_theorem_2_prints_bound_and_observation(capsys, tmp_path):
    out = tmp_path / "b.zarr"
    arguments = ["--theorem", "2", "--data", "digits", "--clients", "2", "5", "--n", "6", "--out", str(out)]
    assert main([*FAST, *arguments]) == 0
    text = capsys.readouterr().out
    assert "complexity" in text
    assert "8C²" in text
    result = GeneralizationResult.from_datatree(xr.open_datatree(out, engine="zarr", consolidated=False))
    assert result.data["clients"].values.tolist() == [2, 5]
    assert result.summary() in text


def test_stores_are_read_with_labels_0_and_1_as_signs(capsys, tmp_path):
    data = descent.gaussian(clients=3, n=5, d=6, n_test=5)
    data["x"] = 2 * data["x"]
    data["y"] = (data["y"] > 0).astype(int)
    data.to_zarr(tmp_path / "c.zarr", consolidated=False)
    assert main([*FAST, "--data", str(tmp_path / "c.zarr"), "--n", "4", "--clients", "2", "--normalize"]) == 0
    assert "2 clients x 4 samples, 6 features" in capsys.readouterr().out
    back = descent.read_samples(tmp_path / "c.zarr", n=4, n_test=3)
    assert set(np.unique(back.y)) == {-1.0, 1.0}
    assert back["split"].values.tolist() == ["train"] * 4 + ["test"] * 3
    assert main([*FAST, "--data", str(tmp_path / "c.zarr"), "--n", "4", "--clients", "2"]) == 0
    assert "warning: Assumption 1 does not hold: 8 sample(s) are longer than 1" in capsys.readouterr().err
