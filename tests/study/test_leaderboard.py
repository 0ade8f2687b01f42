"""The parts of the comparison of all methods: the choice of rates, what a run is judged by, bytes to reach, ranks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fedstat import store
from fedstat.study import Settings, collect, grid, leaderboard, run, run_settings

FILE = Path(__file__).parents[2] / "simulations/all.toml"


def test_the_grid_holds_every_method_that_it_can_in_the_order_of_tables():
    """FedSplit needs a split, and FedBN networks with normalisation."""
    names = [name for name in run_settings.named() if name != "fedbn"]
    by_scale = {scale: grid.cells(FILE, scale=scale, study=scale) for scale in ("quick", "cpu", "paper")}
    for runs in by_scale.values():
        assert list(dict.fromkeys(one.algorithm for one in runs)) == names
        assert all(one.validation_fraction > 0 and one.unseen_fraction > 0 for one in runs)
    assert {one.data for one in by_scale["quick"]} == {"mnist", "cifar-10", "shakespeare-leaf", "ag-news"}
    assert len({one.name for one in by_scale["cpu"]}) == 6
    assert len(by_scale["cpu"]) == 6 * 3 * len(names)


def test_the_rate_is_chosen_on_validation_samples_of_the_seeds_of_tuning_alone():
    rows = [
        ("a", "m", 0, 0.1, 0.7, 0.2), ("a", "m", 0, 0.2, 0.6, 0.9),  # validation, accuracy
        ("a", "m", 1, 0.1, 0.1, 0.3), ("a", "m", 1, 0.2, 0.9, 0.9), ("a", "m", 0, 0.3, 0.5, 0.5),
        ("a", "n", 0, 0.2, 0.5, 0.5), ("a", "n", 1, 0.2, 0.5, 0.5), ("a", "n", 1, 0.1, 1.0, 1.0),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["scenario", "method", "seed", "lr", "validation", "accuracy"])
    found = leaderboard.chosen_rates(collect.Grid(table), [0]).table
    assert found[["method", "seed", "lr"]].to_numpy().tolist() == [
        ["m", 0, 0.1],
        ["m", 1, 0.1],
        ["n", 0, 0.2],
        ["n", 1, 0.2],
    ]
    with pytest.raises(ValueError, match="no method has finished runs"):
        leaderboard.chosen_rates(collect.Grid(table), [7])


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "run.zarr"
    samples = {"clients": 6, "max_samples": 40, "validation_fraction": 0.2, "unseen_fraction": 0.2}
    run(Settings.of(algorithm="fedavg", rounds=3, participation=1.0, **samples), out=path)
    return path


def test_a_run_is_judged_in_the_round_that_is_best_on_validation_samples(stored):
    found, course = leaderboard.measured(stored)
    metrics = store.open_run(stored)["metrics"].to_dataset().load()
    weighted = [float(np.average(metrics["accuracy"][r], weights=metrics["n_test"])) for r in range(3)]
    size = metrics["n_validation"] if "n_validation" in metrics else metrics["n_train"]
    at = int(np.argmax([np.average(metrics["validation_accuracy"][r], weights=size) for r in range(3)]))
    assert found["chosen_round"] == at + 1
    assert found["accuracy"] == pytest.approx(weighted[at])
    assert found["optimism"] == pytest.approx(max(weighted) - weighted[at])
    assert found["worst"] == pytest.approx(np.quantile(metrics["accuracy"][at], 0.1))
    np.testing.assert_allclose(course["accuracy"], weighted, rtol=1e-6)
    np.testing.assert_allclose(course["bytes"], np.cumsum(metrics["bytes_up"] + metrics["bytes_down"]))
    np.testing.assert_allclose(course["elapsed"], np.cumsum(metrics["seconds"]))
    new = store.open_run(stored)["unseen_clients"].to_dataset()
    own = new["accuracy"].sel(rule=found["unseen_rule"])
    assert found["unseen"] == pytest.approx(float(np.average(own, weights=new["n_test"])))
    model = 4 * sum(math.prod(shape) for shape in [(64, 64), (10, 64)])
    assert found["kept"] > model, "the server's copy, at least"
    assert len(leaderboard.of_clients(stored, at + 1)) == metrics.sizes["client"]


def test_a_mean_cost_needs_every_seed_to_reach_the_target():
    rows = [("a", "m", s, r, acc, 10.0 * r) for s, top in ((0, 0.9), (1, 0.5)) for r, acc in ((1, 0.4), (2, top))]
    courses = pd.DataFrame(rows, columns=["scenario", "method", "seed", "round", "accuracy", "bytes"])
    (both,) = leaderboard.to_reach(courses, {"a": 0.5}).to_dict("records")
    (one,) = leaderboard.to_reach(courses, {"a": 0.8}).to_dict("records")
    (none,) = leaderboard.to_reach(courses, {"a": math.nan}).to_dict("records")
    assert (both["reached"], both["bytes"]) == (2, 20.0)
    assert one["reached"] == 1
    assert math.isnan(one["bytes"])
    assert none["reached"] == 0


def test_methods_that_lack_a_setting_are_not_ranked():
    rows = [
        (lab, m, s, a + s / 10)
        for lab in "xy"
        for m, a in (("fedavg", 0.2), ("local", 0.5), ("ditto", 0.4))
        for s in (0, 1)
    ]
    found = pd.DataFrame([*rows, ("x", "fedcp", 0, 0.9)], columns=["scenario", "method", "seed", "accuracy"])
    wide, test, absent = leaderboard.ranked(found)
    assert list(wide.columns)[:2] == ["local", "fedavg"]
    assert wide.loc["x", "local"] == pytest.approx(0.55)
    assert dict(zip(wide.columns, test.mean_ranks, strict=True)) == {"local": 1, "ditto": 2, "fedavg": 3}
    assert absent == ["fedcp"]
    assert leaderboard.ranked(found[found["scenario"] == "x"])[1] is None


def test_means_that_differ_by_the_rounding_of_float32_alone_are_ties():
    by_seed = {"a": (0.5, 19 / 30), "b": (16 / 30, 0.6), "c": (0.1, 0.2)}  # a and b have equal means
    rows = [
        {"scenario": scenario, "method": method, "seed": seed, "accuracy": float(np.float32(score))}
        for scenario in "xy"
        for method, scores in by_seed.items()
        for seed, score in enumerate(scores)
    ]
    wide, test, _ = leaderboard.ranked(pd.DataFrame(rows))
    assert wide["a"].tolist() == wide["b"].tolist()
    assert test.mean_ranks.tolist() == [1.5, 1.5, 3.0]
