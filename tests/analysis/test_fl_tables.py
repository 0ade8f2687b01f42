"""Tables 2-8 from stores of made-up numbers, against the same sums done by hand."""

from __future__ import annotations

import functools
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
from _tables import read_reference
from fl_stores import grid, write
from numpy.testing import assert_allclose
from scipy import stats
from scripts import ROOT, load

from fedstat.fl.probes.variants import PARTS
from fedstat.results.tables import interval, p_value
from fedstat.store import open_run
from fedstat.study import collect
from fedstat.study.grid import cells, name_of
from fedstat.study.run_settings import Settings
from fedstat.study.tuning import tune

PAPER = read_reference(ROOT / "analysis" / "fedfac" / "reference.toml")
COLLECT = functools.cache(collect.collect)
CELLS = functools.cache(cells)
METHODS = ("fedavg", "fedper", "random", "fedfac-dynamic")
SPLIT = {"layers": ["conv1"], "kappa": 0.85, "tau": "0.5"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    write(folder / "half.zarr", finish=False)
    return grid(folder, methods=METHODS, new=True, ablation=True)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    settings = [("conv1", "0.5", 0.85), ("fc1", "0.5", 0.85), ("fc1", "0.9", 0.85), ("fc1", "0.9", 0.5)]
    for better, (layer, tau, kappa) in enumerate(settings):
        for seed in range(2):
            split = {"layers": [layer], "tau": tau, "kappa": kappa, "seed": seed, "gain": 0.05 * better}
            write(folder / f"{better}-{seed}.zarr", algorithm="fedfac-dynamic", **split)
    return folder


def script(name, *arguments, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert load("analysis/tables.py").main(["fedfac", name, *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture
def run_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(collect, "collect", COLLECT)  # reading a grid once is enough here
    monkeypatch.setattr(sys.modules[cells.__module__], "cells", CELLS)

    def made(name, folder, suffix="", *arguments):
        how = ("--runs", folder, "--out", tmp_path / "t", *arguments)
        out = script(name, *how, monkeypatch=monkeypatch, capsys=capsys)
        return out, pd.read_csv(tmp_path / f"t{suffix}.csv"), (tmp_path / f"t{suffix}.md").read_text(encoding="utf-8")

    return made


def test_table_2_compares_within_seeds_beside_the_papers_values(runs, run_table):
    text, values, markdown = run_table("table2", runs)
    rows = COLLECT(runs).table.query("scenario == 'CIFAR-10, π = 0.1'").pivot(index="seed", columns="method")
    best = rows["best10"]
    line = values.query("scenario == 'CIFAR-10, π = 0.1' and method == 'fedavg'").iloc[0]
    assert_allclose([line["mean"], line["std_error_mean"]], [best["fedavg"].mean(), best["fedavg"].sem()], rtol=1e-5)
    assert_allclose(line["p_value"], stats.ttest_rel(best["fedavg"], best["fedfac-dynamic"]).pvalue, rtol=1e-5)
    assert line["paper"] == 0.8033
    assert_allclose(line["optimism"], rows["optimism"]["fedavg"].mean(), rtol=1e-5)
    assert "FedFac with Λ = conv1, κ = 0.85, τ = 0.5, estimator = pa: CIFAR-10, π = 0.1;" in text
    for said in (
        "whether any setting was tuned is not known here",
        "not run: FedProx",
        "seeds 0, 1, 2",
        "24 rounds",
        "FEMNIST",
        "half.zarr",
        "Mixed model",
    ):
        assert said in " ".join(text.split())
    assert "| FedAvg | " in markdown
    assert max(map(len, text.splitlines())) <= 120


def test_settings_are_called_tuned_where_the_runs_are_those_of_the_tuned_file(runs, run_table, tmp_path):
    text, _, _ = run_table("table2", runs)
    assert "were tuned" not in text
    shutil.copytree(runs / "dirichlet-0.1-fedavg-0.zarr", tmp_path / "all" / "mine.zarr")
    first = cells(ROOT / "simulations" / "fedfac.toml", scale="quick")[0]
    shutil.copytree(runs / "dirichlet-0.1-fedper-0.zarr", tmp_path / "all" / f"{name_of(first)}.zarr")
    both, _, _ = run_table("table2", tmp_path / "all")
    assert "κ and τ were tuned on validation samples of CIFAR-10" in " ".join(both.split())
    assert "not known here" in both


def test_the_mixed_model_comes_with_table_2(runs, run_table):
    _, values, _ = run_table("table2", runs, "-mixed")
    assert "method[fedfac-dynamic]:heterogeneity[CIFAR-10, π = 0.5]" in values["term"].tolist()


def test_the_rule_and_the_reference_can_be_chosen(runs, run_table):
    text, values, _ = run_table("table2", runs, "", "--rule", "last10", "--reference", "fedavg", "--select", "seed=1")
    assert "compared with FedAvg" in text
    assert values.query("scenario != 'all settings'")["n_values"].eq(1).all()
    assert values.query("scenario == 'all settings'")["n_values"].eq(2).all()
    assert "fewer than 3 pairs, so no interval and no test" in " ".join(text.split())


def test_short_runs_are_compared_by_their_final_round_and_not_under_the_name_of_ten(tmp_path, run_table):
    folder = tmp_path / "grid"
    for seed in range(3):
        for method, split in {"fedavg": {}, "random": SPLIT, "fedfac-dynamic": SPLIT}.items():
            write(folder / f"{method}-{seed}.zarr", algorithm=method, seed=seed, rounds=6, **split)
    text, values, markdown = run_table("table2", folder)
    rows = COLLECT(folder).table.pivot(index="seed", columns="method", values="final")
    line = values.query("scenario == 'CIFAR-10, π = 0.1' and method == 'fedavg'").iloc[0]
    assert_allclose(line["p_value"], stats.ttest_rel(rows["fedavg"], rows["fedfac-dynamic"]).pvalue, rtol=1e-4)
    assert np.isnan(line["best10"])
    assert "final: the last evaluated round" in text
    assert "fewer than 10 rounds" in text
    assert "CIFAR-10, π = 0.1: 6 rounds" in " ".join(text.split())
    assert "| method | final | " in markdown
    table2 = load("analysis/fedfac/table2.py")
    for rule in ("best10", "last10"):
        with pytest.raises(
            ValueError, match=f"{rule} averages 10 rounds, but there are fewer: .*: 6 rounds.*Use final"
        ):
            table2.accuracy(COLLECT(folder), table2.Asked(PAPER, rule))
    text, _, _ = run_table("table8", folder, "b")
    assert "final: the last evaluated round random:" in " ".join(text.split())


def test_intervals_of_a_table_hold_for_all_its_methods(runs, run_table):
    text, values, _ = run_table("table2", runs, "", "--select", "scenario=CIFAR-10, π = 0.1")
    here = values.set_index("method")
    row = here.loc["fedavg"]
    shown = interval(row["difference"], row["sim_conf_low"], row["sim_conf_high"])
    assert f"{shown}  {p_value(row['p_holm'])}" in text
    half = stats.t.ppf(1 - 0.05 / 2 / (len(here) - 1), row["n"] - 1) * row["std_error"]
    assert_allclose(row["sim_conf_high"] - row["difference"], half, rtol=1e-4)
    assert "each method's own variance; p by Holm" in " ".join(text.split())
    ratios = run_table("table7", runs)[1].query("method == 'random'")
    assert_allclose(ratios["ratio_high"], np.exp(ratios["sim_conf_high"]), rtol=1e-4)


@pytest.mark.parametrize("name", ["table2", "table3", "table7"])
def test_where_seeds_are_too_few_for_a_claim_tables_say_so_in_place_of_an_interval(name, runs, run_table):
    text, _, _ = run_table(name, runs, "", "--select", "seed=1", "--reference", "fedavg")
    rows = [line for line in text.partition("all settings")[0].splitlines() if line.startswith(("FedPer", "random "))]
    assert rows
    assert all("(too few seeds)" in line and "[" not in line for line in rows)
    assert "fewer than 3 pairs, so no interval and no test" in " ".join(text.split())


def test_of_ten_rounds_those_that_count_are_counted(tmp_path, run_table):
    for method, split in {"fedavg": {}, "fedfac-dynamic": SPLIT}.items():
        write(tmp_path / f"{method}.zarr", algorithm=method, rounds=25, evaluate_every=5, **split)
    text, _, _ = run_table("table2", tmp_path)
    assert "consecutive rounds (of which 2 were evaluated)" in " ".join(text.split())


def test_a_mean_over_settings_has_no_standard_error(runs, run_table):
    _, values, markdown = run_table("table2", runs)
    over = values.query("scenario == 'all settings'")
    assert over["std_error_mean"].isna().all()
    assert over.query("method != 'fedfac-dynamic'")["std_error"].notna().all()
    assert "±" not in markdown.partition("### all settings")[2].partition("\n- ")[0]


def test_a_mixture_of_code_and_sparse_evaluation_are_said(runs):
    found = COLLECT(runs)
    assert found.table["code"].nunique() == 1
    assert not any("versions of the code" in note for note in collect.origin(found))
    label = found.table["scenario"].iloc[0]
    mixed = found.table.assign(code=["a, c", *["b"] * (len(found.table) - 1)])
    notes = collect.origin(found._replace(table=mixed))
    assert f"runs of one setting were made by several versions of the code: {label} by 3" in notes
    assert "evaluated every 5" in collect.scale({"rounds": 20, "evaluate_every": 5})
    assert "evaluated" not in collect.scale({"rounds": 20, "evaluate_every": 1})


def test_table_3_weighs_new_clients_by_their_test_samples(runs, run_table):
    _, values, _ = run_table("table3", runs)
    here = values.query("scenario == 'CIFAR-10, π = 0.1'").set_index("method")
    for method, rule in [("fedfac-dynamic", "ensemble"), ("fedfac-dynamic", "local_train"), ("fedavg", "global")]:
        by_hand = []
        for seed in range(3):
            new = open_run(runs / f"dirichlet-0.1-{method}-{seed}.zarr")["unseen_clients"]
            by_hand.append(np.average(new["accuracy"].sel(rule=rule), weights=new["n_test"]))
        name = method if method == "fedavg" else f"{method}, {rule}"
        assert_allclose(here.loc[name, "mean"], np.mean(by_hand), rtol=1e-5)
    assert here.loc["fedfac-dynamic, local_train", "paper"] == 0.6113
    assert "fedavg" in here.index


def test_new_clients_of_fedavg_and_fedprox_predict_by_the_global_model_unless_fine_tuned():
    rules = {name: collect.about(name).unseen_clients for name in ("fedavg", "fedprox", "fedavg+", "fedprox+")}
    assert list(rules.values()) == [("global",), ("global",), ("finetuned",), ("finetuned",)]


def test_table_7_is_a_geometric_mean_of_ratios(runs, run_table):
    _, values, _ = run_table("table7", runs)
    rows = COLLECT(runs).table.query("scenario == 'CIFAR-10, π = 0.5'")
    seconds = rows.pivot(index="seed", columns="method", values="seconds")
    line = values.query("scenario == 'CIFAR-10, π = 0.5' and method == 'fedfac-dynamic'").iloc[0]
    assert_allclose(line["ratio"], stats.gmean(seconds["fedfac-dynamic"] / seconds["fedavg"]), rtol=1e-5)
    assert line["ratio_low"] < line["ratio"] < line["ratio_high"]


def test_table_8_masks_and_splits_at_random(runs, run_table, tmp_path):
    text, values, _ = run_table("table8", runs, "a")
    here = values.query("scenario == 'CIFAR-10, π = 0.1'").set_index("method")
    by_hand = {part: [] for part in PARTS}
    for seed in range(3):
        run = open_run(runs / f"dirichlet-0.1-fedfac-dynamic-{seed}.zarr")
        for part in PARTS:
            accuracy = run["ablation/accuracy"].sel(part=part).mean("draw")
            by_hand[part].append(np.average(accuracy, weights=run["metrics/n_test"]))
    assert_allclose(here.loc[list(PARTS), "mean"], [np.mean(by_hand[part]) for part in PARTS], rtol=1e-5)
    assert here.loc["personal", "paper"] == 0.7225
    assert here.loc[list(PARTS), "units"].tolist() == [0, 4, 4, 4, 4]
    assert here.loc["personal − shared", "p_value"] == pytest.approx(
        stats.ttest_rel(by_hand["personal"], by_hand["shared"]).pvalue, rel=1e-4
    )
    assert "τ = 50 %" in text
    values = pd.read_csv(tmp_path / "tb.csv")
    assert values.query("method == 'fedfac-dynamic'")["n"].tolist() == [3, 3, 3], "seeds"


def test_table_8_tells_splits_apart_by_what_varies(tmp_path, run_table):
    split = {"layers": ["conv1"], "ablation": True}
    for seed in range(3):
        for tau in ("0.5", "0.75"):
            write(tmp_path / f"r{tau}-{seed}.zarr", algorithm="random", tau=tau, seed=seed, **split)
            fedfac = {"algorithm": "fedfac-dynamic", "tau": tau, "kappa": 0.85, "seed": seed}
            write(tmp_path / f"f{tau}-{seed}.zarr", **fedfac, **split)
    text, values, _ = run_table("table8", tmp_path, "a")
    headings = [line for line in text.splitlines() if line.startswith("CIFAR-10, π = 0.1, ")]
    assert headings[:4] == [
        f"CIFAR-10, π = 0.1, {method}, τ = {tau}"
        for method in ("random split", "FedFac dynamic")
        for tau in (0.5, 0.75)
    ]
    sizes = values.query("tau == 0.75 and of == 'random'").set_index("method")["units"]
    assert sizes[["none", "shared", "personal"]].tolist() == [0, 2, 6]
    between = values.query("method == 'personal − shared'")
    assert (between["difference"] < 0).all()
    block = text.partition("Personal masked − shared masked")[2].partition("\n\n")[0]
    for r, line in zip(between.to_dict("records"), block.splitlines()[-len(between) :], strict=True):
        shown = interval(r["difference"], r["sim_conf_low"], r["sim_conf_high"])
        assert " ".join(line.split()).endswith(f" {shown} {p_value(r['p_holm'])}")
    assert (between["p_holm"] >= between["p_value"]).all()
    assert between["p_holm"].min() == pytest.approx(4 * between["p_value"].min(), rel=1e-4)
    assert "not made: several splits of one method in a setting (they differ in τ)" in text


def test_what_was_not_run_is_said_and_not_made_up(runs, run_table, tmp_path, monkeypatch, capsys):
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in (*runs.glob("*random*.zarr"), *runs.glob("*fedper*.zarr")):
        shutil.copytree(path, bare / path.name)
    text, _, _ = run_table("table8", bare, "b")
    assert "not made: no run with a split layer has an ablation" in text
    text, values, _ = run_table("table2", bare)
    assert "fedfac-dynamic was not run" in text
    assert values["p_value"].isna().all()
    with pytest.raises(SystemExit):
        script("table2", "--runs", tmp_path / "nothing", monkeypatch=monkeypatch, capsys=capsys)
    assert "there is no run at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "column", "chosen", "tried"),
    [("table4", "layers", "fc1", 2), ("table5", "tau", 0.9, 2), ("table6", "kappa", 0.5, 2)],
)
def test_tuning_goes_from_layers_to_tau_to_kappa_on_validation_data(name, column, chosen, tried, tuned, run_table):
    text, values, _ = run_table(name, tuned)
    assert len(values) == tried
    assert values.loc[values["chosen"], column].tolist() == [chosen]
    best = values.loc[values["validation_mean"].idxmax(), column]
    assert best == chosen
    assert "VGG-16; not run here" in text


def test_tables_4_to_6_choose_what_tune_chose(tmp_path, run_table):
    start = Settings.of(
        clients=8, max_samples=40, rounds=1, participation=0.5, validation_fraction=0.3, width=0.1, tau=0.5, kappa=0.85
    )
    candidates = {"layers": [["fc2"], ["fc1"]], "tau": [0.25, 0.75], "kappa": [0.5]}
    steps = list(tune(start, candidates, tmp_path / "runs", seeds=(0,)))
    assert [len(step.table) for step in steps] == [2, 3, 2]
    for number, step in enumerate(steps):
        _, values, _ = run_table(f"table{4 + number}", tmp_path / "runs")
        ours = values.astype({step.name: str}).set_index(step.name)
        theirs = step.table.set_index("value")
        assert set(ours.index) == set(theirs.index)
        assert ours.index[ours["chosen"]].tolist() == theirs.index[theirs["chosen"]].tolist()
        assert_allclose(ours["validation_mean"], theirs.loc[ours.index, "validation"], rtol=1e-5)


def test_layers_stand_in_the_order_of_the_network(tmp_path, run_table):
    shapes = {"conv1.weight": [8, 3, 5, 5], "fc1.weight": [9, 8]}
    for layers in (["10"], ["fc1"], ["2"], ["conv1"], ["1"]):
        split = SPLIT | {"layers": layers}
        write(tmp_path / f"{layers[0]}.zarr", algorithm="fedfac-dynamic", shapes=shapes, **split)
    _, values, _ = run_table("table4", tmp_path)
    assert [x for x in values["layers"] if x.isdigit()] == ["1", "2", "10"]
    assert [x for x in values["layers"] if not x.isdigit()] == ["conv1", "fc1"]


def test_nothing_is_tuned_on_test_data(tmp_path, monkeypatch, capsys):
    split = {"layers": ["fc1"], "tau": "0.5", "kappa": 0.85}
    write(tmp_path / "a.zarr", algorithm="fedfac-dynamic", validation_fraction=0, **split)
    with pytest.raises(SystemExit):
        script("table4", "--runs", tmp_path, monkeypatch=monkeypatch, capsys=capsys)
    assert "test data are not used for tuning" in " ".join(capsys.readouterr().err.split())


def test_every_published_value_is_in_range_and_of_a_known_method():
    assert list(PAPER.tables) == [f"table{i}" for i in range(2, 9)]
    for name, table in PAPER.tables.items():
        for values in table.values():
            assert all(0 < x < (13 if name == "table7" else 1) for x in values.values())
            if name in ("table2", "table7"):
                assert set(values) <= set(collect.METHODS)
    assert [len(t) for t in PAPER.tables.values()] == [8, 3, 3, 3, 3, 8, 8]


def test_runs_are_selected_by_their_settings(runs):
    found = COLLECT(runs)
    assert set(collect.select(found, ["method=fedavg"]).table["method"]) == {"fedavg"}
    with pytest.raises(ValueError, match="no finished run meets"):
        collect.select(found, ["seed=9"])
    with pytest.raises(ValueError, match="Did you mean 'kappa'"):
        collect.select(found, ["kapa=0.5"])
