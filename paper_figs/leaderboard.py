"""All methods side by side: critical differences, courses over rounds, bytes and seconds, and the spread of clients.

Reads the runs of `python -m fedstat.fl --config simulations/all.toml --scale quick --study quick --tuned`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from _stores import ROOT, RUNS, figure_path
from matplotlib.figure import Figure

from fedstat import _cli, plot
from fedstat.plot._figure import caption, panel_grid, wrap_panels
from fedstat.study import collect, grid, leaderboard
from fedstat.study.run_metrics import score_in

FILE = ROOT / "simulations/all.toml"


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=RUNS / "all-quick", help="folder of the grid's stores")
    cli.add_argument("--config", type=Path, default=FILE, help="the grid's file (default simulations/all.toml)")
    cli.add_argument("--scale", help="the runs' scale (default: the end of the folder's name)")
    cli.add_argument("--out", type=Path, help="name without ending (default paper_figs/leaderboard-<scale>)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    scale = args.scale or args.runs.name.rpartition("-")[2]
    runs = collect.collect(args.runs, differ=("lr",))
    seeds = grid.tuning(args.config, scale=scale).seeds or sorted(set(runs.table["seed"]))
    runs = leaderboard.chosen_rates(runs, seeds)
    found, courses = leaderboard.measure(runs)
    drawn: dict[str, tuple[Figure, str]] = {}
    wide, test, _ = leaderboard.ranked(found)
    score = score_in(found)
    if test is not None:
        drawn["ranks"] = (
            plot.critical_difference(wide, value=score.title).figure,
            (
                "large: mean rank; small: rank in each scenario; a bar on the right spans methods without evidence of "
                "a difference (Nemenyi, all pairs at 95%)"
            ),
        )
    for x in ("round", "bytes", "elapsed"):
        note = "means over seeds; colored methods are named, gray lines are the others"
        note += "; bands: 95% t intervals over seeds" if found["seed"].nunique() > 2 else ""
        note += "; dotted: no communication" if x == "bytes" else ""
        drawn[x if x != "elapsed" else "seconds"] = plot.by_setting(courses, plot.method_courses, x=x), note
    drawn["fairness"] = (
        plot.by_setting(found, plot.trade_off, x="worst"),
        "named: methods named in every panel, and methods that no other beats in both",
    )
    drawn["clients"] = (
        spread(found),
        (
            f"{score.title} of each client in the round that is best on validation samples, all seeds; boxes: "
            "quartiles; white: mean, with its 95% t interval over seeds"
        ),
    )
    for name, (figure, note) in drawn.items():
        out = figure_path(Path(f"{args.out}-{name}.png") if args.out else None, f"leaderboard-{scale}-{name}")
        caption(figure, note, *(n for n in collect.caption(runs, 10_000) if not n.startswith("fewer than")))
        _cli.save_figure(figure, out, dpi=110)
        plt.close(figure)


def spread(found: pd.DataFrame) -> Figure:
    """Boxes of the clients' accuracies, a panel for each scenario."""
    parts = [
        leaderboard.of_clients(run["path"], run["chosen_round"]).assign(
            **{name: run[name] for name in ("scenario", "method", "seed")}
        )
        for run in found.to_dict("records")
    ]
    data = pd.concat(parts, ignore_index=True)
    scenarios = list(dict.fromkeys(data["scenario"]))
    figure, axes = panel_grid(wrap_panels(len(scenarios), 2), (6.4, 1.2 + 0.2 * data["method"].nunique()))
    for ax, scenario in zip(axes, scenarios, strict=True):
        plot.client_boxplot(data[data["scenario"] == scenario], ax=ax).set_title(scenario, fontsize="medium")
    return figure


if __name__ == "__main__":
    sys.exit(main())
