"""Networks written for stacked clients: every parameter has a leading client dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstat import _check

Params = dict[str, Tensor]
Gradient = Callable[[Tensor], Tensor]


class Net(NamedTuple):
    """A network as pure functions of stacked parameters.

    Attributes
    ----------
    shapes : mapping from "layer.parameter" to tuple of int
        Shape of one client's parameter. Axis 0 of every parameter of a layer is the layer's hidden units (neurons,
        output channels), so that one boolean per unit splits the layer.
    init : callable (numpy Generator) -> dict of Tensor
        One client's starting parameters, without the client dimension.
    apply : callable (params, x) -> Tensor
        ``x`` (client, sample, ...) to outputs (client, sample, output); differentiable.
    accumulate : callable, optional
        ``accumulate(params, x, gradient, into, beta, alpha)`` runs the network forward, asks ``gradient`` for the
        derivative of the loss at the outputs and, for every name in ``into``, sets into ← beta·into + alpha·∂loss.
        ``into`` may be ``params`` itself: with beta=1, alpha=−lr that is a whole SGD step without a gradient in
        memory. Networks without it are differentiated by autograd.
    """

    shapes: Mapping[str, tuple[int, ...]]
    init: Callable[[np.random.Generator], Params]
    apply: Callable[[Params, Tensor], Tensor]
    accumulate: Callable[[Params, Tensor, Gradient, Params, float, float], None] | None = None


def layer_of(name: str) -> str:
    """Layer that a parameter belongs to: ``"fc1.weight"`` to ``"fc1"``."""
    return name.rpartition(".")[0]


def layers(net: Net) -> dict[str, int]:
    """Layers of the network in order, with their numbers of hidden units."""
    return {layer_of(name): shape[0] for name, shape in net.shapes.items()}


def mlp(sizes: Sequence[int]) -> Net:
    """Fully connected network with ReLU between layers ``fc1``, ``fc2``, …

    Parameters
    ----------
    sizes : sequence of int
        Input size, hidden sizes, output size; at least two. Inputs with more dimensions are flattened.

    Returns
    -------
    Net
        Weights and biases start at U(−1/√in, 1/√in), as those of ``torch.nn.Linear`` do.

    Examples
    --------
    >>> mlp([100, 200, 1]).shapes["fc1.weight"]
    (200, 100)
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold an input and an output size, but got {list(sizes)!r}")
    sizes = [_check.integer("sizes", s) for s in sizes]
    names = [f"fc{i}" for i in range(1, len(sizes))]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (n_in, n_out) in zip(names, pairwise(sizes), strict=True):
        shapes |= {f"{name}.weight": (n_out, n_in), f"{name}.bias": (n_out,)}

    def init(rng: np.random.Generator) -> Params:
        bound = {name: 1 / math.sqrt(n_in) for name, n_in in zip(names, sizes, strict=False)}
        return {
            name: torch.from_numpy(rng.uniform(-bound[layer_of(name)], bound[layer_of(name)], shape)).float()
            for name, shape in shapes.items()
        }

    def forward(params: Params, x: Tensor) -> list[Tensor]:
        """Inputs of every layer, then the outputs."""
        seen = [x.flatten(2).to(params[f"{names[0]}.weight"].dtype)]
        for name in names:
            z = torch.baddbmm(params[f"{name}.bias"].unsqueeze(1), seen[-1], params[f"{name}.weight"].mT)
            seen.append(z if name == names[-1] else torch.relu_(z))
        return seen

    def accumulate(params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float) -> None:
        *inputs, outputs = forward(params, x)
        delta = gradient(outputs)
        for name, h in zip(reversed(names), reversed(inputs), strict=True):
            weight, bias = f"{name}.weight", f"{name}.bias"
            # The layer below needs this weight as it was, so it comes before the update.
            below = None if h is inputs[0] else torch.bmm(delta, params[weight])
            if weight in into:
                into[weight].baddbmm_(delta.mT, h, beta=beta, alpha=alpha)
            if bias in into:
                total = into[bias] if beta == 1 else into[bias].mul_(beta)
                total.add_(delta.sum(1), alpha=alpha)
            if below is not None:
                delta = torch.ops.aten.threshold_backward(below, h, 0)

    return Net(shapes, init, lambda params, x: forward(params, x)[-1], accumulate)
