"""FedProx, and FedProx+ with fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fedstat._utils import check
from fedstat.fl.algorithm import About, Algorithm, Phase
from fedstat.fl.nets import Params
from fedstat.fl.wrappers.finetuned import finetuned

ABOUT = About(
    "FedProx",
    ("li2020",),
    "everything; clients stay near the global model",
    "nothing",
    ("global",),
)


def fedprox(
    *, mu: Annotated[float, "μ, strength of the penalty on distance from the global model"] = 0.01
) -> Algorithm:
    """Run FedAvg with the penalty μ/2 ‖W − W(t)‖² in each client's loss, W(t) the downloaded parameters.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith (2020), "Federated optimization in heterogeneous networks", MLSys,
    Algorithm 2. Shared (upload and download): all parameters. Personal: none. μ = 0 is exactly FedAvg. FedFac §5.1
    tunes μ on {1, 0.5, 0.1, 0.01, 0.001}.
    """
    check.real("mu", mu, low=0)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[name]).mul_(mu) for name, p in params.items()}

    phases = (Phase(penalty=penalty if mu else None),)
    return Algorithm("fedprox", phases=phases, settings={"mu": mu}, about=ABOUT)


def fedprox_plus(*, mu: float = 0.01, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """Wrap :func:`fedprox` in :func:`fedstat.fl.wrappers.finetuned.finetuned`, which fine-tunes without the penalty."""
    return finetuned(fedprox(mu=mu), epochs)
