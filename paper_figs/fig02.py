"""FedFac Fig. 2: entropy over clients of every hidden neuron's outputs, IID and non-IID.

Left as in the paper, a neuron's output being its mean over the client's own samples; right over a common evaluation
set. Reads the store that `make figures` keeps under runs/.
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
    cli.add_argument("--data", default="digits", help="data set of the study (default digits)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig02-<data>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = args.out or Path("paper_figs") / f"fig02-{args.data}.png"
    _cli.require_figure("--out", out)
    run = _cli.open_store(args.runs / f"motivation-{args.data}.zarr", "fedstat.motivation")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for ax, (outputs, title) in zip(
        axes, {"own": "each client's own samples", "common": "a common evaluation set"}.items(), strict=True
    ):
        plot.entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=ax).set_title(f"outputs over {title}")
    figure.supxlabel(plot.motivation_origin(run), fontsize="x-small", color="0.4")
    _cli.save_figure(figure, out, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
