"""FedFac Fig. 6: test accuracy of the ways to split, as p varies (top) and as α varies (bottom).

Left the accuracies, right their differences from the true split within replicates: replicates differ more than the
ways to split do. Reads the stores that `make figures` keeps under runs/.
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
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig06-<scale>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig06-{args.scale}.png"
    _cli.require_figure("--out", out)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
    for row, name in zip(axes, ("vary_p", "vary_alpha"), strict=True):
        path = args.runs / f"{name}-{args.scale}.zarr"
        if not path.exists():
            raise FileNotFoundError(f"there is no run at {path}: `make figures SCALE={args.scale}` makes it")
        run = _cli.open_store(path, "fedstat.sim")
        result = plot.study_dataset(run)
        plot.accuracy(result, ax=row[0]).get_legend().remove()
        plot.accuracy(result, relative_to="true", ax=row[1])
    figure.supxlabel(plot.origin(run), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
