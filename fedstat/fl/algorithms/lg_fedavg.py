"""LG-FedAvg: personal first layers under a shared head."""

from __future__ import annotations

from typing import Annotated

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm
from fedstat.fl.nets import Net

ABOUT = About("LG-FedAvg", ("liang2020",), "the last layers", "the first layers", ("ensemble",))


def lg_fedavg(*, global_layers: Annotated[int, "last layers that are shared"] = 1) -> Algorithm:
    """Share the last layers and keep the first personal: local representations under a global head.

    Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov and Morency (2020), "Think locally, act globally: Federated
    learning with local and global representations", arXiv:2001.01523, Algorithm 1. Shared (upload and download): the
    last ``global_layers`` layers. Personal: the other layers. The default, 1, is valid for every network and sends
    least. FedFac §5.1 tunes it on 1, ..., L − 1; the authors' code shares 2 of 5 layers on CIFAR-10, starting from a
    model trained by FedAvg. Sharing all L layers is FedAvg.
    """

    def personal(net: Net) -> list[str]:
        shared = masks.last_layers(net, "global_layers", global_layers, all_too=True)
        return [layer for layer in nets.layers(net) if layer not in shared]

    return Algorithm("lg-fedavg", masks.keep_layers(personal), settings={"global_layers": global_layers}, about=ABOUT)
