"""Masks: one boolean tensor per parameter, True where an entry is shared, that is averaged over clients.

Algorithms make the masks: FedFac shares units that other units explain or, with ``estimator="icc"``, units on which
clients agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedstat._utils import check, labels
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, InitContext, Mask, SharedMask
from fedstat.fl.nets import Net

__all__ = [
    "by_all",
    "by_depth",
    "by_some",
    "device_of",
    "given_layers",
    "incoming",
    "initial",
    "keep_layers",
    "keep_parameters",
    "last_layers",
    "of_clients",
    "of_layers",
    "require_layer",
    "require_mask",
    "resolve",
    "share_all",
    "share_all_but",
    "share_none",
    "shared_units",
    "units",
    "without",
]


def __dir__() -> list[str]:
    return __all__


Layers = str | int | Sequence[str | int]
"""Names of layers, or the paper's Λ: their numbers from 1."""


def share_all(net: Net, device: torch.device) -> Mask:
    """Return a mask that shares every entry, except parameters that no algorithm shares (``net.unshared``)."""
    return {name: torch.tensor(name not in net.unshared, device=device) for name in net.shapes}


def share_none(net: Net, device: torch.device) -> Mask:
    """Return a mask that shares no entry."""
    return {name: torch.tensor(False, device=device) for name in net.shapes}


def initial(algorithm: Algorithm, context: InitContext) -> SharedMask:
    """Return an algorithm's mask before the first round, by default by :func:`share_all`."""
    if algorithm.init_mask is None:
        return SharedMask(share_all(context.net, context.device))
    return algorithm.init_mask(context)


def share_all_but(net: Net, layers: Sequence[str], device: torch.device) -> Mask:
    """Return a mask that shares all layers but the named ones."""
    named = [require_layer(net, layer) for layer in layers]
    return units(net, {layer: np.zeros(nets.layers(net)[layer], dtype=bool) for layer in named}, device)


def without(mask: Mask, is_personal: Callable[[str], bool]) -> Mask:
    """Return a mask that also makes personal all parameters whose names ``is_personal`` accepts."""
    return {name: shared.new_zeros(()) if is_personal(name) else shared for name, shared in mask.items()}


def keep_layers(layers: Callable[[Net], Sequence[str]]) -> Callable[[InitContext], SharedMask]:
    """Make the ``init_mask`` of a method whose clients keep the layers that ``layers`` names, and share all others."""
    return lambda context: SharedMask(share_all_but(context.net, layers(context.net), context.device))


def keep_parameters(is_personal: Callable[[str], bool]) -> Callable[[InitContext], SharedMask]:
    """Make the ``init_mask`` of a method whose clients keep the parameters of some names, and share all others."""
    return lambda context: SharedMask(without(share_all(context.net, context.device), is_personal))


def by_depth(net: Net) -> list[list[str]]:
    """Layers in the order in which papers count them, each with the shortcut beside it: "shortcut4" beside "conv4"."""
    names = list(nets.layers(net))
    shortcuts = {layer.replace("shortcut", "conv"): layer for layer in names if layer.startswith("shortcut")}
    counted = [layer for layer in names if layer not in shortcuts.values()]
    return [[layer, shortcuts[layer]] if layer in shortcuts else [layer] for layer in counted]


def last_layers(net: Net, name: str, number: int, *, all_too: bool = False) -> list[str]:
    """Return the names of the last ``number`` layers; ValueError, naming the argument ``name``, if none is left."""
    depths = by_depth(net)
    highest = len(depths) - (not all_too)
    if highest == 0:
        raise ValueError(f"the network's only layer is {depths[0][0]!r}: {name} leaves none to share. Use local().")
    check.integer(name, number, high=highest)
    return [layer for group in depths[len(depths) - number :] for layer in group]


def device_of(mask: Mask) -> torch.device:
    """Return the device of a mask."""
    return next(iter(mask.values())).device


