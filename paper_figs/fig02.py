"""FedFac Fig. 2: entropy over clients of every hidden neuron's outputs, IID and non-IID.

Left as in the paper, a neuron's output being its mean over the client's own samples; right over a common evaluation
set. Reads the store that `make figures` keeps under runs/.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt

import fedstat
from fedstat import plot


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--data", default="digits", help="data set of the study (default digits)")
    cli.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the stores (default runs)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig02-<data>.png)")
    args = cli.parse_args()
    run = fedstat.open_run(args.runs / f"motivation-{args.data}.zarr")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for ax, (outputs, title) in zip(
        axes, {"own": "each client's own samples", "common": "a common evaluation set"}.items(), strict=True
    ):
        plot.entropies(run["dispersion"].to_dataset().sel(outputs=outputs), ax=ax).set_title(f"outputs over {title}")
    figure.supxlabel(plot.motivation_origin(run), fontsize="x-small", color="0.4")
    out = args.out or Path("paper_figs") / f"fig02-{args.data}.png"
    figure.savefig(out, dpi=110)
    print(out)


if __name__ == "__main__":
    main()
