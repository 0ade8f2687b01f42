"""FedFac Fig. 6: test accuracy of the ways to split, as p varies (top) and as α varies (bottom).

Left the accuracies, right their differences from the true split within replicates: replicates differ more than the
ways to split do. Reads the stores that `make figures` keeps under runs/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

import fedstat
from fedstat import plot


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--scale", default="quick", help="quick or paper (default quick)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig06-<scale>.png)")
    args = cli.parse_args()
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.4), layout="constrained")
    for row, name in zip(axes, ("vary_p", "vary_alpha"), strict=True):
        path = args.runs / f"{name}-{args.scale}.zarr"
        if not path.exists():
            cli.error(f"there is no run at {path}: `make figures SCALE={args.scale}` makes it")
        run = fedstat.open_run(path)
        result = plot.study_dataset(run)
        plot.accuracy(result, ax=row[0]).get_legend().remove()
        plot.accuracy(result, relative_to="true", ax=row[1])
    figure.supxlabel(plot.origin(run), fontsize="x-small", color="0.4")
    out = args.out or Path("paper_figs") / f"fig06-{args.scale}.png"
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main()
