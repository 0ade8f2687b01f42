"""Multilayer perceptron, with its gradient written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedstat import _check
from fedstat.fl.nets.base import Gradient, Net, Params, layer_of


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
