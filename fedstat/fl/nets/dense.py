"""Dense layers of stacked clients (shapes, initial parameters as in ``torch.nn.Linear``, both passes), and MLPs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets.base import Gradient, Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def shapes(layer: str, n_in: int, n_out: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a dense layer's parameters."""
    return {f"{layer}.weight": (n_out, n_in), f"{layer}.bias": (n_out,)}


def norm_shapes(layer: str, units: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters that normalize a layer's outputs."""
    return {f"{layer}.scale": (units,), f"{layer}.shift": (units,)}


def weights(layers: Iterable[str]) -> tuple[str, ...]:
    """Return the names of dense layers' weights."""
    return tuple(f"{layer}.weight" for layer in layers)


def draw_parameters(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Params:
    """Draw initial parameters of dense layers, convolutions and normalization as in ``torch.nn``, in this order."""
    start: Params = {}
    for name, shape in shapes.items():
        layer, kind = name.split(".")
        if kind in ("weight", "bias"):
            start |= uniform(rng, {name: shape}, 1 / math.sqrt(math.prod(shapes[f"{layer}.weight"][1:])))
        else:
            start[name] = torch.full(shape, 1.0 if kind in ("scale", "running_var") else 0.0)
    return start


def uniform(rng: np.random.Generator, shapes: Mapping[str, Sequence[int]], bound: float) -> Params:
    """Draw initial parameters from U(−bound, bound)."""
    return {name: torch.from_numpy(rng.uniform(-bound, bound, shape)).float() for name, shape in shapes.items()}


def linear(params: Params, layer: str, h: Tensor) -> Tensor:
    """Return the outputs (client, row, out) of a dense layer for h (client, row, in); see ``Net.thin``."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"].unsqueeze(1)
    if (left_factor := params.get(f"{layer}.left")) is None:
        return torch.baddbmm(bias, h, weight.mT)
    right_factor = params[f"{layer}.right"]
    if not cheaper(h.shape[1], weight.shape[1:]):
        return torch.baddbmm(bias, h, torch.baddbmm(weight, left_factor, right_factor).mT)
    return torch.baddbmm(torch.baddbmm(bias, h, weight.mT), torch.bmm(h, right_factor.mT), left_factor.mT)


def cheaper(rows: int, shape: Sequence[int]) -> bool:
    """Return True if multiplying ``rows`` rows by two thin factors takes less work than multiplying the factors."""
    return rows * sum(shape) < math.prod(shape)


def below(params: Params, layer: str, delta: Tensor) -> Tensor:
    """Return the derivative (client, row, in) at the inputs of a dense layer, from the derivative at its outputs."""
    derivative = torch.bmm(delta, params[f"{layer}.weight"])
    if (left_factor := params.get(f"{layer}.left")) is None:
        return derivative
    return derivative.baddbmm_(torch.bmm(delta, left_factor), params[f"{layer}.right"])


def accumulate(params: Params, layer: str, h: Tensor, delta: Tensor, into: Params, beta: float, alpha: float) -> None:
    """Set into ← beta·into + alpha·∂loss for a dense layer's parameters, from inputs and derivative at the outputs."""
    weight, bias, left_name, right_name = (f"{layer}.{kind}" for kind in ("weight", "bias", "left", "right"))
    # Each factor's derivative needs the other factor before its update.
    left_inner = torch.bmm(h, params[right_name].mT) if left_name in into else None
    right_outer = torch.bmm(delta, params[left_name]) if right_name in into else None
    products = ((weight, delta, h), (left_name, delta, left_inner), (right_name, right_outer, h))
    for name, outer, inner in products:
        if name in into and outer is not None and inner is not None:
            _add_product(into[name], outer.mT, inner, beta, alpha)
    if bias in into:
        _scaled(into[bias], beta).add_(delta.sum(1, dtype=into[bias].dtype), alpha=alpha)


def _add_product(into: Tensor, outer: Tensor, inner: Tensor, beta: float, alpha: float) -> None:
    if outer.dtype == inner.dtype == into.dtype:
        into.baddbmm_(outer, inner, beta=beta, alpha=alpha)
    else:  # autocast casts the factors of bmm, but not of baddbmm_, which adds in place
        _scaled(into, beta).add_(torch.bmm(outer, inner), alpha=alpha)


def _scaled(into: Tensor, beta: float) -> Tensor:
    return into if beta == 1 else into.mul_(beta)


def linear_autograd(params: Params, layer: str, h: Tensor) -> Tensor:
    """Return the outputs of :func:`linear` for a layer that autograd differentiates, in half the backward time."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    factors = [params[f"{layer}.{kind}"] for kind in ("left", "right") if f"{layer}.{kind}" in params]
    if factors and not cheaper(h.shape[1], weight.shape[1:]):
        weight, factors = torch.baddbmm(weight, *factors), []
    if len(h) == 1:
        # squeeze, not [0]: the derivative of squeeze is a view, that of [0] a copy into zeros of the stacked size.
        h = h.squeeze(0)
        out = functional.linear(h, weight.squeeze(0), bias.squeeze(0))
        if factors:
            left_factor, right_factor = (p.squeeze(0) for p in factors)
            out = out + functional.linear(functional.linear(h, right_factor), left_factor)
        return out.unsqueeze(0)
    # The weight is the left operand, so that autograd returns its gradient in the weight's memory order.
    out = torch.baddbmm(bias.unsqueeze(2), weight, h.mT)
    if factors:
        out = torch.baddbmm(out, factors[0], torch.bmm(factors[1], h.mT))
    return out.mT


def layer_norm(params: Params, layer: str, h: Tensor) -> Tensor:
    """Normalize h (client, row, unit) over its units, with each client's scale and shift."""
    normalized = functional.layer_norm(h, h.shape[-1:])
    return torch.addcmul(params[f"{layer}.shift"].unsqueeze(1), normalized, params[f"{layer}.scale"].unsqueeze(1))


def with_head(
    shapes: Mapping[str, tuple[int, ...]],
    init: Callable[[np.random.Generator], Params],
    features: Callable[[Params, Tensor], Tensor],
    *layers: str,
) -> Net:
    """Build a network from ``features`` (client, sample, feature) and a dense output layer, the last of ``layers``."""

    def head(params: Params, h: Tensor) -> Tensor:
        return linear(params, layers[-1], h)

    def apply(params: Params, x: Tensor) -> Tensor:
        return head(params, features(params, x))

    return Net(shapes, init, apply, features=features, head=head, thin=weights(layers))


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
            inputs.append(torch.relu_(linear(params, name, inputs[-1])))
        return inputs

    def features(params: Params, x: Tensor) -> Tensor:
        return inputs_of_layers(params, x)[-1]

    def accumulate_layers(
        params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float
    ) -> None:
        inputs = inputs_of_layers(params, x)
        delta = gradient(linear(params, names[-1], inputs[-1]))
        for name, h in zip(reversed(names), reversed(inputs), strict=True):
            # The layer below needs this weight before its update.
            lower_delta = None if h is inputs[0] else below(params, name, delta)
            accumulate(params, name, h, delta, into, beta, alpha)
            if lower_delta is not None:
                delta = torch.ops.aten.threshold_backward(lower_delta, h, 0)

    layer_shapes = dict(chain.from_iterable(shapes(*layer).items() for layer in layers))
    net = with_head(layer_shapes, partial(draw_parameters, layer_shapes), features, *names)
    return net._replace(accumulate=accumulate_layers, inputs=sizes[0])
