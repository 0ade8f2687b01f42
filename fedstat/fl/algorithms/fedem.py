"""FedEM: every client's model is its own mixture of components that all clients share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedstat import _check
from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.mixture import WEIGHTS, log_joint, mixture, mixture_loss, of_class

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedEM",
    "Marfoq et al. (2021), arXiv:2108.10252",
    "several components",
    "the weights of their mixture",
    ("local_train",),
)


def fedem(*, components: Annotated[int, "components of the mixture"] = 3) -> Algorithm:
    """A mixture of shared components with personal weights, fitted by a federated EM algorithm.

    Marfoq, Neglia, Bellet, Kameni and Vidal (2021), "Federated multi-task learning under a mixture of distributions",
    NeurIPS, Algorithm 1. Once a round a client takes the E-step, responsibilities r_ik ∝ π_k p_k(y_i | x_i), sets
    π_k to the mean of r_ik, and trains every component on Σ_k r_ik loss_k with these r. It predicts with Σ_k π_k p_k.

    Shared, up and down: all components. Private: π. FedFac §5.1 takes three; one is FedAvg. See :func:`mixture`.
    The components must start from different draws: convert a user's module with ``start="random"``.
    """
    _check.integer("components", components)
    return Algorithm(
        "fedem",
        masks.keep_layers(lambda _: ["mixture"]),
        phases=(Phase(is_trainable=lambda name: name != WEIGHTS, sample_weights=_e_step),),
        settings={"components": components},
        wrap=lambda net: mixture(net, components),
        loss=lambda inner, _: mixture_loss(inner),
        about=ABOUT,
    )


def _e_step(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
    """Responsibilities (client, sample, component) of all training samples; π becomes their mean."""
    with torch.no_grad():
        x, y = samples.x, samples.y
        blocks = nets.sample_blocks(y.shape[1])
        parts = [of_class(log_joint(net.apply(params, x[:, at])), y[:, at]).softmax(-1) for at in blocks]
        r = torch.cat(parts, 1)
        real = samples.live.to(r.dtype).unsqueeze(-1)
        params[WEIGHTS].copy_((r * real).sum(1) / real.sum(1))
        return r
