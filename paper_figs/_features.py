"""Feature maps of one client's convolutions, computed and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from fedstat._utils import check
from fedstat._utils.lazy import torch, xr
from fedstat.fl import checkpoints, nets
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def feature_maps(net: Net, params: Params, layer: str, x: Tensor) -> NDArray[np.float64]:
    """Direct output of a convolution for some samples.

    Parameters
    ----------
    net : Net
    params : dict of Tensor (client, ...)
        Parameters of one client: client = 1.
    layer : str
        A convolution of the network.
    x : Tensor (sample, channel, row, column)

    Returns
    -------
    array (sample, unit, row, column)

    Raises
    ------
    ValueError
        If the network has no such layer, or the layer is not a convolution.

    Notes
    -----
    The network runs as it is, and the output of the convolution with this layer's weights is recorded, so that
    everything before it (normalization, pooling, shortcuts) is included.
    """
    check.choice("layer", layer, list(nets.layers(net)))
    with torch.no_grad(), _Watch(params[f"{layer}.weight"]) as watch:
        net.apply(params, x.unsqueeze(0))
    if watch.seen is None:
        raise ValueError(f"layer must be a convolution, but got {layer!r}, which is not one")
    return np.asarray(watch.seen.double())


class _Watch(TorchFunctionMode):
    """Records the result of the 2-d convolution that uses the memory of the given weights."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._memory = weight.untyped_storage().data_ptr()
        self.seen: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and record what a convolution with these weights returns."""
        result = func(*args, **(kwargs or {}))
        if func is torch.conv2d and args[1].untyped_storage().data_ptr() == self._memory:
            self.seen = result
        return result


def stored(run: xr.DataTree, shapes: Mapping[str, Sequence[int]], *, client: int, checkpoint: int = -1) -> Params:
    """Parameters of one client, as stored in a run.

    Parameters
    ----------
    run : DataTree
    shapes : mapping from "layer.parameter" to shape
        ``shapes`` of the run's network.
    client : int
    checkpoint : int
        Position of the checkpoint; the last one by default.

    Returns
    -------
    dict of Tensor (1, ...)

    Raises
    ------
    ValueError
        If the run lacks the weights of a layer.
    """
    there = list(run["weights"].children) if "weights" in run.children else []
    missing = [layer for layer in dict.fromkeys(map(nets.layer_of, shapes)) if layer not in there]
    if missing:
        raise ValueError(
            f"the run must hold the weights of all layers, but it lacks {', '.join(missing)} and has {there}"
        )
    params = {}
    for name, shape in shapes.items():
        values = run[f"weights/{nets.layer_of(name)}/{checkpoints.variable(name)}"]
        params[name] = torch.from_numpy(values.isel(checkpoint=checkpoint, client=client).to_numpy()).reshape(1, *shape)
    return params


def feature_grid(
    image: NDArray[Any], fedfac: NDArray[Any], fedavg: NDArray[Any], shared: NDArray[np.bool_], *, units: int = 8
) -> Figure:
    """Feature maps of personal and shared filters, with those of FedAvg's same filters beside (FedFac Fig. 10).

    Parameters
    ----------
    image : array (row, column) or (channel, row, column)
        Values in [0, 1].
    fedfac, fedavg : array (unit, row, column)
        Output of one convolution of both networks.
    shared : bool array (unit,)
        FedFac's split of that layer.
    units : int
        Largest number of filters of each kind to show: those whose maps vary most in FedFac.

    Returns
    -------
    matplotlib Figure
        Four rows: personal filters of FedFac, the same filters in FedAvg, shared filters of FedFac, the same in
        FedAvg. Every map has its own gray scale.

    Raises
    ------
    ValueError
        If the layer has filters of one kind only.
    """
    if shared.all() or not shared.any():
        kind = "shared" if shared.all() else "personal"
        raise ValueError(f"the layer must have shared and personal filters, but all {len(shared)} are {kind}")
    spread = fedfac.std(axis=(1, 2))
    chosen = {kind: _most(spread, flags, units) for kind, flags in {"personal": ~shared, "shared": shared}.items()}
    columns = max(map(len, chosen.values()))
    figure = plt.figure(figsize=(1.25 * columns + 2.6, 5.6), layout="constrained")
    grid = figure.add_gridspec(4, columns + 2)
    big = figure.add_subplot(grid[1:3, :2])
    big.imshow(image if image.ndim == 2 else np.moveaxis(image, 0, -1).squeeze(), cmap="gray", vmin=0, vmax=1)
    big.set_title("image", fontsize="medium")
    big.set(xticks=[], yticks=[])
    rows = [(kind, name, maps) for kind in chosen for name, maps in (("FedFac", fedfac), ("FedAvg", fedavg))]
    for i, (kind, name, maps) in enumerate(rows):
        for j, unit in enumerate(chosen[kind]):
            ax = figure.add_subplot(grid[i, j + 2])
            ax.imshow(maps[unit], cmap="gray", interpolation="nearest")
            ax.set(xticks=[], yticks=[])
            if name == "FedFac":
                ax.set_title(f"filter {unit}", fontsize="x-small", pad=2)
            if j == 0:
                where = kind if name == "FedFac" else "same filters"
                ax.set_ylabel(f"{name}\n{where}", fontsize="small")
    return figure


def _most(spread: NDArray[Any], flags: NDArray[np.bool_], units: int) -> NDArray[np.int64]:
    """Units of a kind whose maps vary most, in order of their numbers."""
    here = np.flatnonzero(flags)
    return np.sort(here[np.argsort(-spread[here], kind="stable")[:units]])
