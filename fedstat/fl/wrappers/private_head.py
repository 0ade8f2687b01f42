"""Any method with a private output layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, DownloadContext, InitContext, Mask, RoundContext, SharedMask
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

    def init_mask(context: InitContext) -> SharedMask:
        inner = masks.initial(algorithm, context)
        return inner._replace(shared=private(context.net, inner.shared))

    def update_mask(context: RoundContext) -> SharedMask:
        inner = algorithm.update_mask(context)  # type: ignore[misc]
        return inner._replace(shared=private(context.net, inner.shared))

    def personal_params(net: Net) -> list[str]:
        inner = algorithm.personal_params(net) if algorithm.personal_params else net.shapes
        return [name for name in net.shapes if name in inner or name in _parameters(net)]

    def upload_mask(net: Net, mask: SharedMask) -> Mask:
        return private(net, algorithm.upload_mask(net, mask))  # type: ignore[misc]

    def without(net: Net, found: Params) -> Params:
        return {name: p for name, p in found.items() if name not in _parameters(net)}

    def encode(context: RoundContext) -> Params:
        return without(context.net, algorithm.encode(context))  # type: ignore[misc]

    def on_download(context: DownloadContext) -> Params:
        return without(context.net, algorithm.on_download(context))  # type: ignore[misc]

    return algorithm._replace(
        name=private_name(algorithm.name),
        init_mask=init_mask,
        update_mask=update_mask if algorithm.update_mask else None,
        personal_params=personal_params if algorithm.personal_params else None,
        upload_mask=upload_mask if algorithm.upload_mask else None,
        encode=encode if algorithm.encode else None,
        on_download=on_download if algorithm.on_download else None,
        about=algorithm.about._replace(
            title=f"{algorithm.about.title or algorithm.name}, private head",
            personal="; ".join(filter(None, (algorithm.about.personal, "the output layer"))),
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
