"""FedBN: clients keep the parameters of normalization."""

from __future__ import annotations

from fedstat._utils import check
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, InitContext, SharedMask

ABOUT = About(
    "FedBN",
    ("li2021bn",),
    "all but normalization",
    "scales, shifts and statistics of normalization",
    ("local_train",),
)


def fedbn() -> Algorithm:
    """Run FedAvg, but keep the parameters of normalization personal.

    Li, Jiang, Zhang, Kamp and Dou (2021), "FedBN: Federated learning on non-IID features via local batch
    normalization", ICLR, arXiv:2102.07623, Algorithm 1. Shared (upload and download): all other parameters, averaged
    with weights n_k / Σ n_k (equal weights in the published code). Personal: scale and shift of every normalization,
    and the running statistics of batch normalization for any ``statistics`` of the network. The paper uses batch
    normalization; group and layer normalization, which have no running statistics, are treated alike.

    :func:`fedstat.fl.nets.normalisation` finds these parameters by their names.

    Warns
    -----
    UserWarning
        Before the first round, if the network has no normalization: the algorithm is then FedAvg.
    """
    return Algorithm("fedbn", _init_mask, about=ABOUT)


def _init_mask(context: InitContext) -> SharedMask:
    names = nets.normalisation(context.net)
    if not names:
        check.warn(
            "fedbn keeps the parameters of normalization personal, but the network has none, so that this is FedAvg. "
            "Use a network with normalization, such as norm='group' or norm='batch'."
        )
    return masks.keep_parameters(names.__contains__)(context)
