"""The study of privacy: its grid is valid, and its table is what its runs hold."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import adjusted_rand_score

from fedstat import open_run
from fedstat.fl import private_training
from fedstat.study import grid

ROOT = Path(__file__).parents[2]
FILE = """
data = "digits"
clients = 8
max_samples = 20
rounds = 1
sampling = "poisson"
participation = 0.8
batch_size = 10
local_epochs = 1
optimizer = "adam"
lr = 0.001
net_options = ["hidden=12"]
keep_weights = "none"
seeds = [0, 1]
[[method]]
algorithm = "fedavg"
[[method]]
algorithm = "fedfac-dynamic"
[[method]]
algorithm = "fedfac-dynamic"
clip = 0.5
noise_multiplier = 1.0
"""


@pytest.fixture(scope="module")
def script():
    return SimpleNamespace(**runpy.run_path(str(ROOT / "analysis" / "privacy.py")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("privacy")
    (folder / "grid.toml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_training, "_rdp", lambda: None)
        patch.setattr(private_training, "epsilon", lambda job, _: 3.0 + job.seed)
        list(grid.run_all(grid.cells(folder / "grid.toml"), folder / "runs"))
    return folder / "runs"


@pytest.mark.parametrize("scale", ["quick", "cpu"])
def test_the_grid_is_valid_and_has_a_plain_run_for_every_private_one(scale):
    cells = grid.cells(ROOT / "simulations" / "privacy.toml", scale=scale)
    plain = {(one.name, one.algorithm, one.seed) for one in cells if one.clip is None}
    private = {(one.name, one.algorithm, one.seed) for one in cells if one.clip is not None}
    assert plain == private
    assert {one.algorithm for one in cells} == {"fedavg", "fedper", "fedfac-dynamic"}
    assert all(one.delta < 1 / one.clients for one in cells if one.clip is not None)


def test_the_table_compares_within_seeds(runs, script, tmp_path):
    assert script.main(["--runs", str(runs), "--out", str(tmp_path / "table")]) == 0
    table = pd.read_csv(tmp_path / "table.csv")
    assert table[["method", "noise"]].values.tolist() == [["fedavg", 0], ["fedfac-dynamic", 0], ["fedfac-dynamic", 1]]
    stores = {bool("epsilon" in run["metrics"]): {} for run in map(open_run, runs.glob("*fedfac*"))}
    for path in runs.glob("*fedfac*"):
        run = open_run(path)
        stores["epsilon" in run["metrics"]][path.name.split("seed")[1][0]] = run
    accuracy, rand, same = [], [], []
    for seed in "01":
        weight = stores[True][seed]["metrics/n_test"].to_numpy()
        private, plain = (
            np.average(stores[p][seed]["metrics/accuracy"].to_numpy()[0], weights=weight) for p in (True, False)
        )
        a, b = (stores[p][seed]["split/fc1/shared"].to_numpy()[-1] for p in (True, False))
        accuracy.append(private - plain)
        rand.append(adjusted_rand_score(a, b))
        same.append((a == b).mean())
    row = table.iloc[2]
    assert row["epsilon"] == 3.5
    assert row["delta"] != row["delta"], "not given: the default"
    for name, values in (("cost", accuracy), ("rand", rand), ("same", same)):
        assert row[name] == pytest.approx(np.mean(values), abs=1e-6)
        half = 12.7062 * np.std(values, ddof=1) / np.sqrt(2)
        assert row[f"{name}_high"] - row[name] == pytest.approx(half, abs=1e-4)
    text = (tmp_path / "table.md").read_text()
    assert "not private" in text
    assert "FedFac dynamic" in text


def test_the_attack_is_tabulated_by_noise(runs, script, tmp_path):
    asked = ["--runs", str(runs), "--attack", "--clients", "2", "--images", "1", "--out", str(tmp_path / "table")]
    assert script.main(asked) == 0
    table = pd.read_csv(tmp_path / "table-attack.csv")
    assert table["noise"].tolist() == [0]
    low, mean, high = (float(table[name].iloc[0]) for name in ("conf_low", "estimate", "conf_high"))
    assert low < mean < high
    assert f"{mean:.2f}" in (tmp_path / "table-attack.md").read_text()
