"""FedFac Fig. 10: feature maps of the personal and the shared filters of one convolution, FedAvg's beside them.

Reads runs of FedFac in which a convolution is split and of FedAvg with the same network, and one image of the data.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

import fedstat
from fedstat import data, plot
from fedstat.fl import nets
from fedstat.fl.study import features, show, summary


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, nargs="+", default=[Path("runs/fedfac-quick")], help="folders of stores")
    cli.add_argument("--data-dir", type=Path, help="folder of the data sets' files (default $FEDSTAT_DATA)")
    cli.add_argument("--label", help="setting (default: the first one with a split convolution)")
    cli.add_argument("--layer", help="convolution (default: the first that is split)")
    cli.add_argument("--client", type=int, default=0, help="whose model (default 0)")
    cli.add_argument(
        "--image", type=int, default=0, help="number among the test images, or all where there are none (default 0)"
    )
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig10-<folder>.png)")
    args = cli.parse_args()
    try:
        fedfac, fedavg, layer = pair(args)
        figure = draw(fedfac, fedavg, layer, args)
    except (FileNotFoundError, ValueError) as error:
        cli.error(str(error))
    out = args.out or Path("paper_figs") / f"fig10-{args.runs[0].name}.png"
    figure.savefig(out, dpi=130)
    print(out)


def pair(args: argparse.Namespace) -> tuple[xr.DataTree, xr.DataTree, str]:
    """First run of FedFac with a split convolution, FedAvg's of the same seed and network, and that layer."""
    runs = [fedstat.open_run(p) for folder in args.runs for p in summary.stores(folder)]
    runs = [r for r in runs if "ended" in r.attrs and "weights" in r.children]
    same = ("data", "partition", "shapes", "seed")
    for fedfac in (r for r in runs if config(r)["algorithm"] == "fedfac-dynamic"):
        for fedavg in (r for r in runs if config(r)["algorithm"] == "fedavg"):
            if args.label not in (None, config(fedfac)["label"]):
                continue
            if all(config(fedavg)[key] == config(fedfac)[key] for key in same):
                for layer in split_convolutions(fedfac):
                    if args.layer in (None, layer):
                        return fedfac, fedavg, layer
    raise ValueError(
        "no run of FedFac in which a convolution has shared and personal filters, with a run of FedAvg of the same "
        "data, network and seed. Run fedfac-dynamic with layers=conv1, say, and fedavg."
    )


def config(run: xr.DataTree) -> dict[str, Any]:
    return dict(json.loads(run.attrs["config"]))


def split_convolutions(run: xr.DataTree) -> Iterator[str]:
    for name, shape in config(run)["shapes"].items():
        layer = nets.layer_of(name)
        if len(shape) == 4 and 0 < run[f"split/{layer}/shared"].isel(round=-1).mean() < 1:
            yield layer


def draw(fedfac: xr.DataTree, fedavg: xr.DataTree, layer: str, args: argparse.Namespace) -> Any:
    settings = config(fedfac)
    images = data.load(settings["data"], args.data_dir)
    values, scale = images.x.values, images.x.attrs["scale"]
    test = np.flatnonzero(images["split"].to_numpy() == "test")
    shown = test if len(test) else np.arange(len(values))  # some sets have no test split of their own
    if not 0 <= args.image < len(shown):
        raise ValueError(f"--image must be from 0 to {len(shown) - 1}, but got {args.image}")
    train = values[images["split"].to_numpy() == "train"] / scale
    mean, sd = train.mean((0, 2, 3)), train.std((0, 2, 3))
    raw = values[shown[args.image]] / scale
    x = torch.from_numpy(((raw - mean[:, None, None]) / sd[:, None, None]).astype(np.float32))
    outputs = list(settings["shapes"].values())[-1][0]
    norm = {"norm": settings["norm"]} if settings["norm"] else {}
    net = nets.named(settings["net"], tuple(raw.shape), outputs, width=settings["width"], **norm)
    maps = [
        features.feature_maps(net, features.stored(run, net.shapes, client=args.client), layer, x.unsqueeze(0))[0]
        for run in (fedfac, fedavg)
    ]
    shared = fedfac[f"split/{layer}/shared"].isel(round=-1).to_numpy()
    figure = plot.feature_grid(raw, *maps, shared)
    attrs = fedfac.attrs
    filters = f"{int(shared.sum())} of {len(shared)} filters are shared"
    lines = [
        f"{settings['label']}, {layer}: {filters}; client {args.client}, image {args.image}",
        *textwrap.wrap(
            f"{show.scale(settings)}; seed {settings['seed']}; commit {attrs['revision'] or 'not known'}", 110
        ),
        "image standardised by the training images of the whole data set; every map has its own grey scale",
    ]
    figure.supxlabel("\n".join(lines), fontsize="x-small", color="0.4")
    return figure


if __name__ == "__main__":
    main()
