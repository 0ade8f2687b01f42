"""The record of a network: pure functions of parameters with a leading client dimension."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.labelled.layer_names import is_table

if TYPE_CHECKING:
    from torch import Tensor

Params = dict[str, "Tensor"]
"""Parameters by name, "layer.parameter"; every tensor is (client, ...)."""

Gradient = Callable[["Tensor"], "Tensor"]
"""From outputs (client, sample, output), or features, to the derivative of the loss at them."""

_BLOCK = 256  # samples
_STATISTICS = ("running_mean", "running_var")
_NORMALISATION = ("scale", "shift", *_STATISTICS)


class Piece(NamedTuple):
    """A tensor of a user's module as a part of a parameter.

    Attributes
    ----------
    name : str
        The parameter; "" for a count of batches, which is not a parameter and always 0.
    way : {"", "transposed", "gates", "last", "channels", "number"}
        Order of the tensor's entries in the parameter. "transposed": the last two axes are exchanged. "gates":
        (gate·unit, ...) becomes (unit, gate, ...). "last": the last axis becomes the first. "channels": the weight of a
        transposed convolution, (group·in, out, ...), becomes (group·out, in, ...). "number": () becomes (1,).
    low, high : int, optional
        Range of the tensor on the parameter's last axis, by default the complete axis. ``high`` None: the single index
        ``low``, and the tensor lacks this axis.
    parts : int
        Number of gates or groups.
    """

    name: str
    way: str = ""
    low: int | None = None
    high: int | None = None
    parts: int = 1

    def of(self, p: Tensor, lead: int = 0) -> Tensor:
        """Return the module's tensor from the parameter p, whose first ``lead`` axes stay, such as clients."""
        p = self.entries(p)
        p = p if self.low is None or self.high is not None else p.squeeze(-1)
        if self.way == "gates":
            return p.transpose(lead, lead + 1).flatten(lead, lead + 1)
        if self.way == "last":
            return p.movedim(-1, lead)
        return p.select(lead, 0) if self.way == "number" else self._exchanged(p, lead)

    def entries(self, p: Tensor) -> Tensor:
        """Return the range of the tensor on the last axis of the parameter p."""
        if self.low is None:
            return p
        return p[..., self.low : self.low + 1 if self.high is None else self.high]

    def part(self, tensor: Tensor) -> Tensor:
        """Return the tensor as :meth:`entries` of one client's parameter holds it, the inverse of :meth:`of`."""
        if self.way == "gates":
            tensor = tensor.unflatten(0, (self.parts, -1)).transpose(0, 1)
        elif self.way == "last":
            tensor = tensor.movedim(0, -1)
        else:
            tensor = tensor.unsqueeze(0) if self.way == "number" else self._exchanged(tensor)
        return tensor.unsqueeze(-1) if self.low is not None and self.high is None else tensor

    def _exchanged(self, p: Tensor, lead: int = 0) -> Tensor:
        """Return a tensor with two axes exchanged, in either direction."""
        if self.way == "transposed":
            return p.mT
        if self.way == "channels":
            return p.unflatten(lead, (self.parts, -1)).transpose(lead + 1, lead + 2).flatten(lead, lead + 1)
        return p


