"""The study of personalisation: differences, intervals, conclusions by its rules, incomplete seeds, its figure."""

from __future__ import annotations

import re
import runpy
import shutil
import tomllib
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import personal_stores as stores
import pytest
from numpy.testing import assert_allclose
from scipy import stats

from fedstat import open_run, plot
from fedstat.fl import profile
from fedstat.study import collect, grid, leaderboard

LABELS = stores.LABELS[:2]
GAIN = {"fedavg": 0.0, "fedavg+": 0.3, "fedavg-shrunken": 0.31, "random": 0.2, "fedfac-static, icc": 0.25}


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(stores.ROOT / "analysis" / "personal.py")))


def accuracy(label, name, seed):
    """Accuracies that are put into the stores."""
    noise = np.random.default_rng([seed, *map(ord, label + name)]).normal()
    return 0.4 + 0.02 * seed + GAIN.get(name, 0.22) + 0.002 * noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A whole grid of two settings and two seeds."""
    found = tmp_path_factory.mktemp("grid")
    share = {label: (0.8, 0.6)[i] for i, label in enumerate(LABELS)}
    stores.write_all(
        found / "runs", stores.plan(found, LABELS), accuracy, share=lambda label, i: share[label] - 0.1 * i
    )
    return found


@pytest.fixture(scope="module")
def runs(folder):
    return collect.collect(folder / "runs")


@pytest.fixture
def some(folder, tmp_path):
    """A copy of the grid to take from."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def run(name, *arguments, folder):
    main = runpy.run_path(str(stores.ROOT / name))["main"]
    return main(["--runs", str(folder / "runs"), "--config", str(folder / "grid.toml"), *map(str, arguments)])


def made_up(values, *, seeds=6, labels=8):
    """Outcomes whose differences from 0.5 are ``values`` of method, seed and setting."""
    rows = [
        (f"setting {i}", s, m, 0.5 + f(s, i)) for m, f in values.items() for i in range(labels) for s in range(seeds)
    ]
    return pd.DataFrame(rows, columns=["scenario", "seed", "method", "accuracy"])


def test_over_settings_there_is_one_number_a_seed():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 6, 8))
    data = made_up({m: lambda s, i, k=k: x[k, s, i] for k, m in enumerate("abc")})
    found = leaderboard.over_settings(data, [("a", "b"), ("c", "b"), ("a", "c")])
    assert found["comparison"].tolist() == ["a − b", "c − b", "a − c"]
    for row, (one, two) in zip(found.to_dict("records"), [(0, 1), (2, 1), (0, 2)], strict=True):
        d = (x[one] - x[two]).mean(axis=1)
        se = d.std(ddof=1) / np.sqrt(6)
        assert row["n"] == 6
        assert_allclose(row["difference"], d.mean())
        alone = stats.t.interval(0.95, 5, d.mean(), se)
        together = stats.t.interval(1 - 0.05 / 3, 5, d.mean(), se)
        assert_allclose(
            [row["conf_low"], row["conf_high"], row["sim_conf_low"], row["sim_conf_high"]], [*alone, *together]
        )


def test_intervals_of_settings_hold_together_over_all():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 5, 8))
    found = leaderboard.by_setting(
        made_up({"a": lambda s, i: x[0, s, i], "b": lambda s, i: x[1, s, i]}, seeds=5), ("a", "b")
    )
    assert found["scenario"].tolist() == [f"setting {i}" for i in range(8)]
    d = x[0] - x[1]
    half = stats.t.ppf(1 - 0.05 / 16, 4) * d.std(axis=0, ddof=1) / np.sqrt(5)
    assert_allclose(found["sim_conf_low"], d.mean(axis=0) - half)
    assert_allclose(found["sim_conf_high"], d.mean(axis=0) + half)


def test_scores_are_weighted_by_test_samples(folder):
    cells = grid.cells(folder / "grid.toml", scale="small")
    cell = next(c for c in cells if c.given.get("estimator") == "icc")
    tree = open_run(folder / "runs" / f"{grid.name_of(cell)}.zarr")
    found = leaderboard.scores(tree)
    assert found["method"].tolist() == ["fedfac-static", "fedfac-static+"]
    assert_allclose(found["accuracy"], [accuracy(cell.name, f"fedfac-static{p}, icc", cell.seed) for p in ("", "+")])
    assert abs(float(tree["metrics/accuracy"].isel(round=-1).mean()) - found["accuracy"][0]) > 0.01


