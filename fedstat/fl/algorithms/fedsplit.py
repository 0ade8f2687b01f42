"""FedSplit: a split that is given and stays, or one that chance makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat import _check, _random
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, Mask, Sharing, Start, Uploads
from fedstat.fl.nets import Net


def fedsplit(shared: Mapping[str | int, Any]) -> Algorithm:
    """FedSplit: shared units are averaged, personal units stay with their client.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §3.1.
    Up and down: the shared units and every layer that is not named.

    Parameters
    ----------
    shared : mapping from layer (name, or number from 1) to bool array (unit,)
        Layers that are not named are shared.
    """
    if not isinstance(shared, Mapping):
        raise ValueError(f"shared must be a mapping from layer to one bool per unit, but got {shared!r}")
    named = {str(layer): np.flatnonzero(flags).tolist() for layer, flags in shared.items()}
    return Algorithm(
        "fedsplit", lambda start: Sharing(masks.units(start.net, shared, start.device)), settings={"shared": named}
    )


def random_split(layers: masks.Layers | None = None, *, share: float = 0.5, redrawn: bool = False) -> Algorithm:
    """A split by random guess (the same paper, §4.3 and Table 8). Up and down: what is shared, as in FedSplit.

    Hidden units are exchangeable at the start, so a random split that stays is equal in distribution to any other
    split of its size, the true one included; only a split that is drawn anew in every round can do worse.

    Parameters
    ----------
    layers : sequence of str or int, str, or int, optional
        Layers to split, by name or number from 1; by default the last hidden layer.
    share : float
        Share of each layer's units that is shared: round(share · units).
    redrawn : bool
        Draw the split anew after every round's local training.
    """
    given = masks.given_layers(layers)
    _check.real("share", share, low=0, high=1)

    def draw(net: Net, seed: int, number: int, device: Any) -> Mask:
        flags = {}
        for layer in masks.resolve(net, given):
            units = nets.layers(net)[layer]
            flags[layer] = np.zeros(units, dtype=bool)
            chosen = _random.generator(seed, "random split", layer, number).permutation(units)
            flags[layer][chosen[: round(share * units)]] = True
        return masks.units(net, flags, device)

    def sharing(start: Start) -> Sharing:
        return Sharing(draw(start.net, start.seed, -1, start.device))

    def reshare(up: Uploads) -> Sharing:
        return Sharing(draw(up.net, up.seed, up.round, up.weights.device))

    return Algorithm(
        "random-redrawn" if redrawn else "random",
        sharing,
        reshare if redrawn else None,
        settings={"layers": given, "share": share},
        keeps=(lambda net: masks.of_layers(net, masks.resolve(net, given))) if redrawn else None,
    )
