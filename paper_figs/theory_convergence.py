"""Theorem 1 of FedFac §3.3 against training: store -> figure. The paper has no such figure; its Fig. 9 is the nearest.

Usage: python paper_figs/theory_convergence.py --scale quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import _theory
from matplotlib.figure import Figure

from fedstat import _cli, plot
from fedstat.ntk import ConvergenceResult
from fedstat.plot._figure import caption

SCALES = {
    "quick": ["--widths", "64", "256", "--rounds", "60", "--replicates", "3", "--clients", "5", "--n", "10"],
    "paper": [
        *("--widths", "256", "1024", "4096", "--rounds", "200", "--replicates", "5"),
        *("--clients", "10", "--n", "20"),
    ],
}
METHODS = ["--methods", "fedsplit", "fedavg", "fedavg-matched", "dynamic"]
DATA = {"unit sphere": ["--data", "gaussian"], "digits, one class a client": ["--data", "digits"]}


def store(name: str, args: argparse.Namespace) -> Path:
    """Path of the data set's run."""
    path = args.runs / f"theory_convergence_{name.split(',')[0].replace(' ', '_')}_{args.scale}.zarr"
    return _theory.stored(path, [*DATA[name], *SCALES[args.scale], *METHODS])


def main(argv: Sequence[str] | None = None) -> int:
    """Read (or make) the stores and save the figure."""
    return _theory.run(__doc__, "theory_convergence", SCALES, work, argv)


def work(args: argparse.Namespace) -> None:
    figure, panels = Figure(figsize=(5 * len(DATA), 9), layout="constrained"), {}
    for name, (top, bottom) in zip(DATA, figure.subplots(2, len(DATA)).T, strict=True):
        tree = _cli.open_store(store(name, args), "fedstat.ntk")
        result = ConvergenceResult.from_datatree(tree)
        plot.convergence(result, ax=top).set_title(name)
        plot.freezing(result, ax=bottom)
        print(result.summary(), end="\n\n")
        panels[name] = _theory.origin(tree)
    caption(
        figure,
        "Above, lines: means over replicates at the largest width. Dashed: Theorem 1's bound of the same color, where "
        "the theorem has one. Below: FedSplit, means over replicates; not joined where only two widths were run.",
        *_theory.notes(panels),
    )
    _cli.save_figure(figure, args.out, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
