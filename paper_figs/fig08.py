"""FedFac Fig. 8: test accuracies of all clients under every method; dynamic FedFac is filled.

Reads a grid of runs, as `python -m fedstat.fl --config simulations/fedfac.toml` makes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from _stores import RUNS, figure_path

import fedstat
from fedstat import _cli, plot
from fedstat.plot._figure import caption, panel_grid, wrap_panels
from fedstat.study import collect, run_table


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, default=RUNS / "fedfac-quick", help="folder of the grid's stores")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig08-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = figure_path(args.out, f"fig08-{args.runs.name}")
    grid = collect.select(collect.collect(args.runs), ())
    scenarios = collect.scenarios(grid)
    clients = pd.concat(
        run_table.clients(fedstat.open_run(r["path"])).assign(
            scenario=r["scenario"], method=r["method"], seed=r["seed"]
        )
        for r in grid.table.to_dict("records")
    )
    size = 3.5, 0.21 * grid.table["method"].nunique() + 1.3
    figure, axes = panel_grid(wrap_panels(len(scenarios), 3), size, sharey=True)
    for ax, scenario in zip(axes, scenarios, strict=True):
        plot.client_boxplot(clients[clients["scenario"] == scenario], ax=ax).set_title(scenario)
    caption(
        figure,
        "Clients of all seeds; accuracy: mean over the last 10 rounds. Box: quartiles and median; whiskers: to 1.5 "
        "times the box's length; points: clients beyond.",
        "White: mean over clients, with its 95% t interval over seeds, cut off at the axes.",
        *collect.caption(grid, 10_000),
    )
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
