"""FedProx."""

from __future__ import annotations

from fedstat import _check
from fedstat.fl import masks
from fedstat.fl.algorithm import Algorithm, Phase, Sharing
from fedstat.fl.nets import Params


def fedprox(*, mu: float = 0.01) -> Algorithm:
    """FedAvg with μ/2 ‖W − W(t)‖² added to each client's loss; W(t) are the parameters as downloaded.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith (2020), "Federated optimization in heterogeneous networks", MLSys,
    Algorithm 2. Shared, up and down: everything; private: nothing. μ = 0 is FedAvg exactly.
    FedFac §5.1 tunes μ on {1, 0.5, 0.1, 0.01, 0.001}.
    """
    _check.real("mu", mu, low=0)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[name]).mul_(mu) for name, p in params.items()}

    phases = (Phase(penalty=penalty if mu else None),)
    sharing = lambda start: Sharing(masks.everything(start.net, start.device))  # noqa: E731
    return Algorithm("fedprox", sharing, phases=phases, settings={"mu": mu})