def units(net: Net, shared: Mapping[Any, Any], device: torch.device, *, weights_only: bool = False) -> Mask:
    """Return a mask that shares the given units, and everything outside the layers of ``shared``.

    Parameters
    ----------
    net : Net
    shared : mapping from layer (name, or number from 1) to bool array, Series, DataArray (unit,) or mapping from unit
        True shares a unit's incoming weights, bias and normalization parameters, except parameters in
        ``net.unshared``.
    device : torch.device
    weights_only : bool
        Share only incoming weights in these layers; biases and normalization parameters stay personal.

    Raises
    ------
    ValueError
        If a layer is not in the network, the number of units differs, or only some units are shared in a layer that
        has a parameter without an axis of units (``net.undivided``).
    """
    sizes = nets.layers(net)
    shared = {require_layer(net, layer): flags for layer, flags in shared.items()}
    shared |= {
        layer: labels.matched(f"the split of layer {layer!r}", flags, {"unit": np.arange(sizes[layer])})
        for layer, flags in shared.items()
        if labels.has_labels(flags)
    }
    for layer, flags in shared.items():
        check.unmasked(f"the split of layer {layer!r}", flags)
        if getattr(flags, "ndim", 1) != 1 or not _boolean(flags):
            raise ValueError(
                f"the split of layer {layer!r} must be one bool per unit, but got {np.asarray(flags).dtype} values of "
                f"shape {np.shape(flags)}. Make one from communalities with fedstat.split(...).shared."
            )
        if len(flags) != sizes[layer]:
            raise ValueError(f"layer {layer!r} has {sizes[layer]} units, but the split has {len(flags)}")
    mask = share_all(net, device)
    for name, shape in net.shapes.items():
        if (layer := nets.layer_of(name)) in shared:
            values = shared[layer]
            flags = torch.as_tensor(values if isinstance(values, torch.Tensor) else np.asarray(values), device=device)
            if name in net.undivided and flags.any() and not flags.all():
                raise ValueError(
                    f"layer {layer!r} cannot be split by unit: {name!r}, of shape {shape}, has no axis of units. "
                    "Share all of it or nothing, or split the network without such factors."
                )
            stays = name in net.unshared or (weights_only and name not in incoming(net, layer))
            by_unit = torch.zeros_like(flags) if stays else flags
            mask[name] = by_unit.all() if name in net.undivided else by_unit.view(-1, *(1,) * (len(shape) - 1))
    return mask


def incoming(net: Net, layer: str) -> list[str]:
    """Return a layer's parameters that hold incoming weights of units: names that begin with "<layer>.weight"."""
    return [name for name in net.shapes if name.startswith(f"{layer}.weight")]


def of_layers(net: Net, layers: Sequence[str]) -> list[str]:
    """Return the parameters of the given layers, and parameters that no algorithm shares."""
    return [name for name in net.shapes if nets.layer_of(name) in layers or name in net.unshared]


def given_layers(layers: Layers | None) -> list[str | int] | None:
    """Return layers as a list without repetition, before the network is known; ValueError if the list is empty."""
    if layers is None:
        return None
    is_single = isinstance(layers, str) or not isinstance(layers, Iterable)
    unique: list[str | int] = [layers] if is_single else list(dict.fromkeys(layers))  # type: ignore[list-item, arg-type]
    if not unique:
        raise ValueError("layers must name at least one layer to split, but got none. Without one, use fedavg().")
    return unique


def resolve(net: Net, layers: Layers | None) -> list[str]:
    """Return the names of the layers in Λ.

    Parameters
    ----------
    net : Net
    layers : str, int or sequence of these, optional
        Names, or numbers from 1 as in the paper's Λ, which do not count a ResNet's shortcuts. None is the last hidden
        layer, just before the output layer.

    Raises
    ------
    ValueError
        If a layer is not in the network; the message names the network's layers.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> net = nets.mlp([4, 6, 5, 3])
    >>> resolve(net, (1, "fc3")), resolve(net, None)
    (['fc1', 'fc3'], ['fc2'])
    """
    unique = given_layers(layers)
    if unique is None:
        return by_depth(net)[-2:][0][:1]
    return list(dict.fromkeys(require_layer(net, layer) for layer in unique))


