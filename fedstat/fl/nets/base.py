"""What a network is to the trainer: pure functions of parameters that have a leading client dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor

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
        ``x`` (client, sample, ...) to outputs (client, sample, output); differentiable. A network with ``buffers``
        takes a third argument ``live``, None or bool (client, sample): given in training, it says which samples are
        real and not padding, and the network uses the statistics of these and updates its buffers in place.
    accumulate : callable, optional
        ``accumulate(params, x, gradient, into, beta, alpha)`` runs the network forward, asks ``gradient`` for the
        derivative of the loss at the outputs and, for every name in ``into``, sets into ← beta·into + alpha·∂loss.
        ``into`` may be ``params`` itself: with beta=1, alpha=−lr that is a whole SGD step without a gradient in
        memory. Networks without it are differentiated by autograd.
    buffers : tuple of str
        Names in ``shapes`` that no gradient reaches: running statistics of batch normalisation.
    unshared : tuple of str
        Names in ``shapes`` that no algorithm shares: batch statistics, where they stay with their client.
    activations : int, optional
        Numbers that one sample leaves in memory on its way forward; by default one for every hidden unit.
    """

    shapes: Mapping[str, tuple[int, ...]]
    init: Callable[[np.random.Generator], Params]
    apply: Callable[..., Tensor]
    accumulate: Callable[[Params, Tensor, Gradient, Params, float, float], None] | None = None
    buffers: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()
    activations: int | None = None
    noise: Mapping[str, tuple[int, ...]] = {}


def layer_of(name: str) -> str:
    """Layer that a parameter belongs to: ``"fc1.weight"`` to ``"fc1"``."""
    return name.rpartition(".")[0]


def layers(net: Net) -> dict[str, int]:
    """Layers of the network in order, with their numbers of hidden units."""
    return {layer_of(name): shape[0] for name, shape in net.shapes.items()}
