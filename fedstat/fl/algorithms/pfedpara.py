"""pFedPara: every weight is the Hadamard product of a shared and a personal low-rank part."""

from __future__ import annotations

from typing import Annotated

from fedstat import _check
from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm
from fedstat.fl.wrappers.hadamard import SECOND, hadamard

ABOUT = About(
    "pFedPara",
    "Hyeon-Woo et al. (2022), arXiv:2108.06098",
    "W₁ of weights W₁ ⊙ (W₂ + 1), both of low rank, and all that is no weight",
    "W₂",
    ("local_train",),
)


def pfedpara(
    *,
    gamma: Annotated[float, "γ of the rank, between the least that does not limit weights, 0, and their size, 1"] = 0.5,
) -> Algorithm:
    """W = W₁ ⊙ (W₂ + 1), W₁ and W₂ of low rank: W₁ is shared, W₂ personal; both are trained at once.

    Hyeon-Woo, Ye-Bin and Oh (2022), "FedPara: Low-rank Hadamard product for communication-efficient federated
    learning", ICLR, arXiv:2108.06098, §2.3 (pFedPara); weights, ranks and start as
    :func:`fedstat.fl.wrappers.hadamard.hadamard` says. Up and down: the factors of W₁, and all that is no weight
    (biases, normalisation), of which the text says nothing. Private: the factors of W₂. The mean is weighted by numbers
    of samples, as FedAvg's, on which the paper builds.

    Parameters
    ----------
    gamma : float in [0, 1]
        γ. With 0.5, as in the paper, an MLP of 784, 256 and 10 units sends about 3.4 times fewer numbers than FedAvg.

    Raises
    ------
    ValueError
        If γ is not in [0, 1].
    """
    _check.real("gamma", gamma, low=0, high=1)

    return Algorithm(
        "pfedpara",
        masks.keep_parameters(is_personal),
        settings={"gamma": gamma},
        wrap=lambda net: hadamard(net, gamma),
        about=ABOUT,
    )


def is_personal(name: str) -> bool:
    """Whether a parameter belongs to W₂."""
    return name.rpartition(".")[2] in SECOND
