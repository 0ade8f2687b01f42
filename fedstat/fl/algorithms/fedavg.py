"""FedAvg."""

from __future__ import annotations

from fedstat.fl import masks
from fedstat.fl.algorithm import Algorithm, Sharing


def fedavg() -> Algorithm:
    """Everything is shared.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas (2017), "Communication-efficient learning of deep networks from
    decentralized data", AISTATS, Algorithm 1. Shared, up and down: everything; private: nothing.
    """
    return Algorithm("fedavg", lambda start: Sharing(masks.everything(start.net, start.device)))
