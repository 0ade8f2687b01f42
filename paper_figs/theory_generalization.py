"""Theorem 2 of FedFac §3.3 against the test loss: store -> figure. The paper has no such figure.

Usage: python paper_figs/theory_generalization.py --scale quick
"""

from __future__ import annotations

import argparse
from pathlib import Path

import xarray as xr
from matplotlib.figure import Figure

from fedstat.ntk import GeneralizationResult
from fedstat.ntk.__main__ import main as check
from fedstat.plot import ntk as plot

HERE = Path(__file__).parent
SCALES = {
    "quick": ["--widths", "128", "--rounds", "60", "--replicates", "2"],
    "paper": ["--widths", "1024", "--rounds", "500", "--replicates", "5"],
}
DIGITS = ["--theorem", "2", "--data", "digits", "--partition", "iid", "--n-test", "30"]
PANELS = {
    "clients": [*DIGITS, "--clients", "1", "2", "5", "10", "20", "--n", "30"],
    "n": [*DIGITS, "--clients", "4", "--n", "20", "50", "100", "200", "400"],
}
TITLES = {"clients": "digits, 600 samples cut into C clients", "n": "digits, 4 clients of n samples"}


def store(x: str, scale: str, folder: Path) -> Path:
    """Path of the panel's run, made first if absent."""
    path = folder / f"theory_generalization_{x}_{scale}.zarr"
    if not path.exists() and check([*PANELS[x], *SCALES[scale], "--out", str(path)]):
        raise SystemExit(f"no store at {path}, and the run that makes it failed")
    return path


def main() -> None:
    """Read (or make) the stores and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", choices=SCALES, default="quick")
    parser.add_argument("--runs", type=Path, default=HERE.parent / "runs", help="folder of the stores")
    parser.add_argument("--out", type=Path, help="figure to write")
    args = parser.parse_args()
    figure = Figure(figsize=(10, 4), layout="constrained")
    for x, ax in zip(PANELS, figure.subplots(1, len(PANELS)), strict=True):
        tree = xr.open_datatree(store(x, args.scale, args.runs), engine="zarr", consolidated=False)
        result = GeneralizationResult.from_datatree(tree)
        plot.generalization(result, x=x, ax=ax).set_title(TITLES[x])
        print(result.summary(), end="\n\n")
    out = args.out or HERE / f"theory_generalization-{args.scale}.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    print(f"saved {out}")


if __name__ == "__main__":
    main()
