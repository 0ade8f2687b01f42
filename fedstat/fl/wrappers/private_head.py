"""Any method, with the classifier kept by its client."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedstat.fl import nets
from fedstat.fl.algorithm import Algorithm, Mask, Received, Sharing, Start, Uploads
from fedstat.fl.nets import Net, Params


def private_head(algorithm: Algorithm) -> Algorithm:
    """Keep the output layer of every client's model to itself; all else is as in ``algorithm``.

    So baselines are trained where clients number their classes differently, and no output layer can be averaged:
    Jeong and Hwang (2022), "Factorized-FL", arXiv:2202.00270, §5 (permuted labels). FedAvg becomes FedPer.
    Shared, up and down: what ``algorithm`` shares of the other layers. Private: the output layer, of a mixture that of
    every component, and what ``algorithm`` keeps private.

    Raises
    ------
    ValueError
        Before the first round, if the network has no other layer.

    Examples
    --------
    >>> from fedstat.fl.algorithms import fedprox
    >>> private_head(fedprox(mu=0.1)).name
    'fedprox-private-head'
    """

    def private(net: Net, shared: Mask) -> Mask:
        own = _parameters(net)
        return {name: torch.tensor(False, device=mask.device) if name in own else mask for name, mask in shared.items()}

    def sharing(start: Start) -> Sharing:
        split = algorithm.sharing(start)
        return split._replace(shared=private(start.net, split.shared))

    def reshare(up: Uploads) -> Sharing:
        split = algorithm.reshare(up)  # type: ignore[misc]
        return split._replace(shared=private(up.net, split.shared))

    def keeps(net: Net) -> list[str]:
        kept = algorithm.keeps(net) if algorithm.keeps else net.shapes
        return [name for name in net.shapes if name in kept or name in _parameters(net)]

    def uploads(net: Net, split: Sharing) -> Mask:
        return private(net, algorithm.uploads(net, split))  # type: ignore[misc]

    def without(net: Net, found: Params) -> Params:
        return {name: p for name, p in found.items() if name not in _parameters(net)}

    def receive(received: Received) -> Params:
        return without(received.net, algorithm.receive(received))  # type: ignore[misc]

    return algorithm._replace(
        name=f"{algorithm.name}-private-head",
        sharing=sharing,
        reshare=reshare if algorithm.reshare else None,
        keeps=keeps if algorithm.keeps else None,
        uploads=uploads if algorithm.uploads else None,
        send=(lambda up: without(up.net, algorithm.send(up))) if algorithm.send else None,  # type: ignore[misc]
        receive=receive if algorithm.receive else None,
    )


def _parameters(net: Net) -> Sequence[str]:
    """Parameters of the output layers."""
    heads = nets.head_layers(net)
    if len(heads) == len(nets.layers(net)):
        raise ValueError(f"the network's only layer is {heads[0]!r}: a private head leaves none to share. Use local().")
    return [name for name in net.shapes if nets.layer_of(name) in heads]