class Net(NamedTuple):
    """A network as pure functions of stacked parameters.

    Attributes
    ----------
    shapes : mapping from "layer.parameter" to tuple of int
        Shapes of one client's parameters; the output layer comes last. Axis 0 of every parameter, except those in
        ``undivided``, is its layer's hidden units (neurons, output channels), so that one boolean per unit splits the
        layer.
    init : callable (numpy Generator) -> dict of Tensor (unit, ...)
        Draws one client's initial parameters, without the client dimension.
    apply : callable (params, x, *, live, noise) -> Tensor
        Maps ``x`` (client, sample, ...) to outputs (client, sample, output); differentiable. Only a network with
        ``buffers`` or ``by_batch`` takes ``live``: None, or in training a bool (client, sample), True for real samples
        and False for padding. The network then uses the statistics of the real samples and updates its buffers in
        place. Only a network with ``noise`` takes ``noise``. See :func:`in_training`.
    accumulate : callable, optional
        ``accumulate(params, x, gradient, into, beta, alpha)`` runs the network forward and gets the derivative of the
        loss at the outputs from ``gradient``. For every name in ``into`` it sets into ← beta·into + alpha·∂loss.
        ``into`` may be ``params`` itself: with beta=1, alpha=−lr this is an SGD step without a gradient in memory. It
        takes ``live`` and ``noise`` as ``apply`` does. Networks without it are differentiated by autograd.
    buffers : tuple of str
        Names in ``shapes`` that no gradient reaches: running statistics of batch normalization.
    unshared : tuple of str
        Names in ``shapes`` that no algorithm shares: batch statistics, if they are personal.
    activations : int, optional
        Number of values that one sample's forward pass stores; by default the number of hidden units.
    features, head : callable, optional
        The network in two parts. ``features(params, x)``, which takes ``live`` and ``noise`` as ``apply`` does, returns
        the inputs of the output layer (client, sample, feature). ``head(params, h)`` returns the output layer's outputs
        (client, sample, output). Together they equal ``apply`` to the bit. ``features`` reads no parameter of the
        output layer, and ``head`` reads no other. None: the network has no single output layer.
    heads : tuple of str
        Output layers, if not only the last layer: a mixture has one per component.
    noise : mapping from name to tuple of int
        Names and shapes of the uniform values in (0, 1) drawn for each sample in training. ``apply`` gets them as
        ``noise``, a mapping from name to Tensor (client, sample, *shape), which do not depend on other clients. In
        evaluation ``noise`` is None, and the network is deterministic.
    undivided : tuple of str
        Names in ``shapes`` whose axis 0 is not their layer's units: no mask by unit applies to them.
    base : Net, optional
        The network whose weights are composed of these parameters, see :func:`fedstat.fl.wrappers.composed.composed`;
        its layers and units are equal.
    whole : callable (params) -> Params, optional
        Composes the parameters (client, ...) of ``base``, for stores and statistics. None: the identity.
    thin : tuple of str
        Weights (output, input) to which parameters may add two thin factors: with "fc1.left" (client, output, r) and
        "fc1.right" (client, r, input) beside "fc1.weight", the layer's weight is weight + left @ right. ``into`` of
        ``accumulate`` may then name the factors, too.
    constants : callable (params, moving) -> Params, optional
        Computes values (client, ...) that are constant while only the parameters named in ``moving`` change, by names
        that no parameter has. ``apply`` and ``accumulate`` use them if they are among their parameters.
    pieces : mapping from name to Piece
        Tensors of a user's module, by their names in it; see :func:`fedstat.fl.nets.from_module`.
    inputs : int, optional
        Number of values of one sample, such as 784; None in networks of tokens, or if it is unknown.
    by_batch : bool
        True: in training, results depend on the real samples of a batch together, or differ from evaluation. ``apply``
        takes ``live``.
    fixed : mapping from name to Tensor (...)
        Constant tensors in the state_dict of a user's module, of any shape and equal for all clients, by their names.
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
    thin: tuple[str, ...] = ()
    constants: Callable[[Params, Collection[str]], Params] | None = None
    pieces: Mapping[str, Piece] = {}
    inputs: int | None = None
    by_batch: bool = False
    fixed: Mapping[str, Tensor] = {}


def derive(net: Net, **fields: Any) -> Net:
    """Return a network with new parameters that calls the functions of ``net``.

    Parameters
    ----------
    net : Net
    **fields
        ``shapes``, ``init``, ``apply``, and other fields of the new network. Further fields, such as buffers and noise,
        are taken from ``net``, except ``accumulate``, ``features``, ``head``, ``constants``, ``thin`` and ``pieces``,
        which do not hold for other parameters.

    Examples
    --------
    >>> from fedstat.fl.nets import mlp
    >>> net = mlp([4, 3, 2])
    >>> twice = derive(net, apply=lambda params, x: 2 * net.apply(params, x))
    >>> twice.inputs, net.accumulate is None, twice.accumulate is None
    (4, False, True)
    """
    common = net._replace(accumulate=None, features=None, head=None, constants=None, thin=(), pieces={})
    return common._replace(**fields)


def layer_of(name: str) -> str:
    """Return the layer of a parameter: ``"fc1"`` of ``"fc1.weight"``."""
    return name.rpartition(".")[0]


def base_of(net: Net) -> Net:
    """Return the network of the composed weights, whose parameters ``net.whole`` returns; else ``net`` itself."""
    return net if net.base is None else net.base


def whole(net: Net, params: Params) -> Params:
    """Compose the parameters (client, ...) of :func:`base_of` from a network's parameters."""
    return params if net.whole is None else net.whole(params)


