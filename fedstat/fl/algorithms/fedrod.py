"""FedRoD: a generic head trained with balanced softmax, and a personal one on top of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = About(
    "FedRoD",
    ("chen2022",),
    "everything, with an output layer trained as if classes were balanced",
    "a second output layer, which is added to it",
    ("local_train",),
)


def fedrod() -> Algorithm:
    """Two heads on shared features: a generic one, trained with balanced softmax, and a client's own, added to it.

    Chen and Chao (2022), "On bridging generic and personalized federated learning for image classification", ICLR,
    arXiv:2107.00778, §4. The generic model is trained on the balanced softmax of Ren et al. (2020), arXiv:2007.10740:
    cross-entropy of its outputs plus log n_c, with n_c the client's training samples of class c. The personal head is
    trained, in the same steps, on cross-entropy of the sum of both outputs; no gradient of it reaches the features or
    the generic head. Clients predict with the sum.

    Shared, up and down: features and generic head, averaged with weights n_k / Σ n_k. Private: the personal head, the
    layer ``personal``, linear; the paper's second form, a hypernetwork that makes it from class shares, is not here.
    Without it this is FedAvg with balanced softmax. The personal head starts as the generic one, as in PFLlib; the
    authors publish no code. A class that a client does not have (log 0) has no part in its softmax.

    Raises
    ------
    ValueError
        Before the first round, if the network has no features and output layer on them.
    """
    return Algorithm(
        "fedrod",
        masks.keep_layers(lambda _: [PERSONAL]),
        phases=(Phase(sample_weights=_log_prior),),
        wrap=two_heads,
        loss=lambda inner, _: two_heads_loss(inner),
        about=ABOUT,
    )


def _log_prior(net: Net, _: Params, samples: Samples, __: AlgorithmState) -> Tensor:
    """Log n_c (client, sample, output), the same for all samples of a client; of one output, log n_1 − log n_0."""
    outputs = nets.n_outputs(net)
    of_class = torch.zeros(len(samples.y), max(outputs, 2), device=samples.y.device)
    prior = of_class.scatter_add_(1, samples.y.long(), samples.live.float()).log()
    if outputs == 1:
        prior = prior[:, 1:] - prior[:, :1]
    return prior.unsqueeze(1).expand(-1, samples.y.shape[1], -1)


PERSONAL = "personal"


def two_heads(net: Net) -> Net:
    """Network with a second head, on features through which it passes no gradient.

    Parameters
    ----------
    net : Net
        With features and one dense output layer, the generic head.

    Returns
    -------
    Net
        With a further layer ``personal``, of the output layer's shape, which starts as that does. Outputs
        (client, sample, 2·output) are the generic head's, then the personal one's.

    Raises
    ------
    ValueError
        If the network has no features, or is composed of factors.
    """
    nets.n_features(net)
    nets.require_uncomposed(net)
    heads = {PERSONAL + name.removeprefix(nets.output_layer(net)): name for name in nets.head_parameters(net)}

    def init(rng: np.random.Generator) -> Params:
        start = dict(net.init(rng))
        return start | {mine: start[generic].clone() for mine, generic in heads.items()}

    def apply(params: Params, x: Tensor, **given: Any) -> Tensor:
        generic = {name: params[name] for name in net.shapes}
        h = net.features(generic, x, **given)  # type: ignore[misc]
        personal = {name: params[mine] for mine, name in heads.items()}
        return torch.cat([net.head(generic, h), net.head(personal, h.detach())], -1)  # type: ignore[misc]

    shapes = {**net.shapes, **{mine: net.shapes[generic] for mine, generic in heads.items()}}
    return nets.derive(net, shapes=shapes, init=init, apply=apply, heads=(*nets.head_layers(net), PERSONAL))


def two_heads_loss(inner: Loss) -> Loss:
    """The loss of the sum of both heads; in training, the generic head is trained on its own outputs.

    The gradient's fourth argument is the prior (client, sample, output) that is added to the generic head's outputs.
    Without it, as in fine-tuning, both heads have the derivative of the loss of their sum.
    """

    def total(out: Tensor) -> Tensor:
        generic, personal = out.chunk(2, -1)
        return generic + personal

    def gradient(out: Tensor, y: Tensor, weight: Tensor, prior: Tensor | None = None) -> Tensor:
        of_sum = inner.gradient(total(out), y, weight)
        generic = of_sum if prior is None else inner.gradient(out.chunk(2, -1)[0] + prior, y, weight)
        return torch.cat([generic, of_sum], -1)

    return loss_of_part(inner, total, gradient)
