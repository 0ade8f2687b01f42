"""What a round sends, by count: float32 entries, and a split that moved at one bit per unit or entry."""

from __future__ import annotations

import math

import numpy as np
import torch

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, Mask, Sharing
from fedstat.fl.nets import Net

_BYTES = 4  # of a float32 entry


def traffic(algorithm: Algorithm, net: Net, split: Sharing, previous: Sharing, clients: np.ndarray) -> tuple[int, int]:
    """Bytes that the active clients send and receive in a round, together.

    Parameters
    ----------
    algorithm : Algorithm
    net : Net
        The network that is trained, wrapped if the algorithm wraps it.
    split, previous : Sharing
        The split after the round and the one before it.
    clients : int array (active,)

    Returns
    -------
    up : int
        What the server needs: of every client the entries that the new split shares, for some client if masks differ
        between them, or what ``algorithm.uploads`` names (dynamic FedFac: the layers of Λ whole, as its analysis reads
        all units before it is known which are shared).
    down : int
        The round's result: the entries that the new split shares for the client, and for every layer whose split moved
        for it one bit per unit, or where masks are finer than that one bit for each of their entries, in whole bytes.

    Notes
    -----
    One download a participation. What precedes round 1 is not counted: the common start, the same for every method,
    and static FedFac's one upload of the layers of Λ; nor what a transport adds or compresses.

    Examples
    --------
    >>> import torch
    >>> from fedstat.fl import algorithms, nets
    >>> net, one = nets.mlp([3, 4, 2]), np.array([0])  # 16 + 10 entries
    >>> some, all_ = ({"fc1": torch.tensor([True, second, False, False])} for second in (False, True))
    >>> a, b = (Sharing(masks.units(net, flags, torch.device("cpu"))) for flags in (some, all_))
    >>> traffic(algorithms.fedsplit({}), net, b, b, one), traffic(algorithms.random_split(redrawn=True), net, b, a, one)
    ((72, 72), (72, 73))
    """
    if algorithm.uploads:
        up = algorithm.uploads(net, split)
    else:
        up = {name: masks.by_some(split.shared[name], len(shape)) for name, shape in net.shapes.items()}
    moved = 0
    if split.shared is not previous.shared:
        moved = sum(_moved(net, split.shared, previous.shared, layer, clients) for layer in nets.layers(net))
    return _BYTES * entries(net, up, clients), _BYTES * entries(net, split.shared, clients) + moved


def entries(net: Net, mask: Mask, clients: np.ndarray) -> int:
    """Number of entries that a mask picks of some clients, together."""
    total = 0
    for name, shape in net.shapes.items():
        own = masks.of_clients(mask[name], len(shape), clients)
        total += int(own.sum()) * (len(clients) * math.prod(shape) // own.numel())
    return total


def _moved(net: Net, new: Mask, old: Mask, layer: str, clients: np.ndarray) -> int:
    """Bytes that tell those of some clients for whom it moved the new split of a layer."""
    names = [name for name in net.shapes if nets.layer_of(name) == layer]
    moved, bits, by_unit = torch.zeros(len(clients), dtype=torch.bool, device=masks.device_of(new)), 0, True
    for name in names:
        rank = len(net.shapes[name])
        differs = masks.of_clients(new[name] != old[name], rank, clients)
        moved = moved | (differs.reshape(len(differs), -1).any(1) if differs.ndim > rank else differs.any())
        one = new[name].shape[-rank:] if new[name].ndim else ()
        bits += math.prod(one)
        by_unit &= math.prod(one[-(rank - 1) :] if rank > 1 else ()) == 1
    return int(moved.sum()) * math.ceil((nets.layers(net)[layer] if by_unit else bits) / 8)
