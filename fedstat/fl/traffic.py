"""What a round sends, by count: float32 entries, and one bit per unit for a split that moved."""

from __future__ import annotations

import math

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, Mask, Split
from fedstat.fl.nets import Net

_BYTES = 4  # of a float32 entry


def traffic(algorithm: Algorithm, net: Net, split: Split, previous: Split) -> tuple[int, int]:
    """Bytes that one active client sends and receives in a round.

    Parameters
    ----------
    algorithm : Algorithm
    net : Net
        The network that is trained, wrapped if the algorithm wraps it.
    split, previous : Split
        The split after the round and the one before it.

    Returns
    -------
    up : int
        What the server needs: the entries that the new split shares, or what ``algorithm.uploads`` names (dynamic
        FedFac: the layers of Λ whole, as its analysis reads all units before it is known which are shared).
    down : int
        The round's result: the entries that the new split shares, and for every layer whose split moved one bit per
        unit, in whole bytes.

    Notes
    -----
    One download a participation. What precedes round 1 is not counted: the common start, the same for every method,
    and static FedFac's one upload of the layers of Λ; nor what a transport adds or compresses. Where the mask differs
    between clients their mean is taken, rounded to a byte.

    Examples
    --------
    >>> import torch
    >>> from fedstat.fl import algorithms, nets
    >>> net = nets.mlp([3, 4, 2])  # 16 + 10 entries
    >>> some, all_ = ({"fc1": torch.tensor([True, second, False, False])} for second in (False, True))
    >>> a, b = (Split(masks.units(net, flags, torch.device("cpu"))) for flags in (some, all_))
    >>> traffic(algorithms.fedsplit({}), net, b, b), traffic(algorithms.random_split(redrawn=True), net, b, a)
    ((72, 72), (72, 73))
    """
    up = algorithm.uploads(net, split) if algorithm.uploads else split.shared
    moved = sum(
        math.ceil(units / 8)
        for layer, units in nets.layers(net).items()
        if split.shared is not previous.shared and _differ(net, split.shared, previous.shared, layer)
    )
    return round(_BYTES * entries(net, up)), round(_BYTES * entries(net, split.shared)) + moved


def entries(net: Net, mask: Mask) -> float:
    """Number of entries of one client that a mask picks; the clients' mean where it differs between them."""
    return sum(float(mask[name].sum()) * math.prod(shape) / mask[name].numel() for name, shape in net.shapes.items())


def _differ(net: Net, a: Mask, b: Mask, layer: str) -> bool:
    return bool((masks.shared_units(net, a, layer) != masks.shared_units(net, b, layer)).any())
