"""Multilayer perceptron with a hand-written gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.nets import dense
from fedstat.fl.nets.base import Gradient, Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def mlp(sizes: Sequence[int]) -> Net:
    """Build a fully connected network with ReLU between layers ``fc1``, ``fc2``, …

    Parameters
    ----------
    sizes : sequence of int
        Input size, hidden sizes, output size; at least two sizes. Samples with several dimensions are flattened.

    Returns
    -------
    Net
        Weights and biases start from U(−1/√in, 1/√in), as in ``torch.nn.Linear``.

    Examples
    --------
    >>> mlp([100, 200, 1]).shapes["fc1.weight"]
    (200, 100)
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold an input and an output size, but got {list(sizes)!r}")
    sizes = [check.integer("sizes", s) for s in sizes]
    layers = [(f"fc{i}", *ends) for i, ends in enumerate(pairwise(sizes), 1)]
    names = [name for name, _, _ in layers]

    def inputs_of_layers(params: Params, x: Tensor) -> list[Tensor]:
        inputs = [x.flatten(2).to(next(iter(params.values())).dtype)]
        for name in names[:-1]:
            inputs.append(torch.relu_(dense.linear(params, name, inputs[-1])))
        return inputs

    def features(params: Params, x: Tensor) -> Tensor:
        return inputs_of_layers(params, x)[-1]

    def accumulate(params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float) -> None:
        inputs = inputs_of_layers(params, x)
        delta = gradient(dense.linear(params, names[-1], inputs[-1]))
        for name, h in zip(reversed(names), reversed(inputs), strict=True):
            # The layer below needs this weight before its update.
            below = None if h is inputs[0] else dense.below(params, name, delta)
            dense.accumulate(params, name, h, delta, into, beta, alpha)
            if below is not None:
                delta = torch.ops.aten.threshold_backward(below, h, 0)

    shapes = dict(chain.from_iterable(dense.shapes(*layer).items() for layer in layers))
    net = dense.with_head(shapes, partial(dense.draw_parameters, shapes), features, *names)
    return net._replace(accumulate=accumulate, inputs=sizes[0])
