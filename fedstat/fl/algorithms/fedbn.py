"""FedBN: normalisation stays with the client."""

from __future__ import annotations

from fedstat._utils import check
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, InitContext, SharedMask

ABOUT = About(
    "FedBN",
    ("li2021bn",),
    "all but normalisation",
    "scales, shifts and statistics of normalisation",
    ("local_train",),
)


def fedbn() -> Algorithm:
    """FedAvg whose clients keep their normalisation to themselves.

    Li, Jiang, Zhang, Kamp and Dou (2021), "FedBN: Federated learning on non-IID features via local batch
    normalization", ICLR, arXiv:2102.07623, Algorithm 1. Up and down: all other parameters, averaged with weights
    n_k / Σ n_k (equal weights in the published code). Private: scale and shift of every normalisation, and the running
    statistics of batch normalisation, whatever ``statistics`` of the network says. The paper has batch normalisation;
    group and layer normalisation, which have no such statistics, are treated alike.

    Which parameters these are the network says by their names: see :func:`fedstat.fl.nets.normalisation`.

    Warns
    -----
    UserWarning
        Before the first round, if the network has no normalisation: this is FedAvg then.
    """
    return Algorithm("fedbn", _sharing, about=ABOUT)


def _sharing(context: InitContext) -> SharedMask:
    own = nets.normalisation(context.net)
    if not own:
        check.warn(
            "fedbn keeps normalisation with the client, but the network has none, so that this is FedAvg. Take a "
            "network that normalises, such as one with norm='group' or norm='batch'."
        )
    return masks.keep_parameters(own.__contains__)(context)
