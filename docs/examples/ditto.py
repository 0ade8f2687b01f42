"""Ditto as an example: FedAvg, and a personal model that a proximal term keeps near the global one.

Li, Hu, Beirami and Smith (2021), "Ditto: fair and robust federated learning through personalization", ICML,
arXiv:2012.04221, Algorithm 1: a client trains the global w, and its personal v on F(v) + λ/2 ‖v − w(t)‖², where w(t)
is the downloaded model. It predicts with v, which it never uploads. python -m fedstat.fl --algorithm ditto.py:ditto
"""

from typing import Annotated, Any

import torch
from torch import Tensor

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, InitContext, Phase, SharedMask
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params

PREFIXES = ("global_", "own_")


def ditto(*, lam: Annotated[float, "λ, strength of the penalty on distance from the global model"] = 0.1) -> Algorithm:
    """FedAvg, with a personal model for every client."""

    def penalty(params: Params, anchor: Params) -> Tensor:  # of each client (client,); autograd does the rest
        far = [(v - anchor[n.replace("own_", "global_")]).flatten(1) for n, v in params.items() if n.startswith("own_")]
        return lam / 2 * torch.cat(far, 1).square().sum(1)

    def init_mask(context: InitContext) -> SharedMask:
        own = [layer for layer in nets.layers(context.net) if layer.startswith("own_")]
        return SharedMask(masks.share_all_but(context.net, own, context.device))

    phases = (Phase(penalty=penalty, anchor="download"),)
    return Algorithm("ditto", init_mask, phases=phases, settings={"lam": lam}, wrap=pair, loss=both)


def pair(net: Net) -> Net:
    """Two copies of a network with equal initial parameters; outputs are concatenated, the personal ones last."""
    names = {prefix + name: name for prefix in PREFIXES for name in net.shapes}
    heads, buffers = ([p + n for p in PREFIXES for n in some] for some in (nets.head_layers(net), net.buffers))

    def apply(params: Params, x: Tensor, **given: Any) -> Tensor:
        models = ({name: params[prefix + name] for name in net.shapes} for prefix in PREFIXES)
        return torch.cat([net.apply(model, x, **given) for model in models], -1)

    def start(rng: Any) -> Params:
        one = net.init(rng)
        return {name: one[of].clone() for name, of in names.items()}

    shapes = {name: net.shapes[of] for name, of in names.items()}
    return Net(shapes, start, apply, buffers=tuple(buffers), heads=tuple(heads), noise=net.noise)


def both(inner: Loss, net: Net) -> Loss:
    """Sum of the losses of both models, which have no common parameter; predictions are the personal model's."""
    n = nets.n_outputs(net)

    def gradient(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([inner.gradient(z.clone(), y, weight) for z in out.split(n, -1)], -1)

    own = (lambda out, *y, of=of: of(out[..., n:], *y) for of in (inner.value, inner.predict, inner.probability))
    return Loss(next(own), gradient, *own)
