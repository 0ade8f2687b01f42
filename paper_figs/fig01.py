"""FedFac Fig. 1: outputs of every hidden neuron for every client, IID and non-IID.

Reads the store that `make figures` keeps under runs/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fedstat
from fedstat import plot


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--data", default="digits", help="data set of the study (default digits)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig01-<data>.png)")
    args = cli.parse_args()
    run = fedstat.open_run(args.runs / f"motivation-{args.data}.zarr")
    figure = plot.fig1(run)
    figure.supxlabel(plot.motivation_origin(run), fontsize="x-small", color="0.4")
    out = args.out or Path("paper_figs") / f"fig01-{args.data}.png"
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main()
