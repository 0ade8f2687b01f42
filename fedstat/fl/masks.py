"""Masks: one boolean tensor per parameter, True where an entry is shared, that is averaged over clients.

Algorithms decide which entries these are: FedFac shares the units that the other units explain or, with
``estimator="icc"``, those on which clients agree.
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

Layers = str | int | Sequence[str | int]
"""Names of layers, or the paper's Λ: their numbers from 1."""


def share_all(net: Net, device: torch.device) -> Mask:
    """Mask that shares every entry but those that no algorithm shares (``net.unshared``)."""
    return {name: torch.tensor(name not in net.unshared, device=device) for name in net.shapes}


def share_none(net: Net, device: torch.device) -> Mask:
    """Mask that shares no entry."""
    return {name: torch.tensor(False, device=device) for name in net.shapes}


def initial(algorithm: Algorithm, context: InitContext) -> SharedMask:
    """Return an algorithm's mask before the first round, by default that of :func:`share_all`."""
    if algorithm.init_mask is None:
        return SharedMask(share_all(context.net, context.device))
    return algorithm.init_mask(context)


def private_layers(net: Net, layers: Sequence[str], device: torch.device) -> Mask:
    """Mask that shares everything but the given layers."""
    named = [require_layer(net, layer) for layer in layers]
    return units(net, {layer: np.zeros(nets.layers(net)[layer], dtype=bool) for layer in named}, device)


def without(mask: Mask, is_personal: Callable[[str], bool]) -> Mask:
    """Return a mask that also leaves to the clients the parameters for whose names ``is_personal`` returns True."""
    return {name: shared.new_zeros(()) if is_personal(name) else shared for name, shared in mask.items()}


def keep_layers(layers: Callable[[Net], Sequence[str]]) -> Callable[[InitContext], SharedMask]:
    """Make the ``init_mask`` of a method whose clients keep the layers that ``layers`` names, and share all others."""
    return lambda context: SharedMask(private_layers(context.net, layers(context.net), context.device))


def keep_parameters(is_personal: Callable[[str], bool]) -> Callable[[InitContext], SharedMask]:
    """Make the ``init_mask`` of a method whose clients keep the parameters of some names, and share all others."""
    return lambda context: SharedMask(without(share_all(context.net, context.device), is_personal))


def by_depth(net: Net) -> list[list[str]]:
    """Layers in the order in which papers count them, each with the shortcut beside it: "shortcut4" beside "conv4"."""
    every = list(nets.layers(net))
    beside = {layer.replace("shortcut", "conv"): layer for layer in every if layer.startswith("shortcut")}
    counted = [layer for layer in every if layer not in beside.values()]
    return [[layer, beside[layer]] if layer in beside else [layer] for layer in counted]


def last_layers(net: Net, name: str, number: int, *, all_too: bool = False) -> list[str]:
    """Names of the last ``number`` layers; ValueError, naming the argument ``name``, if no layer is left."""
    depths = by_depth(net)
    most = len(depths) - (not all_too)
    if most == 0:
        raise ValueError(f"the network's only layer is {depths[0][0]!r}: {name} leaves none to share. Use local().")
    check.integer(name, number, high=most)
    return [layer for beside in depths[len(depths) - number :] for layer in beside]


def device_of(mask: Mask) -> torch.device:
    """Device of a mask."""
    return next(iter(mask.values())).device


def units(net: Net, shared: Mapping[Any, Any], device: torch.device, *, weights_only: bool = False) -> Mask:
    """Mask that shares the given units and everything outside the layers named.

    Parameters
    ----------
    net : Net
    shared : mapping from layer (name, or number from 1) to bool array, Series, DataArray (unit,) or mapping from unit
        True shares a unit's incoming weights, bias and normalisation parameters, except those in ``net.unshared``.
    device : torch.device
    weights_only : bool
        Share no more than incoming weights in these layers; biases and normalisation stay with the client.

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
            given = shared[layer]
            flags = torch.as_tensor(given if isinstance(given, torch.Tensor) else np.asarray(given), device=device)
            if name in net.undivided and flags.any() and not flags.all():
                raise ValueError(
                    f"layer {layer!r} cannot be split by unit: {name!r}, of shape {shape}, has no axis of units. "
                    "Share it as a whole or not at all, or split the network without such factors."
                )
            stays = name in net.unshared or (weights_only and name not in incoming(net, layer))
            own = torch.zeros_like(flags) if stays else flags
            mask[name] = own.all() if name in net.undivided else own.view(-1, *(1,) * (len(shape) - 1))
    return mask


def incoming(net: Net, layer: str) -> list[str]:
    """Parameters of a layer that hold its units' incoming weights: names that begin with "<layer>.weight"."""
    return [name for name in net.shapes if name.startswith(f"{layer}.weight")]