def layers(net: Net) -> dict[str, int]:
    """Return the layers of the network in order, with their numbers of hidden units; the output layer comes last."""
    sizes: dict[str, int] = {}
    for name, shape in base_of(net).shapes.items():
        sizes.setdefault(layer_of(name), shape[0])  # of the first: later ones may be undivided
    return sizes


def head_layers(net: Net) -> list[str]:
    """Return the output layers: the last layer, or one per component of a mixture."""
    return list(net.heads) or list(layers(net))[-1:]


def output_layer(net: Net) -> str:
    """Return the output layer, or the last of several."""
    return head_layers(net)[-1]


def head_parameters(net: Net) -> list[str]:
    """Return the parameters of the output layers."""
    heads = head_layers(net)
    return [name for name in net.shapes if layer_of(name) in heads]


def normalisation(net: Net) -> list[str]:
    """Return the parameters of normalization, named "<layer>.scale", ".shift", ".running_mean" or ".running_var".

    All networks of this package use these names, and :func:`fedstat.fl.nets.from_module` gives them to users' modules.
    A user's :class:`Net` should use them, too.

    Examples
    --------
    >>> from fedstat.fl.nets import lenet
    >>> normalisation(lenet((1, 16, 16), 3, norm="group"))
    ['conv1.scale', 'conv1.shift', 'conv2.scale', 'conv2.shift']
    """
    return [name for name in net.shapes if name.rpartition(".")[2] in _NORMALISATION]


def is_statistic(name: str) -> bool:
    """Return True for a running statistic of batch normalization."""
    return name.rpartition(".")[2] in _STATISTICS


def n_outputs(net: Net) -> int:
    """Return the number of outputs, the units of the output layer.

    Examples
    --------
    >>> from fedstat.fl.nets import mlp
    >>> n_outputs(mlp([784, 200, 10])), n_features(mlp([784, 200, 10]))
    (10, 200)
    """
    return layers(net)[output_layer(net)]


def n_features(net: Net) -> int:
    """Return the number of features that ``net.features`` returns, or raise ValueError if the network has none."""
    if net.features is None or net.head is None:
        raise ValueError(
            "the algorithm needs a network with features and one dense output layer, but this network has no features. "
            "Use a network of nets.NETS, or a module whose last layer is a torch.nn.Linear."
        )
    return math.prod(base_of(net).shapes[f"{output_layer(net)}.weight"][1:])


def require_uncomposed(net: Net, method: str = "the algorithm") -> Net:
    """Return the network, or raise ValueError, naming ``method``, if its weights are composed of other parameters."""
    if net.base is not None:
        raise ValueError(
            f"{method} needs a network whose weights are its parameters, but this network composes its weights. Use a "
            "network without factors."
        )
    return net


def sample_blocks(n: int) -> Iterator[slice]:
    """Yield slices of n samples, at most 256 each, which a network runs forward at a time in evaluation."""
    for low in range(0, n, _BLOCK):
        yield slice(low, min(low + _BLOCK, n))


def forward(net: Net, params: Params, x: Tensor) -> Tensor:
    """Return the outputs (client, sample, output) of x (client, sample, ...) in evaluation, by blocks of samples."""
    with torch.no_grad():
        return torch.cat([net.apply(params, x[:, block]) for block in sample_blocks(x.shape[1])], 1)


