"""What fine-tuning gains over FedAvg, and how personal each layer is, setting by setting.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/personal.toml` makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from _stores import ROOT, RUNS, figure_path

from fedstat import _cli, plot
from fedstat.plot._figure import caption
from fedstat.stats import resampling
from fedstat.study import collect, leaderboard
from fedstat.study.leaderboard import Planned, planned

FILE = ROOT / "simulations/personal.toml"
MARGIN = 0.005
METHODS = {
    "fedavg+": "FedAvg+", "fedavg-shrunken": "shrunken, pooled B", "fedavg-shrunken by=layer": "shrunken, B by layer"
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=RUNS / "personal-cpu", help="folder of the grid's stores")
    cli.add_argument("--config", type=Path, default=FILE, help="the grid's file (default simulations/personal.toml)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/personal-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = figure_path(args.out, f"personal-{args.runs.name.removeprefix('personal-')}")
    plan = planned(collect.select(collect.collect(args.runs), ()), args.config)
    grid = plan.grid._replace(table=plan.grid.table[plan.grid.table["method"] == "fedavg"])
    outcomes, shares = leaderboard.gather(grid, leaderboard.scores, leaderboard.shares)
    figure = plt.figure(figsize=(14, 6.6), layout="constrained")
    grid_spec = figure.add_gridspec(2, 2)
    top = figure.add_subplot(grid_spec[0, 0])
    plot.differences(gains(outcomes, plan, "fedavg"), ax=top).set_ylabel("accuracy minus FedAvg's")
    top.tick_params(labelbottom=False)
    bottom = figure.add_subplot(grid_spec[1, 0])
    plot.differences(gains(outcomes, plan, "fedavg+"), methods=list(METHODS.values()), margin=MARGIN, ax=bottom)
    bottom.set_ylabel("accuracy minus FedAvg+'s")
    bottom.legend().remove()
    plot.shares(over_seeds(shares, plan), ax=figure.add_subplot(grid_spec[:, 1]))
    seeds = f"{len(plan.seeds)} seeds"
    together = f"95% CIs of a method, simultaneous over the scenarios (Bonferroni), {seeds}; band: ±{MARGIN:g}"
    reliability = "reliability of client differences under FedAvg, by split-half training, last ten rounds"
    lines = [f"left: after the last round; {together}", f"right: {reliability}; mean and 95% t interval over {seeds}"]
    caption(figure, *lines, *plan.notes[1:], *collect.caption(grid, 10_000))
    _cli.save_figure(figure, out, dpi=110)


def gains(outcomes: pd.DataFrame, plan: Planned, reference: str) -> pd.DataFrame:
    """Differences from a reference by setting and method."""
    parts = [
        leaderboard.by_setting(outcomes, (method, reference)).assign(method=name)
        for method, name in METHODS.items()
        if method != reference
    ]
    found = pd.concat(parts).rename(columns={"sim_conf_low": "low", "sim_conf_high": "high"})
    return in_order(found, plan)


def over_seeds(shares: pd.DataFrame, plan: Planned) -> pd.DataFrame:
    """Mean reliabilities with Student's intervals."""
    keys = ["scenario", "place", "layer"]
    rows = [
        dict(zip(keys, names, strict=True)) | {"reliability": mean.mean, "low": mean.low, "high": mean.high}
        for names, own in shares.groupby(keys)
        for mean in [resampling.mean(own["reliability"])]
    ]
    return in_order(pd.DataFrame(rows), plan)


def in_order(found: pd.DataFrame, plan: Planned) -> pd.DataFrame:
    return found.assign(at=found["scenario"].map(plan.scenarios.index)).sort_values("at", kind="stable")


if __name__ == "__main__":
    sys.exit(main())