def test_shares_are_those_of_the_profile(runs):
    shares, steps = leaderboard.gather(runs, leaderboard.shares, leaderboard.steps)
    probed = runs.table[runs.table["method"] == "fedavg"]
    assert len(shares) == 3 * len(probed) == 12
    one = probed.iloc[0]
    tree = open_run(one["path"])
    own = shares[(shares["scenario"] == one["scenario"]) & (shares["seed"] == one["seed"])]
    assert_allclose(own["reliability"].astype(float), profile(tree, window=10)["reliability"])
    each = profile(tree)
    assert set(own["first_round"]) == {5}
    assert set(own["last_round"]) == {12}
    assert_allclose(own["first"].astype(float), each.loc[each["round"] == 5, "reliability"])
    assert_allclose(steps.groupby("layer", sort=False)["step"].mean(), [0.2, 0.4, 0.6])


def test_the_tables_hold_what_was_put_in(folder, tmp_path, capsys, script):
    assert run("analysis/personal.py", "--out", tmp_path / "t", folder=folder) == 0
    table = pd.read_csv(tmp_path / "t-accuracy.csv").set_index(["scenario", "method"])
    assert len(table) == 16 * 3
    for key, name in script.ROWS.items():
        put = np.array([[accuracy(label, key, seed) for seed in (0, 1)] for label in LABELS])
        assert_allclose(table.loc[(LABELS[0], name), "mean"], put[0].mean(), rtol=1e-5)
        assert_allclose(table.loc[("all settings", name), "mean"], put.mean(), rtol=1e-5)
        assert_allclose(table.loc[("all settings", name), "std_error"], abs(np.diff(put.mean(axis=0))) / 2, rtol=1e-3)
    values = pd.read_csv(tmp_path / "t-answers.csv")
    d = [np.mean([accuracy(x, "fedfac-static, icc", s) - accuracy(x, "random", s) for x in LABELS]) for s in (0, 1)]
    row = values[values["question"] == "1"].iloc[0]
    assert row["comparison"] == "ICC − random"
    assert_allclose(row["difference"], np.mean(d), rtol=1e-4)
    assert np.isnan([row["low"], row["high"]]).all(), "of two seeds there is no interval"
    assert len(values[values["question"] == "2 secondary"]) == 10
    shares = pd.read_csv(tmp_path / "t-profile.csv")
    assert shares["layer"].tolist() == [*stores.LAYERS] * 2
    assert_allclose(shares["b_by_layer"], [0.2, 0.4, 0.6] * 2)
    said = " ".join(capsys.readouterr().out.split())
    assert "the noise of computation itself was not measured" in said
    assert "complete seeds: 0, 1" in said


EIGHT = {"share": np.linspace(0.9, 0.25, 8), "gain": np.linspace(0.2, -0.05, 8)}


def study(script, *, adaptive, split=0.05, gain=EIGHT["gain"], share=EIGHT["share"], floor=0.003):
    """Answers to made-up outcomes: what methods are better by than FedAvg, by setting, with noise of 0.001."""
    levels = dict.fromkeys(script.ROWS.values(), gain) | {"FedAvg": np.zeros(8), "pooled B": np.asarray(adaptive)}
    levels |= {"random": np.zeros(8), "ICC": np.full(8, split), "ICC+": gain + split}
    noise = np.random.default_rng(5).normal(scale=0.001, size=(len(levels), 10, 8))
    data = made_up(
        {m: lambda s, i, k=k, x=x: x[i] + noise[k, s, i] for k, (m, x) in enumerate(levels.items())}, seeds=10
    )
    shares = pd.DataFrame(
        [
            (f"setting {i}", s, layer, place, share[i] if layer == "fc" else 1 - share[i])
            for i in range(8) for s in range(10) for place, layer in enumerate(stores.LAYERS)
        ],
        columns=["scenario", "seed", "layer", "place", "reliability"],
    )  # fmt: skip
    labels = tuple(dict.fromkeys(data["scenario"]))
    runs = pd.DataFrame({"scenario": labels, "seed": 0, "method": "fedavg", "code": "", "revision": "", "rounds": 12})
    plan = leaderboard.Planned(
        collect.Grid(runs, (), {label: {} for label in labels}), "cpu", labels, tuple(range(10)), ()
    )
    table = script.answers(plan, data, shares, script.Floor(floor, "noise floor"))
    return table.blocks["Answers"].iloc[:, 0].tolist(), table