def apply_arguments(net: Net, live: Tensor | None, noise: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return the arguments ``live`` and ``noise`` as far as ``apply`` of this network takes them."""
    arguments: dict[str, Any] = {"live": live} if net.buffers or net.by_batch else {}
    return arguments | {"noise": noise} if net.noise else arguments


def in_training(net: Net, weight: Tensor, noise: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return the keyword arguments of the network's ``apply`` in training.

    Parameters
    ----------
    net : Net
    weight : Tensor (client, sample)
        0 for padding.
    noise : mapping from name to Tensor (client, sample, *shape), optional
    """
    return apply_arguments(net, weight > 0 if net.buffers or net.by_batch else None, noise)


def accumulate_by_autograd(
    apply: Callable[..., Tensor],
    params: Params,
    x: Tensor,
    gradient: Gradient,
    into: Params,
    beta: float,
    alpha: float,
    **arguments: Any,
) -> None:
    """Do what ``Net.accumulate`` does, for a network that only has ``apply``.

    Parameters
    ----------
    apply : callable (Params, Tensor) -> Tensor (client, sample, output)
    params : Params (client, ...)
    x : Tensor (client, sample, ...)
    gradient : callable (Tensor (client, sample, output)) -> Tensor (client, sample, output)
        Maps the outputs to the derivative of the loss at them.
    into : Params (client, ...)
        Set in place to beta · into + alpha · ∂loss, for its names.
    beta, alpha : float
    **arguments
        Further arguments of ``apply``.
    """
    # .data, not detach(): chunks are views of one tensor, and another thread's step must not change the leaves' version
    # counts.
    leaves = {name: p.data.requires_grad_(name in into) for name, p in params.items()}
    out = apply(leaves, x, **arguments)
    at_outputs = gradient(out.detach().float().clone()).to(out)
    grads = torch.autograd.grad(
        out, [leaves[name] for name in into], at_outputs, allow_unused=True, materialize_grads=True
    )
    for current, grad in zip(into.values(), grads, strict=True):
        current.mul_(beta).add_(grad, alpha=alpha)


def started(net: Net, weights: Mapping[str, Any]) -> Net:
    """Return the network with given initial parameters: pre-trained weights, or weights of other clients.

    Parameters
    ----------
    net : Net
    weights : mapping from "layer.parameter" to Tensor, array or DataArray
        One client's values in the shapes (unit, ...) of :func:`fedstat.fl.state_dict`; embeddings are (token,
        dimension). Parameters that are not named keep their initial values. DataArrays are as in stores, units first,
        with flat kernels: ``{"conv1.weight": run["weights/conv1/w"].isel(checkpoint=-1, client=0)}``.

    Raises
    ------
    ValueError
        If the network lacks a named parameter, or the number of its values differs.

    Examples
    --------
    >>> from fedstat.fl.nets import mlp
    >>> net = started(mlp([4, 3, 2]), {"fc2.bias": [1.0, 2.0]})
    >>> net.init(np.random.default_rng(0))["fc2.bias"]
    tensor([1., 2.])
    """
    start = {}
    empty = {name: torch.empty(shape, device="meta") for name, shape in net.shapes.items()}
    for name, values in weights.items():
        shape = net.shapes[check.choice("a parameter to start from", name, list(net.shapes))]
        table = is_table(name, empty) and "unit" not in getattr(values, "dims", ())
        shape = shape[::-1] if table else shape
        value = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
        if value.numel() != math.prod(shape) or (value.ndim and value.shape[0] != shape[0]):
            raise ValueError(f"{name!r} must start from values of shape {shape}, but got {tuple(value.shape)}")
        value = value.detach().float().reshape(shape)
        start[name] = (value.mT if table else value).clone(memory_format=torch.contiguous_format)
    return net._replace(init=lambda rng: dict(net.init(rng)) | {name: value.clone() for name, value in start.items()})


def require_net(net: Net) -> Net:
    """Return the network, or raise ValueError if its description is inconsistent.

    Raises
    ------
    ValueError
        If noise lacks a name, or if its shape is not a tuple of integers >= 1; if ``base`` lacks the layer of a
        parameter, if ``undivided`` names an unknown parameter, or if ``heads`` names an unknown layer.
    """
    for name, shape in net.noise.items():
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"noise of a network must have a name, which also names its random stream, but got {name!r}"
            )
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 1 for n in shape):
            raise ValueError(
                f"noise {name!r} must have one sample's shape, a tuple of integers >= 1, but got {shape!r}"
            )
    names = layers(net)
    for kind, used in (("heads", net.heads), ("parameters of", dict.fromkeys(map(layer_of, net.shapes)))):
        if unknown := [layer for layer in used if layer not in names]:
            raise ValueError(f"the network has {kind} {unknown}, but its layers are {list(names)}")
    if unknown := [name for name in net.undivided if name not in net.shapes]:
        raise ValueError(f"undivided names {unknown}, but the network's parameters are {list(net.shapes)}")
    return net
