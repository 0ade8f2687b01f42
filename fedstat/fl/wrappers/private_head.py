"""Any method with a private output layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, Mask, Received, RoundContext, Sharing, Start
from fedstat.fl.nets import Net, Params


def private_head(algorithm: Algorithm) -> Algorithm:
    """Make the output layer private; all else is as in ``algorithm``.

    For baselines where clients number their classes differently, so that output layers cannot be averaged: Jeong and
    Hwang (2022), "Factorized-FL", arXiv:2202.00270, §5 (permuted labels). FedAvg becomes FedPer.
    Shared, up and down: what ``algorithm`` shares of the other layers. Private: the output layer (of a mixture, that of
    every component), and what is private in ``algorithm``.

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
        return masks.without(shared, _parameters(net).__contains__)

    def sharing(start: Start) -> Sharing:
        inner = algorithm.sharing(start)
        return inner._replace(shared=private(start.net, inner.shared))

    def reshare(up: RoundContext) -> Sharing:
        inner = algorithm.reshare(up)  # type: ignore[misc]
        return inner._replace(shared=private(up.net, inner.shared))

    def keeps(net: Net) -> list[str]:
        inner = algorithm.keeps(net) if algorithm.keeps else net.shapes
        return [name for name in net.shapes if name in inner or name in _parameters(net)]

    def uploads(net: Net, sharing: Sharing) -> Mask:
        return private(net, algorithm.uploads(net, sharing))  # type: ignore[misc]

    def without(net: Net, found: Params) -> Params:
        return {name: p for name, p in found.items() if name not in _parameters(net)}

    def send(up: RoundContext) -> Params:
        return without(up.net, algorithm.send(up))  # type: ignore[misc]

    def receive(received: Received) -> Params:
        return without(received.net, algorithm.receive(received))  # type: ignore[misc]

    return algorithm._replace(
        name=private_name(algorithm.name),
        sharing=sharing,
        reshare=reshare if algorithm.reshare else None,
        keeps=keeps if algorithm.keeps else None,
        uploads=uploads if algorithm.uploads else None,
        send=send if algorithm.send else None,
        receive=receive if algorithm.receive else None,
        about=algorithm.about._replace(
            title=f"{algorithm.about.title or algorithm.name}, private head",
            own=f"{algorithm.about.own}; the output layer" if algorithm.about.own else "the output layer",
            new_clients=("local_train", "ensemble"),
        ),
    )


def _parameters(net: Net) -> Sequence[str]:
    """Parameters of the output layers."""
    heads = nets.head_layers(net)
    if len(heads) == len(nets.layers(net)):
        raise ValueError(f"the network's only layer is {heads[0]!r}: a private head leaves none to share. Use local().")
    return nets.head_parameters(net)


def private_name(method: str) -> str:
    """Name of a method with a private head; how it predicts stays at the end of the name.

    Examples
    --------
    >>> private_name("fedavg"), private_name("fedavg+")
    ('fedavg-private-head', 'fedavg-private-head+')
    """
    base, end = re.fullmatch(r"(.*?)(\+|-shrunken)?", method).groups(default="")  # type: ignore[union-attr]
    return f"{base}-private-head{end}"
