"""Two models for every client, one shared and one its own, as one network, and its loss."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Gradient, Net, Params
from fedstat.fl.wrappers.copies import copies, part

if TYPE_CHECKING:
    from torch import Tensor

GLOBAL, OWN = "global_", "own_"
PREFIXES = (GLOBAL, OWN)


def pair(net: Net) -> Net:
    """Two copies of a network, "global_<...>" and "own_<...>", which start equal.

    Its outputs (client, sample, 2·output) are those of the global and of the own copy side by side. A gradient is taken
    of the copies that train alone: those that do not are not even run.
    """

    def apply(params: Params, x: Tensor, **given: Any) -> Tensor:
        return torch.cat([net.apply(part(params, prefix), x, **given) for prefix in PREFIXES], -1)

    def accumulate(
        params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **given: Any
    ) -> None:
        one = net.accumulate or partial(nets.accumulate_by_autograd, net.apply)
        for prefix in PREFIXES:
            if moving := part(into, prefix):
                one(part(params, prefix), x, gradient, moving, beta, alpha, **given)

    def init(rng: np.random.Generator) -> Params:
        start = net.init(rng)
        return {prefix + name: p.clone() for prefix in PREFIXES for name, p in start.items()}

    base = None if net.base is None else pair(net.base)
    return copies(net, PREFIXES, init=init, apply=apply, accumulate=accumulate, base=base)


def pair_loss(inner: Loss, net: Net) -> Loss:
    """The loss of a :func:`pair`: in training of each copy, else of the own one, with which clients predict."""
    n = nets.n_outputs(net)

    def gradient(out: Tensor, y: Tensor, weight: Tensor, *extra: Tensor) -> Tensor:
        return torch.cat([inner.gradient(z.clone(), y, weight, *extra) for z in out.split(n, -1)], -1)

    return loss_of_part(inner, lambda out: out[..., -n:], gradient)


share_global = masks.keep_layers(lambda net: [layer for layer in nets.layers(net) if is_own(layer)])
"""Mask that shares the global copy alone."""


def is_own(name: str) -> bool:
    """Whether a parameter is of the own copy."""
    return name.startswith(OWN)


def counterpart(name: str) -> str:
    """The global copy's parameter for one of the own copy."""
    return GLOBAL + name.removeprefix(OWN)
