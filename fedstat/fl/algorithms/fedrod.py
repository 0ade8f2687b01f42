"""FedRoD: a generic head trained with balanced softmax, and a personal head added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.losses import Loss, loss_of_part, require_classes
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
    """Train two heads on shared features: a generic head by balanced softmax, and a personal head added to it.

    Chen and Chao (2022), "On bridging generic and personalized federated learning for image classification", ICLR,
    arXiv:2107.00778, §4. The generic model is trained by the balanced softmax of Ren et al. (2020), arXiv:2007.10740:
    cross-entropy of its outputs plus log n_c, with n_c the client's number of training samples of class c. In each
    step, the personal head is trained on the cross-entropy of the sum of both outputs; no gradient of this loss reaches
    the features or the generic head. Clients predict with the sum.

    Shared (upload and download): features and generic head, averaged with weights n_k / Σ n_k. Personal: the personal
    head, a linear layer ``personal``. The paper's second form, a hypernetwork that generates this head from class
    proportions, is not implemented. Without the personal head this is FedAvg with balanced softmax. The personal head
    starts equal to the generic head, as in PFLlib; the authors publish no code. Classes without samples of a client
    (log 0) are not part of its softmax.

    Raises
    ------
    ValueError
        Before the first round, if the network has no features with an output layer on them.
    """
    return Algorithm(
        "fedrod",
        masks.keep_layers(lambda _: [PERSONAL]),
        phases=(Phase(sample_weights=_log_prior),),
        wrap=two_heads,
        loss=lambda inner, _: two_heads_loss(require_classes(inner, "fedrod", "for its balanced softmax")),
        about=ABOUT,
    )


def _log_prior(net: Net, _: Params, samples: Samples, __: AlgorithmState) -> Tensor:
    """Return log n_c (client, sample, output), equal for all samples of a client; log n_1 − log n_0 of one output."""
    outputs = nets.n_outputs(net)
    of_class = torch.zeros(len(samples.y), max(outputs, 2), device=samples.y.device)
    prior = of_class.scatter_add_(1, samples.y.long(), samples.live.float()).log()
    if outputs == 1:
        prior = prior[:, 1:] - prior[:, :1]
    return prior.unsqueeze(1).expand(-1, samples.y.shape[1], -1)


PERSONAL = "personal"


def two_heads(net: Net) -> Net:
    """Return a network with a second head, which passes no gradient to the features.

    Parameters
    ----------
    net : Net
        Has features and one dense output layer, the generic head.

    Returns
    -------
    Net
        Has a further layer ``personal``, with the output layer's shapes and initial parameters. Outputs
        (client, sample, 2·output) are the generic head's, then the personal head's.

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
        return start | {personal: start[generic].clone() for personal, generic in heads.items()}

    def apply(params: Params, x: Tensor, **arguments: Any) -> Tensor:
        generic_params = {name: params[name] for name in net.shapes}
        h = net.features(generic_params, x, **arguments)  # type: ignore[misc]
        personal_params = {generic: params[personal] for personal, generic in heads.items()}
        return torch.cat([net.head(generic_params, h), net.head(personal_params, h.detach())], -1)  # type: ignore[misc]

    shapes = {**net.shapes, **{personal: net.shapes[generic] for personal, generic in heads.items()}}
    return nets.derive(net, shapes=shapes, init=init, apply=apply, heads=(*nets.head_layers(net), PERSONAL))


def two_heads_loss(inner: Loss) -> Loss:
    """Return the loss of the sum of both heads, with a separate gradient for the generic head.

    The gradient's fourth argument is the prior (client, sample, output). The generic head's gradient is of the loss of
    its outputs plus the prior. Without a prior, as in fine-tuning, both heads have the gradient of the loss of their
    sum.
    """

    def total(out: Tensor) -> Tensor:
        generic, personal = out.chunk(2, -1)
        return generic + personal

    def gradient(out: Tensor, y: Tensor, weight: Tensor, prior: Tensor | None = None) -> Tensor:
        of_sum = inner.gradient(total(out), y, weight)
        generic = of_sum if prior is None else inner.gradient(out.chunk(2, -1)[0] + prior, y, weight)
        return torch.cat([generic, of_sum], -1)

    return loss_of_part(inner, total, gradient)
