"""FedFac Fig. 10: feature maps of the personal and the shared filters of one convolution, FedAvg's beside them.

Reads runs of FedFac in which a convolution is split and of FedAvg with the same network, and a client's test image.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import _features as features
import numpy as np
import torch
import xarray as xr
from _stores import RUNS, figure_path
from numpy.typing import NDArray
from torch import Tensor

import fedstat
from fedstat import _cli
from fedstat.data import to_float
from fedstat.fl import nets
from fedstat.fl.nets import Net
from fedstat.plot._figure import caption
from fedstat.study import collect, experiment, run_settings, run_table


def main(argv: Sequence[str] | None = None) -> int:
    cli = _cli.Parser(description=__doc__.splitlines()[0])
    cli.add_argument("--runs", type=Path, nargs="+", default=[RUNS / "fedfac-quick"], help="folders of stores")
    cli.add_argument("--data-dir", type=Path, help="folder of the data sets' files (default $FEDSTAT_DATA)")
    cli.add_argument("--scenario", help="scenario (default: the first one with a split convolution)")
    cli.add_argument("--layer", help="convolution (default: the first that is split)")
    cli.add_argument("--client", type=int, default=0, help="whose model (default 0)")
    cli.add_argument("--image", type=int, default=0, help="number among the client's test images (default 0)")
    cli.add_argument("--out", type=Path, help="figure to write (default paper_figs/fig10-<folder>.png)")
    return _cli.run(cli, work, argv)


def work(args: argparse.Namespace) -> None:
    out = figure_path(args.out, f"fig10-{args.runs[0].name}")
    fedfac, fedavg, layer = pair(args)
    _cli.save_figure(draw(fedfac, fedavg, layer, args), out, dpi=130)


def pair(args: argparse.Namespace) -> tuple[xr.DataTree, xr.DataTree, str]:
    """First run of FedFac with a split convolution, FedAvg's of the same seed and network, and that layer."""
    runs = [fedstat.open_run(p) for folder in args.runs for p in collect.stores(folder)]
    runs = [r for r in runs if "ended" in r.attrs and "weights" in r.children]
    same = ("data", "partition", "shapes", "seed")
    for fedfac in (r for r in runs if run_table.config_of(r)["algorithm"] == "fedfac-dynamic"):
        for fedavg in (r for r in runs if run_table.config_of(r)["algorithm"] == "fedavg"):
            if args.scenario not in (None, run_table.config_of(fedfac)["scenario"]):
                continue
            if all(run_table.config_of(fedavg)[key] == run_table.config_of(fedfac)[key] for key in same):
                for layer in split_convolutions(fedfac):
                    if args.layer in (None, layer):
                        return fedfac, fedavg, layer
    raise ValueError(
        "no run of FedFac in which a convolution has shared and personal filters, with a run of FedAvg of the same "
        "data, network and seed. Run fedfac-dynamic with layers=conv1, say, and fedavg."
    )


def split_convolutions(run: xr.DataTree) -> Iterator[str]:
    for name, shape in run_table.config_of(run)["shapes"].items():
        layer = nets.layer_of(name)
        if len(shape) == 4 and 0 < run[f"split/{layer}/shared"].isel(round=-1).mean() < 1:
            yield layer


def side_by_side(
    fedfac: xr.DataTree, fedavg: xr.DataTree, net: Net, layer: str, x: Tensor, *, client: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Feature maps of one image by FedFac's and by FedAvg's model of a client, and FedFac's split.

    Parameters
    ----------
    fedfac, fedavg : DataTree
        Runs that keep the weights of all layers.
    net : Net
        Network of both.
    layer : str
        A convolution that FedFac splits.
    x : Tensor (channel, row, column)
    client : int

    Returns
    -------
    fedfac, fedavg : array (unit, row, column)
    shared : bool array (unit,)
        Units that are shared after FedFac's last round.
    """
    maps = [
        features.feature_maps(net, features.stored(run, net.shapes, client=client), layer, x.unsqueeze(0))[0]
        for run in (fedfac, fedavg)
    ]
    return maps[0], maps[1], fedfac[f"split/{layer}/shared"].isel(round=-1).to_numpy()


def draw(fedfac: xr.DataTree, fedavg: xr.DataTree, layer: str, args: argparse.Namespace) -> Any:
    settings, same = run_table.config_of(fedfac), run_settings.Settings(**experiment.noted(fedfac.attrs))
    fed, _ = experiment.federated(same, args.data_dir)
    own = (fed["client"].to_numpy() == args.client) & (fed["split"].to_numpy() == "test")
    images = to_float(fed.isel(sample=own)).x.to_numpy()
    if not 0 <= args.image < len(images):
        raise ValueError(
            f"--image must be from 0 to {len(images) - 1}, for client {args.client} has {len(images)} test images, "
            f"but got {args.image}"
        )
    x = images[args.image]
    net = experiment.network(same, fed)
    *maps, shared = side_by_side(fedfac, fedavg, net, layer, torch.from_numpy(x), client=args.client)
    figure = features.feature_grid((x - x.min()) / (x.max() - x.min()), *maps, shared)
    attrs = fedfac.attrs
    filters = f"{int(shared.sum())} of {len(shared)} filters are shared"
    caption(
        figure,
        f"{settings['scenario']}, {layer}: {filters}; client {args.client}, its test image {args.image}",
        f"{collect.scale(settings)}; seed {settings['seed']}; commit {attrs['revision'] or 'not known'}",
        "image as the clients get it, standardized by their training images; every map has its own gray scale",
    )
    return figure


if __name__ == "__main__":
    sys.exit(main())
