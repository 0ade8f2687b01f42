"""Stored parameters of one client, and feature maps: what its convolutions make of samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from fedstat._utils import check
from fedstat._utils.lazy import torch, xr
from fedstat.fl import nets, record
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
    everything before it (normalisation, pooling, shortcuts) is included.
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
        values = run[f"weights/{nets.layer_of(name)}/{record.variable(name)}"]
        params[name] = torch.from_numpy(values.isel(checkpoint=checkpoint, client=client).to_numpy()).reshape(1, *shape)
    return params