def test_answers_of_a_clear_study(script):
    said, table = study(script, adaptive=np.maximum(EIGHT["gain"], 0) + 0.02)
    assert said[0].startswith("1: ICC is better than random (+0.05")
    assert said[1].startswith("1: ICC+ is better than random+")
    assert said[2].startswith("2: pooled B is better than FedAvg+")
    assert said[3] == "2: pooled B and FedAvg: never worse: in every setting the lower limit is above -0.005"
    gain = table.values[table.values["question"] == "3"].set_index("scenario")
    right = (EIGHT["share"] > 0.5) == (EIGHT["gain"] > 0)
    assert f"right in {right.sum()} of 8 settings in which FedAvg+ differs from FedAvg (of 8 in all)" in said[4]
    assert "last hidden layer" in said[4]
    assert "Spearman's r = +1.00, permutation p = <0.0001" in said[4]
    assert f"head is right in {8 - right.sum()} of 8" in said[5]
    assert "Spearman's r = -1.00" in said[5]
    assert_allclose(gain["hidden"], EIGHT["share"])
    assert table.values[["difference", "low", "high", "conclusion"]].notna().all().all()


def test_answers_that_disappoint(script):
    adaptive = EIGHT["gain"].copy()
    adaptive[:2] = -0.002, -0.1  # below the noise floor; clearly worse
    said, table = study(script, adaptive=adaptive, split=-0.05)
    assert said[0].startswith("1: ICC is worse than random (-0.05")
    assert said[2].startswith("2: pooled B is worse than FedAvg+")
    assert "worse in setting 1; setting 6; setting 7;" in said[3]
    assert "below 0, but by less than the noise floor, in setting 0" in said[3]
    assert "never worse" not in said[3]
    beside = table.values[table.values["question"] == "2 secondary"].set_index("comparison")
    assert set(beside["conclusion"].filter(like="pooled B")) == {"better"}
    assert set(beside["conclusion"].drop(beside.filter(like="pooled B", axis=0).index)) == {"the same"}


def test_equal_methods_are_the_same_and_a_high_floor_decides_nothing(script):
    said, _ = study(script, adaptive=EIGHT["gain"], split=0.0, floor=0.1)
    assert re.match(r"1: ICC is the same as random, within ±0.005 \([+-]0.000", said[0])
    assert "the same as FedAvg+" in said[2]
    assert "of 3 settings in which FedAvg+ differs from FedAvg (of 8 in all)" in said[4]  # 0.2, 0.164, 0.129


def test_a_difference_below_the_floor_is_said_to_be_one(script):
    data = made_up({"a": lambda s, i: 0.02 + 0.001 * s + 0 * i, "b": lambda s, i: 0.0 * s * i})
    found = script.judged(leaderboard.over_settings(data, [("a", "b")]), "conf", script.Floor(0.03, ""))
    said = script.sentence(found.iloc[0].to_dict())
    assert said.startswith("a differs from b by less than the noise floor (+0.0225 [+0.02")


def test_undecided_where_seeds_disagree(script):
    data = made_up({"a": lambda s, i: 0.1 * (-1) ** s + 0 * i, "b": lambda s, i: 0.0 * s * i})
    found = script.judged(leaderboard.over_settings(data, [("a", "b")]), "conf", script.Floor(0.003, ""))
    assert script.sentence(found.iloc[0].to_dict()).startswith("inconclusive between a and b (")
    assert (found["low"] < -0.1).all()
    assert (found["high"] > 0.1).all()


def test_a_seed_counts_only_if_it_is_complete_in_every_setting(some, capsys):
    one = next((some / "runs").glob("*-random-seed1-*"))
    shutil.rmtree(one)
    assert run("analysis/personal.py", folder=some) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "complete seeds: 0" in said
    assert "incomplete seeds, excluded: 1 (9 of 10 runs)" in said
    assert "too few seeds for any interval, means only" in said
    assert "±" not in said.partition("accuracy of the clients")[0]
    assert "Answers" not in said


def test_an_unfinished_run_leaves_its_seed_out_and_no_seed_is_refused(some):
    runs, file = some / "runs", some / "grid.toml"
    for cell in grid.cells(file, scale="small"):
        if cell.algorithm == "fedper" and cell.name == LABELS[0]:
            path = runs / f"{grid.name_of(cell)}.zarr"
            shutil.rmtree(path)
            if cell.seed == 1:
                stores.write(path, cell, accuracy, finish=False)
    with pytest.raises(ValueError, match=r"all runs finished, .* has 0 \(9 of 10 runs\), 1 \(9 of 10 runs\)"):
        leaderboard.planned(collect.collect(runs), file)


