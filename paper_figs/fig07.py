"""FedFac Fig. 7: share of neurons that keep their state between rounds under dynamic FedFac, as p and as α vary.

Reads the stores that `make figures` keeps under runs/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt

from fedstat import _cli, plot


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--scale", default="quick", help="quick or paper (default quick)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig07-<scale>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig07-{args.scale}.png"
    _cli.require_figure("--out", out)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for ax, name in zip(axes, ("vary_p", "vary_alpha"), strict=True):
        path = args.runs / f"{name}-{args.scale}.zarr"
        if not path.exists():
            raise FileNotFoundError(f"there is no run at {path}: `make figures SCALE={args.scale}` makes it")
        run = _cli.open_store(path, "fedstat.sim")
        plot.stability(plot.study_dataset(run), ax=ax)
    figure.supxlabel(plot.origin(run), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
