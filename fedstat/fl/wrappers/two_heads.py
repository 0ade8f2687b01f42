"""A network with a generic and a personal head on the same features, and its loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._later import torch
from fedstat.fl import nets
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor

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
    heads = {PERSONAL + name.removeprefix(nets.head_layers(net)[-1]): name for name in nets.head_parameters(net)}

    def init(rng: np.random.Generator) -> Params:
        start = dict(net.init(rng))
        return start | {mine: start[generic].clone() for mine, generic in heads.items()}

    def apply(params: Params, x: Tensor, **given: Any) -> Tensor:
        generic = {name: params[name] for name in net.shapes}
        h = net.features(generic, x, **given)  # type: ignore[misc]
        personal = {name: params[mine] for mine, name in heads.items()}
        return torch.cat([net.head(generic, h), net.head(personal, h.detach())], -1)  # type: ignore[misc]

    return Net(
        {**net.shapes, **{mine: net.shapes[generic] for mine, generic in heads.items()}},
        init,
        apply,
        buffers=net.buffers,
        unshared=net.unshared,
        activations=net.activations,
        heads=(*nets.head_layers(net), PERSONAL),
        noise=net.noise,
        undivided=net.undivided,
    )


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
