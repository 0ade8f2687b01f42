"""Theorem 2 of FedFac §3.3 against the test loss: store -> figure. The paper has no such figure.

Usage: python paper_figs/theory_generalization.py --scale quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import _theory
from matplotlib.figure import Figure

from fedstat import _cli, plot
from fedstat.ntk import GeneralizationResult
from fedstat.plot._figure import caption

SCALES = {
    "quick": ["--widths", "128", "--rounds", "60", "--replicates", "2"],
    "paper": ["--widths", "1024", "--rounds", "500", "--replicates", "5"],
}
DIGITS = ["--theorem", "2", "--data", "digits", "--partition", "iid", "--n-test", "30"]
PANELS = {
    "clients": [*DIGITS, "--clients", "1", "2", "5", "10", "20", "--n", "30"],
    "n": [*DIGITS, "--clients", "4", "--n", "20", "50", "100", "200", "400"],
}
TITLES = {"clients": "digits, 600 samples divided among C clients", "n": "digits, 4 clients of n samples"}


def store(x: str, args: argparse.Namespace) -> Path:
    """Path of the panel's run."""
    path = args.runs / f"theory_generalization_{x}_{args.scale}.zarr"
    return _theory.stored(path, [*PANELS[x], *SCALES[args.scale]])


def main(argv: Sequence[str] | None = None) -> int:
    """Read (or make) the stores and save the figure."""
    return _theory.run(__doc__, "theory_generalization", SCALES, work, argv)


def work(args: argparse.Namespace) -> None:
    figure, panels = Figure(figsize=(10, 4.8), layout="constrained"), {}
    for x, ax in zip(PANELS, figure.subplots(1, len(PANELS)), strict=True):
        tree = _cli.open_store(store(x, args), "fedstat.ntk")
        result = GeneralizationResult.from_datatree(tree)
        plot.generalization(result, x=x, ax=ax).set_title(TITLES[x])
        print(result.summary(), end="\n\n")
        panels[TITLES[x]] = _theory.origin(tree)
    caption(
        figure,
        "The bound holds if the test loss lies below it, and says nothing in the gray area, as no loss exceeds 1; its "
        "complexity term is nearly all of it. Bars on the network's loss: 95% t intervals over replicates.",
        *_theory.notes(panels),
    )
    _cli.save_figure(figure, args.out, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
