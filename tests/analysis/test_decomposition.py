"""What the decomposition of runs means, on splits and weights whose structure is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from fl_stores import grid, write
from numpy.testing import assert_allclose
from scipy import stats
from scripts import ROOT, load

import fedstat
from fedstat.study import collect, run_table

SCRIPT = load("analysis/fedfac/decomposition.py")
checks = SCRIPT.checks


@pytest.fixture(scope="module")
def alike():
    """Four units of one factor over all clients, and four that differ."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(10, 8, 60))
    w[:, ::2] = rng.normal(size=(1, 1, 60)) + 0.5 * rng.normal(size=(10, 4, 60))
    return xr.DataArray(w, dims=("client", "unit", "weight"))


def test_states_say_when_a_split_settled(tmp_path):
    path = write(tmp_path / "a.zarr", algorithm="fedfac-dynamic", weights=True)
    row = run_table.states(fedstat.open_run(path)).iloc[0]
    assert row["layer"] == "conv1"
    assert (row["shared"] / row["units"], row["stable"], row["agreement"], row["n_factors"]) == (0.5, 1.0, 1.0, 3)
    assert_allclose(row["converged"], 23 / 24)
    early = write(tmp_path / "b.zarr", algorithm="fedfac-dynamic", weights=True, rounds=4)
    assert run_table.states(fedstat.open_run(early)).iloc[0]["stable"] == pytest.approx(2 / 3)
    whole = run_table.states(fedstat.open_run(write(tmp_path / "c.zarr", weights=True))).iloc[0]
    assert whole["shared"] == whole["units"], "a layer that was analysed is shown though it is shared whole"


def test_estimators_agree_where_one_factor_makes_the_split(alike):
    found = checks.variants(alike, kappas=(0.4,), taus=(0.5,)).set_index("estimator")
    assert found.loc[["pa", "minres", "pc"], "ari"].tolist() == [1.0, 1.0, 1.0]
    assert found.loc["pa", "converged"]
    assert (found["units"] == 8).all()


def test_variants_are_the_splits_of_the_package(alike):
    found = checks.variants(alike, kappas=(0.4, 0.7), taus=(0.25, 0.5))
    assert len(found) == 4 * 2 * 2
    row = found.query("estimator == 'pc' and kappa == 0.7 and tau == 0.25").iloc[0]
    one = fedstat.fa(fedstat.layer_matrix(alike), kappa=0.7, method="pc").split(tau=0.25).shared
    other = fedstat.fa(fedstat.layer_matrix(alike), kappa=0.7, method="pa").split(tau=0.25).shared
    assert_allclose(row["ari"], fedstat.stats.split.adjusted_rand(np.asarray(one), np.asarray(other)))
    assert found.query("estimator == 'pa'")["ari"].eq(1).all()


def test_certainty_is_high_with_structure_and_low_without(alike):
    found = checks.certainty(alike, replicates=30)
    assert found["ari"] > 0.8
    noise = alike.copy(data=np.random.default_rng(1).normal(size=alike.shape))
    none = checks.certainty(noise, replicates=30)
    assert none["ari"] < found["ari"]
    assert none["sure"] < 0.8
    assert none["p_identity"] > 0.05


def test_only_hidden_layers_in_which_clients_differ_are_analysed(tmp_path):
    shapes = {"conv1.weight": [8, 3, 5, 5], "out.weight": [10, 8]}
    run = fedstat.open_run(write(tmp_path / "a.zarr", weights=True, shapes=shapes))
    assert list(checks.hidden_weights(run)) == ["conv1"]
    last = fedstat.open_run(write(tmp_path / "b.zarr", weights=True, shapes={"conv1.weight": [8, 3, 5, 5]}))
    assert checks.hidden_weights(last) == {}


def test_fedfac_is_compared_with_a_random_split_of_the_same_size_and_seed(tmp_path):
    same = {"layers": ["conv1"], "tau": "0.5"}
    for seed in range(3):
        write(tmp_path / f"r{seed}.zarr", algorithm="random", seed=seed, **same)
        write(tmp_path / f"f{seed}.zarr", algorithm="fedfac-dynamic", kappa=0.85, seed=seed, **same)
        write(tmp_path / f"d{seed}.zarr", algorithm="random-redrawn", seed=seed, **same)
    write(tmp_path / "other.zarr", algorithm="fedfac-dynamic", layers=["fc1"], tau="0.5", kappa=0.85)
    found = checks.against_random(collect.collect(tmp_path))
    assert found["layers"].tolist() == ["conv1", "conv1"]
    found = found[found["method"] == "fedfac-dynamic"]
    rows = collect.collect(tmp_path).table.query("layers == 'conv1'").pivot(index="seed", columns="method")["best10"]
    test = stats.ttest_rel(rows["fedfac-dynamic"], rows["random"])
    assert_allclose(found[["n", "p_value"]].iloc[0].tolist(), [3, test.pvalue])
    assert_allclose(found["difference"], (rows["fedfac-dynamic"] - rows["random"]).mean())


def test_the_script_answers_in_four_tables(tmp_path, monkeypatch, capsys):
    runs = grid(tmp_path / "grid", methods=("fedavg", "random", "fedfac-dynamic"), seeds=1, weights=True)
    monkeypatch.chdir(ROOT)
    arguments = ["--runs", runs, "--replicates", 2, "--out", tmp_path / "t"]
    assert SCRIPT.main([*map(str, arguments)]) == 0
    text = capsys.readouterr().out
    for said in ("better than a random one?", "Does the split settle?", "How sure is", "Do the estimators agree?"):
        assert said in text
    assert pd.read_csv(tmp_path / "t-4.csv")["estimator"].nunique() == 4
    assert max(map(len, text.splitlines())) <= 110


def test_designs_are_told_apart_and_resampled_with_their_own_settings(tmp_path):
    designs = [(0.85, "0.5", "pa"), (0.4, "0.5", "pa"), (0.85, "0.75", "pa"), (0.85, "0.5", "leverage")]
    for kappa, tau, estimator in designs:
        for seed in range(2):
            settings = {"layers": ["conv1"], "kappa": kappa, "tau": tau, "estimator": estimator, "seed": seed}
            name = f"{kappa}-{tau}-{estimator}-{seed}.zarr"
            write(tmp_path / name, algorithm="fedfac-dynamic", weights=True, **settings)
    _, settled, sure, agree = SCRIPT.study(collect.collect(tmp_path), replicates=4)
    (block,) = settled.blocks.values()
    rows = [("0.4", "0.5", "pa"), ("0.85", "0.5", "leverage"), ("0.85", "0.5", "pa"), ("0.85", "0.75", "pa")]
    assert list(block[["κ", "τ", "estimator"]].itertuples(index=False, name=None)) == rows
    assert block["share"].tolist() == ["0.50 ± 0.00"] * 3 + ["0.25 ± 0.00"]
    assert len(agree.blocks) == 4
    for kappa, tau, estimator in designs:
        run = fedstat.open_run(tmp_path / f"{kappa}-{tau}-{estimator}-1.zarr")
        own = {"kappa": kappa, "tau": float(tau), "estimator": estimator}
        by_hand = checks.certainty(checks.hidden_weights(run)["conv1"], **own, replicates=4)
        here = sure.values.query("seed == 1 and kappa == @kappa and tau == @own['tau'] and estimator == @estimator")
        assert_allclose(here[["sure", "ari", "p_identity"]].iloc[0].astype(float), list(by_hand.values()))
    assert sure.values.groupby("kappa")["ari"].mean().nunique() == 2