def of_layers(net: Net, layers: Sequence[str]) -> list[str]:
    """Parameters of the given layers, and those that no algorithm shares."""
    return [name for name in net.shapes if nets.layer_of(name) in layers or name in net.unshared]


def given_layers(layers: Layers | None) -> list[str | int] | None:
    """Layers as a list without repetition, before the network is known; ValueError if there is none."""
    if layers is None:
        return None
    one = isinstance(layers, str) or not isinstance(layers, Iterable)
    given: list[str | int] = [layers] if one else list(dict.fromkeys(layers))  # type: ignore[list-item, arg-type]
    if not given:
        raise ValueError("layers must name at least one layer to split, but got none. Without one, use fedavg().")
    return given


def resolve(net: Net, layers: Layers | None) -> list[str]:
    """Names of the layers that Λ means.

    Parameters
    ----------
    net : Net
    layers : str, int or sequence of these, optional
        Names, or numbers from 1 as the paper's Λ, which do not count a ResNet's shortcuts; None is the last hidden
        layer, the one before the output layer.

    Raises
    ------
    ValueError
        If a layer is not in the network, with the layers that are.

    Examples
    --------
    >>> from fedstat.fl import nets
    >>> net = nets.mlp([4, 6, 5, 3])
    >>> resolve(net, (1, "fc3")), resolve(net, None)
    (['fc1', 'fc3'], ['fc2'])
    """
    given = given_layers(layers)
    if given is None:
        return by_depth(net)[-2:][0][:1]
    return list(dict.fromkeys(require_layer(net, layer) for layer in given))


def _boolean(flags: Any) -> bool:
    return bool(flags.dtype == torch.bool if isinstance(flags, torch.Tensor) else np.asarray(flags).dtype == bool)


def require_layer(net: Net, layer: str | int) -> str:
    """Return the layer's name, given it or its number from 1, or raise ValueError."""
    every, counted = list(nets.layers(net)), by_depth(net)
    if layer in every:
        return str(layer)
    if isinstance(layer, int) and not isinstance(layer, bool) and 1 <= layer <= len(counted):
        return counted[layer - 1][0]
    raise ValueError(
        f"layers to split must be among {every}, but got {layer!r:.200}. They may also be given by number, "
        f"1 to {len(counted)}.{check.did_you_mean(layer, every)}"
    )


def shared_units(net: Net, mask: Mask, layer: str) -> torch.Tensor:
    """Which units of a layer are shared: bool (unit,).

    A unit is shared if all of its incoming weights are, for all clients; in a layer without weights its first parameter
    decides.
    """
    names = incoming(net, layer) or [n for n in net.shapes if nets.layer_of(n) == layer][:1]
    shared = torch.ones(nets.layers(net)[layer], dtype=torch.bool, device=device_of(mask))
    for name in names:
        rank = len(net.shapes[name])
        own = by_all(mask[name], rank)
        by_row = own.ndim == rank and name not in net.undivided
        shared = shared & (own.reshape(len(own), -1).all(1) if by_row else own.all())
    return shared


def of_clients(mask: torch.Tensor, rank: int, clients: np.ndarray) -> torch.Tensor:
    """Rows of some clients in one parameter's mask; the mask itself if it is the same for all clients.

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
    """Which entries of a parameter with ``rank`` dims some client shares: broadcasts against its shape."""
    return mask.any(0) if mask.ndim > rank else mask


def by_all(mask: torch.Tensor, rank: int) -> torch.Tensor:
    """Which entries of a parameter with ``rank`` dims all clients share: broadcasts against its shape."""
    return mask.all(0) if mask.ndim > rank else mask


def require(net: Net, mask: Mask, clients: int, where: str) -> None:
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
            others = f" (nor of {', '.join(map(repr, missing[1:]))})" if len(missing) > 1 else ""
            raise ValueError(
                f"{where} has no mask of {name!r}, of shape {shape}{others}. A mask is needed for every "
                "parameter: torch.tensor(True) shares one, torch.tensor(False) leaves it to the clients. Begin with "
                "masks.share_all(context.net, context.device), and change some."
            )
        given, whole = mask[name], (clients, *shape)
        if not isinstance(given, torch.Tensor) or given.dtype != torch.bool:
            kind = f"{given.dtype} values" if isinstance(given, torch.Tensor) else type(given).__name__
            raise ValueError(f"{where}: the mask of {name!r} must be a bool Tensor, but got {kind}")
        seen = tuple(given.shape)
        fits = zip(seen[::-1], whole[::-1], strict=False)
        if len(seen) > len(whole) or any(n not in (1, size) for n, size in fits):
            raise ValueError(
                f"{where}: the mask of {name!r} must broadcast against (client, *shape) = {whole}, but has "
                f"shape {seen}. One bool per unit has shape {(shape[0], *(1,) * (len(shape) - 1))}."
            )
