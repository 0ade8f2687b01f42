"""The scripts of the leaderboard on a grid of few methods: tables, figures, and what they say."""

from __future__ import annotations

import functools

import pandas as pd
import pytest
from fl_runs import command
from scripts import load

from fedstat.study import collect, leaderboard

GRID = """
clients = 8
participation = 1.0
max_samples = 30
rounds = 2
validation_fraction = 0.2
unseen_fraction = 0.2
keep_weights = "none"
net_options = ["hidden=8"]
[tune]
lr = [1e-2, 1e-3]
seeds = [0]
[scale.tiny]
seeds = [0, 1]
[[dataset]]
scenario = "a"
[[dataset]]
scenario = "b"
partition = "iid"
[[method]]
sweep = { algorithm = ["local", "fedavg+", "fedfac-dynamic"] }
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaderboard")
    (folder / "grid.toml").write_text(GRID)
    out = folder / "all-tiny"
    assert command("--config", folder / "grid.toml", "--scale", "tiny", "--tuned", "--out", out, "--quiet") == 0
    plain, measured = leaderboard.measure, {}

    def once(runs):
        paths = tuple(runs.table["path"])
        if paths not in measured:
            measured[paths] = plain(runs)
        return measured[paths]

    with pytest.MonkeyPatch.context() as patch:  # both scripts read the same runs
        patch.setattr(collect, "collect", functools.cache(collect.collect))
        patch.setattr(leaderboard, "measure", once)
        yield folder


def test_the_tables_say_how_methods_were_tuned_and_what_ranks_can_decide(made, capsys):
    how = ["--runs", str(made / "all-tiny"), "--config", str(made / "grid.toml"), "--out", str(made / "t")]
    assert load("analysis/leaderboard.py").main(how) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the best of 2 (0.01, 0.001) on validation samples of seed 0" in said
    assert "Friedman's test over 2 settings" in said
    ranks = pd.read_csv(made / "t-ranks.csv")
    assert len(ranks) == 3
    assert ranks["mean_rank"].sum() == pytest.approx(3 * 2)
    settings = pd.read_csv(made / "t-settings.csv")
    assert len(settings) == 2 * 3
    assert settings[["accuracy", "worst", "unseen", "kept", "seconds"]].notna().all(axis=None)
    assert (settings["optimism"] >= 0).all()
    pairs = pd.read_csv(made / "t-pairs.csv")
    assert set(pairs["reference"]) == {"fedavg+", "fedfac-dynamic"}
    assert "all settings" in set(pairs["scenario"])


def test_the_figures_are_drawn(made):
    how = ["--runs", str(made / "all-tiny"), "--config", str(made / "grid.toml"), "--out", str(made / "f")]
    assert load("paper_figs/leaderboard.py").main(how) == 0
    for name in ("ranks", "round", "bytes", "seconds", "fairness", "clients"):
        assert (made / f"f-{name}.png").stat().st_size > 10_000, name
