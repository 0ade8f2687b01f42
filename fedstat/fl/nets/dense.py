"""Dense layers of stacked clients: shapes, starting values as in ``torch.nn.Linear``, and networks that end in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedstat.fl.nets.base import Net, Params


def shapes(layer: str, n_in: int, n_out: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a dense layer's parameters."""
    return {f"{layer}.weight": (n_out, n_in), f"{layer}.bias": (n_out,)}


def start(rng: np.random.Generator, layer: str, n_in: int, n_out: int) -> Params:
    """Starting values as in ``torch.nn.Linear``: weight and bias from U(−1/√in, 1/√in)."""
    return uniform(rng, shapes(layer, n_in, n_out), 1 / math.sqrt(n_in))


def uniform(rng: np.random.Generator, shapes: Mapping[str, Sequence[int]], bound: float) -> Params:
    """Starting values from U(−bound, bound)."""
    return {name: torch.from_numpy(rng.uniform(-bound, bound, shape)).float() for name, shape in shapes.items()}


def linear(params: Params, layer: str, h: Tensor) -> Tensor:
    """Outputs (client, row, out) of a dense layer for h (client, row, in)."""
    return torch.baddbmm(params[f"{layer}.bias"].unsqueeze(1), h, params[f"{layer}.weight"].mT)


def linear_autograd(params: Params, layer: str, h: Tensor) -> Tensor:
    """The same as :func:`linear`, for a layer that autograd differentiates: its backward pass takes half the time."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    if len(h) == 1:
        # squeeze, not [0]: the derivative of squeeze is a view, that of [0] a copy into zeros of the stacked size.
        return functional.linear(h.squeeze(0), weight.squeeze(0), bias.squeeze(0)).unsqueeze(0)
    # Weights on the left, so that autograd returns their gradient in their own memory order.
    return torch.baddbmm(bias.unsqueeze(2), weight, h.mT).mT


def with_head(
    shapes: Mapping[str, tuple[int, ...]],
    init: Callable[[np.random.Generator], Params],
    features: Callable[[Params, Tensor], Tensor],
    layer: str,
) -> Net:
    """Network of features (client, sample, feature) and a dense output layer, named ``layer``."""

    def head(params: Params, h: Tensor) -> Tensor:
        return linear(params, layer, h)

    return Net(shapes, init, lambda params, x: head(params, features(params, x)), features=features, head=head)