def test_what_is_no_run_of_the_grid_is_refused_or_left_out(folder, runs, tmp_path):
    file = folder / "grid.toml"
    with pytest.raises(ValueError, match="none of the 20 finished runs belongs to"):
        leaderboard.planned(runs, stores.FILE)
    found = leaderboard.planned(runs, stores.plan(tmp_path, LABELS[:1]))
    assert found.scenarios == LABELS[:1]
    assert len(found.grid.table) == 10
    assert "finished runs of the folder that are not in" in found.notes[-1]
    assert found.notes[-1].endswith("10")
    cell = next(c for c in grid.cells(file, scale="large") if c.algorithm == "random")
    stores.write(tmp_path / "large.zarr", cell, accuracy)
    both = pd.concat([runs.table, collect.collect(tmp_path).table], ignore_index=True)
    with pytest.raises(ValueError, match=r"must have one scale of .* small, large"):
        leaderboard.planned(runs._replace(table=both), file)
    twice = pd.concat([runs.table, runs.table.iloc[:1]], ignore_index=True)
    with pytest.raises(ValueError, match="is stored twice"):
        leaderboard.planned(runs._replace(table=twice), file)


def test_the_noise_floor_is_twice_the_noise_over_the_root_of_seeds(folder, runs, tmp_path, script):
    cells = [c for c in grid.cells(folder / "grid.toml", scale="small") if c.algorithm == "fedavg"][:4]
    shift = [0.01, -0.02, 0.0, 0.03]
    for cell, x in zip(cells, shift, strict=True):
        path = tmp_path / f"{grid.name_of(cell)}.zarr"
        stores.write(path, cell, lambda *of, x=x: accuracy(*of) + (x if of[1] == "fedavg" else x / 2))
    found = script.noise_floor(runs, tmp_path, 9)
    assert_allclose(found.value, 2 * np.std(shift, ddof=1) / 3, rtol=1e-6)
    assert "(4 runs)" in found.note
    assert script.noise_floor(runs, tmp_path, 10**6).value == 0.003
    assert script.noise_floor(runs, None, 9).value == 0.003


def test_noise_is_of_other_computations_of_the_same_runs(folder, runs, tmp_path):
    with pytest.raises(ValueError, match="is a copy of"):
        leaderboard.repeated(runs, runs)
    cell = next(c for c in grid.cells(folder / "grid.toml", scale="large") if c.algorithm == "fedavg")
    stores.write(tmp_path / "other.zarr", cell, accuracy)
    with pytest.raises(ValueError, match="must repeat a run of the grid"):
        leaderboard.repeated(runs, collect.collect(tmp_path))


def test_the_names_are_those_of_the_study(script):
    methods = tomllib.loads(stores.FILE.read_text(encoding="utf-8"))["method"]
    names = []
    for m in methods:
        end = f", {m['estimator']}" if "estimator" in m else ""
        names += [m["algorithm"] + end, *(r + end for r in m["prediction_rules"])]
    assert sorted(names) == sorted(script.ROWS)


def test_the_figure_is_made(folder, tmp_path):
    assert run("paper_figs/personal.py", "--out", tmp_path / "figure.png", folder=folder) == 0
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    plt.close("all")


def test_differences_stand_side_by_side():
    rows = [(x, m, d, d - 0.1, d + 0.2) for x, d in (("skewed", 0.3), ("even", -0.1)) for m in ("fedavg+", "mine")]
    data = pd.DataFrame(rows, columns=["scenario", "method", "difference", "low", "high"])
    ax = plot.differences(data, methods=["fedavg+", "other", "mine"], margin=0.005, ax=plt.figure().gca())
    assert [t.get_text() for t in ax.get_xticklabels()] == ["skewed", "even"]
    first, second = (c[0] for c in ax.containers)
    assert_allclose(first.get_ydata().astype(float), [0.3, -0.1])
    assert_allclose((second.get_xdata() - first.get_xdata()).astype(float), 0.44)
    assert_allclose([s[:, 1] for s in ax.containers[0][2][0].get_segments()], [[0.2, 0.5], [-0.2, 0.1]])
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["FedAvg+", "mine"]
    plt.close("all")


def test_shares_stand_in_the_order_of_the_network_within_0_and_1():
    rows = [("a", "head", 1, 0.9, 0.7, 1.1), ("a", "conv", 0, 0.2, -0.1, 0.5), ("b", "fc", 0, -0.05, -0.3, 0.2)]
    data = pd.DataFrame(rows, columns=["scenario", "layer", "place", "reliability", "low", "high"])
    ax = plot.shares(data, ax=plt.figure().gca())
    assert [t.get_text() for t in ax.texts] == ["conv", "head", "fc"]
    ends = [c[2][0].get_segments()[0][:, 1] for c in ax.containers]
    assert_allclose(ends, [[0, 0.5], [0.7, 1], [-0.05, 0.2]], atol=1e-12)
    assert ax.get_ylim()[0] < -0.05
    plt.close("all")
