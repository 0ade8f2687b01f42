"""Theorem 1 of FedFac §3.3 against training: store -> figure. The paper has no such figure; its Fig. 9 is the nearest.

Usage: python paper_figs/theory_convergence.py --scale quick
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from fedstat import _cli
from fedstat.ntk import ConvergenceResult
from fedstat.ntk.__main__ import main as check
from fedstat.plot import ntk as plot

HERE = Path(__file__).parent
SCALES = {
    "quick": ["--widths", "64", "256", "--rounds", "60", "--replicates", "3", "--clients", "5", "--n", "10"],
    "paper": [
        *("--widths", "256", "1024", "4096", "--rounds", "200", "--replicates", "5"),
        *("--clients", "10", "--n", "20"),
    ],
}
METHODS = ["--methods", "fedsplit", "fedavg", "fedavg-matched", "dynamic"]
DATA = {"unit sphere": ["--data", "gaussian"], "digits, one class a client": ["--data", "digits"]}


def store(name: str, scale: str, folder: Path) -> Path:
    """Path of the data set's run, made first if absent."""
    path = folder / f"theory_convergence_{name.split(',')[0].replace(' ', '_')}_{scale}.zarr"
    if not path.exists() and (status := check([*DATA[name], *SCALES[scale], *METHODS, "--out", str(path)])):
        raise SystemExit(status)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Read (or make) the stores and save the figure."""
    parser = _cli.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs", help="folder of the stores")
    parser.add_argument("--out", type=Path, help="figure to write")
    return _cli.run(parser, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or HERE / f"theory_convergence-{args.scale}.png"
    _cli.require_figure("--out", out)
    figure = Figure(figsize=(5 * len(DATA), 8), layout="constrained")
    for name, (top, bottom) in zip(DATA, figure.subplots(2, len(DATA)).T, strict=True):
        tree = _cli.open_store(store(name, args.scale, args.runs), "fedstat.ntk")
        result = ConvergenceResult.from_datatree(tree)
        plot.convergence(result, ax=top).set_title(name)
        plot.freezing(result, ax=bottom)
        print(result.summary(), end="\n\n")
    _cli.save_figure(figure, out, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
