"""Which entries are shared, as one boolean tensor per parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedstat.fl import nets
from fedstat.fl.algorithm import Mask
from fedstat.fl.nets import Net


def everything(net: Net, device: torch.device) -> Mask:
    """Mask that shares every entry."""
    return {name: torch.tensor(True, device=device) for name in net.shapes}


def nothing(net: Net, device: torch.device) -> Mask:
    """Mask that shares no entry."""
    return {name: torch.tensor(False, device=device) for name in net.shapes}


def units(net: Net, shared: Mapping[str, Any], device: torch.device) -> Mask:
    """Mask that shares the given units and everything outside the layers named.

    Parameters
    ----------
    net : Net
    shared : mapping from layer to bool array (unit,)
        True: the unit's incoming weights, bias and normalisation parameters are shared, together.
    device : torch.device

    Raises
    ------
    ValueError
        If a layer is not in the network or the number of units differs.
    """
    sizes = nets.layers(net)
    for layer, flags in shared.items():
        require_layer(net, layer)
        if getattr(flags, "ndim", 1) != 1 or not _boolean(flags):
            raise ValueError(
                f"the split of layer {layer!r} must be one bool per unit, but got {np.asarray(flags).dtype} values of "
                f"shape {np.shape(flags)}. Of communalities make it with fedstat.split(...).shared."
            )
        if len(flags) != sizes[layer]:
            raise ValueError(f"layer {layer!r} has {sizes[layer]} units, but the split names {len(flags)}")
    mask = everything(net, device)
    for name, shape in net.shapes.items():
        if (layer := nets.layer_of(name)) in shared:
            given = shared[layer]
            flags = torch.as_tensor(given if isinstance(given, torch.Tensor) else np.asarray(given), device=device)
            mask[name] = flags.view(-1, *(1,) * (len(shape) - 1))
    return mask


def layer_names(layers: str | Sequence[str]) -> list[str]:
    """Names of layers as a list without repetition, or ValueError if there is none."""
    names = [layers] if isinstance(layers, str) else list(dict.fromkeys(layers))
    if not names:
        raise ValueError("layers must name at least one layer to split, but got none. Without one, use fedavg().")
    return names


def _boolean(flags: Any) -> bool:
    return bool(flags.dtype == torch.bool if isinstance(flags, torch.Tensor) else np.asarray(flags).dtype == bool)


def require_layer(net: Net, layer: str) -> str:
    """Return the layer's name if the network has it, or raise ValueError."""
    if layer not in nets.layers(net):
        raise ValueError(f"layers to split must be among {list(nets.layers(net))}, but got {layer!r}")
    return layer


def shared_units(net: Net, mask: Mask, layer: str) -> torch.Tensor:
    """Which units of a layer are shared: bool (unit,)."""
    name = next(n for n in net.shapes if nets.layer_of(n) == layer)
    return mask[name].flatten().expand(net.shapes[name][0])