def _boolean(flags: Any) -> bool:
    return bool(flags.dtype == torch.bool if isinstance(flags, torch.Tensor) else np.asarray(flags).dtype == bool)


def require_layer(net: Net, layer: str | int) -> str:
    """Return a layer's name, given the name or the number from 1; ValueError if there is no such layer."""
    names, counted = list(nets.layers(net)), by_depth(net)
    if layer in names:
        return str(layer)
    if isinstance(layer, int) and not isinstance(layer, bool) and 1 <= layer <= len(counted):
        return counted[layer - 1][0]
    raise ValueError(
        f"layers to split must be among {names}, but got {layer!r:.200}. They may also be given by number, "
        f"1 to {len(counted)}.{check.did_you_mean(layer, names)}"
    )


def shared_units(net: Net, mask: Mask, layer: str) -> torch.Tensor:
    """Return the shared units of a layer: bool (unit,).

    A unit is shared if all of its incoming weights are shared by all clients. In a layer without weights the first
    parameter decides.
    """
    names = incoming(net, layer) or [n for n in net.shapes if nets.layer_of(n) == layer][:1]
    shared = torch.ones(nets.layers(net)[layer], dtype=torch.bool, device=device_of(mask))
    for name in names:
        rank = len(net.shapes[name])
        by_entry = by_all(mask[name], rank)
        by_row = by_entry.ndim == rank and name not in net.undivided
        shared = shared & (by_entry.reshape(len(by_entry), -1).all(1) if by_row else by_entry.all())
    return shared


def of_clients(mask: torch.Tensor, rank: int, clients: np.ndarray) -> torch.Tensor:
    """Return rows of some clients in one parameter's mask; the mask itself if all clients have one mask.

    Parameters
    ----------
    mask : bool Tensor
        Broadcasts against (client, *shape), all clients.
    rank : int
        Length of ``shape``.
    clients : int array (k,)

    Returns
    -------
    bool Tensor
        Broadcasts against (k, *shape).
    """
    return mask[clients] if mask.ndim > rank and len(mask) > 1 else mask


def by_some(mask: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a mask of entries that at least one client shares; it broadcasts against a shape of ``rank`` dims."""
    return mask.any(0) if mask.ndim > rank else mask


def by_all(mask: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a mask of entries that all clients share; it broadcasts against a shape of ``rank`` dims."""
    return mask.all(0) if mask.ndim > rank else mask


def require_mask(net: Net, mask: Mask, clients: int, where: str) -> None:
    """Raise ValueError, naming ``where`` and the parameter, unless every parameter has a mask that fits."""
    if not isinstance(mask, Mapping):
        raise ValueError(f"{where} must have a dict of masks by parameter, but got {type(mask).__name__}")
    if unknown := [name for name in mask if name not in net.shapes]:
        raise ValueError(
            f"{where} has masks of {unknown}, but the network has {list(net.shapes)}."
            f"{check.did_you_mean(unknown[0], net.shapes)}"
        )
    missing = [name for name in net.shapes if name not in mask]
    for name, shape in net.shapes.items():
        if name in missing:
            nor_of = f" (nor of {', '.join(map(repr, missing[1:]))})" if len(missing) > 1 else ""
            raise ValueError(
                f"{where} has no mask of {name!r}, of shape {shape}{nor_of}. A mask is needed for every "
                "parameter: torch.tensor(True) shares one, torch.tensor(False) makes it personal. Begin with "
                "masks.share_all(context.net, context.device), and change some."
            )
        tensor, full_shape = mask[name], (clients, *shape)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.bool:
            kind = f"{tensor.dtype} values" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{where}: the mask of {name!r} must be a bool Tensor, but got {kind}")
        shape_given = tuple(tensor.shape)
        fits = zip(shape_given[::-1], full_shape[::-1], strict=False)
        if len(shape_given) > len(full_shape) or any(n not in (1, size) for n, size in fits):
            raise ValueError(
                f"{where}: the mask of {name!r} must broadcast against (client, *shape) = {full_shape}, but has "
                f"shape {shape_given}. One bool per unit has shape {(shape[0], *(1,) * (len(shape) - 1))}."
            )
