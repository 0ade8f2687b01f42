"""FedFac Fig. 1: outputs of every hidden neuron for every client, IID and non-IID.

Reads the store that `make figures` keeps under runs/.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedstat import _cli, plot


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--data", default="digits", help="data set of the study (default digits)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig01-<data>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig01-{args.data}.png"
    _cli.require_figure("--out", out)
    run = _cli.open_store(args.runs / f"motivation-{args.data}.zarr", "fedstat.motivation")
    figure = plot.fig1(run)
    figure.supxlabel(plot.motivation_origin(run), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
