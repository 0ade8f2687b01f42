"""The figures of the leaderboard on a grid of few methods."""

from __future__ import annotations

from fl_runs import command
from scripts import load

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


def test_the_figures_are_drawn(tmp_path):
    (tmp_path / "grid.toml").write_text(GRID)
    out = tmp_path / "all-tiny"
    assert command("--config", tmp_path / "grid.toml", "--scale", "tiny", "--tuned", "--out", out) == 0
    how = ["--runs", str(out), "--config", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "f")]
    assert load("paper_figs/leaderboard.py").main(how) == 0
    for name in ("ranks", "round", "bytes", "seconds", "fairness", "clients"):
        assert (tmp_path / f"f-{name}.png").stat().st_size > 10_000, name
