"""What a network is to the trainer: pure functions of parameters that have a leading client dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

Params = dict[str, Tensor]
Gradient = Callable[[Tensor], Tensor]


class Net(NamedTuple):
    """A network as pure functions of stacked parameters.

    Attributes
    ----------
    shapes : mapping from "layer.parameter" to tuple of int
        Shape of one client's parameter, the output layer's last. Axis 0 of every parameter of a layer is the layer's
        hidden units (neurons, output channels), so that one boolean per unit splits the layer; but for ``undivided``.
    init : callable (numpy Generator) -> dict of Tensor
        One client's starting parameters, without the client dimension.
    apply : callable (params, x, *, live, noise) -> Tensor
        ``x`` (client, sample, ...) to outputs (client, sample, output); differentiable. Only a network with ``buffers``
        takes ``live``, None or bool (client, sample): given in training, it says which samples are real and not
        padding, and the network uses the statistics of these and updates its buffers in place. Only a network with
        ``noise`` takes ``noise``. See :func:`in_training`.
    accumulate : callable, optional
        ``accumulate(params, x, gradient, into, beta, alpha)`` runs the network forward, asks ``gradient`` for the
        derivative of the loss at the outputs and, for every name in ``into``, sets into ← beta·into + alpha·∂loss.
        ``into`` may be ``params`` itself: with beta=1, alpha=−lr that is a whole SGD step without a gradient in
        memory. It takes ``live`` and ``noise`` as ``apply`` does. Networks without it are differentiated by autograd.
    buffers : tuple of str
        Names in ``shapes`` that no gradient reaches: running statistics of batch normalisation.
    unshared : tuple of str
        Names in ``shapes`` that no algorithm shares: batch statistics, where they stay with their client.
    activations : int, optional
        Numbers that one sample leaves in memory on its way forward; by default one for every hidden unit.
    features, head : callable, optional
        The network in two: ``features(params, x)``, which takes ``live`` and ``noise`` as ``apply`` does, gives what
        the output layer gets, (client, sample, feature), and ``head(params, h)`` what this layer makes of it,
        (client, sample, output). One after the other they give what ``apply`` gives, to the bit. ``features`` reads
        no parameter of the output layer, ``head`` no other. None: the network has no such layer, or several.
    heads : tuple of str
        Its output layers, where they are not the last layer alone: a mixture has one a component.
    noise : mapping from name to tuple of int
        Uniform values in (0, 1) that one sample draws in training, by name, with their shape. ``apply`` gets them as
        ``noise``, a mapping from name to Tensor (client, sample, *shape), the same whatever clients stand beside; None
        in evaluation: the deterministic network.
    undivided : tuple of str
        Names in ``shapes`` whose axis 0 is not the units of their layer: no mask by unit splits them.
    base : Net, optional
        The network whose weights are made of these parameters, see :func:`fedstat.fl.wrappers.composed.composed`; its
        layers and units are this one's.
    whole : callable (params) -> Params, optional
        The parameters (client, ...) of ``base`` that these parameters make, for stores and statistics. None: the
        identity.
    """

    shapes: Mapping[str, tuple[int, ...]]
    init: Callable[[np.random.Generator], Params]
    apply: Callable[..., Tensor]
    accumulate: Callable[..., None] | None = None
    buffers: tuple[str, ...] = ()
    unshared: tuple[str, ...] = ()
    activations: int | None = None
    features: Callable[..., Tensor] | None = None
    head: Callable[[Params, Tensor], Tensor] | None = None
    heads: tuple[str, ...] = ()
    noise: Mapping[str, tuple[int, ...]] = {}
    undivided: tuple[str, ...] = ()
    base: Net | None = None
    whole: Callable[[Params], Params] | None = None


def layer_of(name: str) -> str:
    """Layer that a parameter belongs to: ``"fc1.weight"`` to ``"fc1"``."""
    return name.rpartition(".")[0]


def base_of(net: Net) -> Net:
    """The network whose weights ``net.whole`` gives: itself, if it is not composed."""
    return net if net.base is None else net.base


def whole(net: Net, params: Params) -> Params:
    """The parameters (client, ...) of :func:`base_of` that a network's parameters make."""
    return params if net.whole is None else net.whole(params)


def layers(net: Net) -> dict[str, int]:
    """Layers of the network in order, with their numbers of hidden units; the output layer is the last."""
    return {layer_of(name): shape[0] for name, shape in base_of(net).shapes.items()}


def head_layers(net: Net) -> list[str]:
    """Layers that give the outputs: the last one, or one a component of a mixture."""
    return list(net.heads) or list(layers(net))[-1:]


def n_outputs(net: Net) -> int:
    """Number of outputs, the units of the output layer.

    Examples
    --------
    >>> from fedstat.fl.nets import mlp
    >>> n_outputs(mlp([784, 200, 10])), n_features(mlp([784, 200, 10]))
    (10, 200)
    """
    return layers(net)[head_layers(net)[-1]]


def n_features(net: Net) -> int:
    """Number of features that ``net.features`` gives; ValueError if it has none."""
    if net.features is None or net.head is None:
        raise ValueError(
            "the method needs a network that is cut into features and one dense output layer, but this one has no "
            "features. Those of nets.NETS have; a module has if its last layer is a torch.nn.Linear."
        )
    return math.prod(base_of(net).shapes[f"{head_layers(net)[-1]}.weight"][1:])


def in_training(net: Net, weight: Tensor, noise: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """What ``apply`` of this network takes in training beside parameters and x, as keyword arguments.

    Parameters
    ----------
    net : Net
    weight : Tensor (client, sample)
        0 where a sample is padding.
    noise : mapping from name to Tensor (client, sample, *shape), optional
    """
    given: dict[str, Any] = {"live": weight > 0} if net.buffers else {}
    return given | {"noise": noise} if net.noise else given


def require(net: Net) -> Net:
    """Return the network, or raise ValueError if what it says of itself cannot be.

    Raises
    ------
    ValueError
        If noise has no name or a shape that is no tuple of integers from 1; if a layer has parameters that its
        ``base`` does not know of, ``undivided`` names none of the parameters, or ``heads`` none of the layers.
    """
    for name, shape in net.noise.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"noise of a network must have a name, which names the stream it is drawn from, but got {name!r}"
            )
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 1 for n in shape):
            raise ValueError(
                f"noise {name!r} must have one sample's shape, a tuple of integers >= 1, but got {shape!r}"
            )
    known = layers(net)
    for kind, named in (("heads", net.heads), ("parameters of", dict.fromkeys(map(layer_of, net.shapes)))):
        if unknown := [layer for layer in named if layer not in known]:
            raise ValueError(f"the network has {kind} {unknown}, but its layers are {list(known)}")
    if unknown := [name for name in net.undivided if name not in net.shapes]:
        raise ValueError(f"undivided names {unknown}, but the network's parameters are {list(net.shapes)}")
    return net
