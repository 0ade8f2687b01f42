"""Dense layers of stacked clients: shapes, starting values as in ``torch.nn.Linear``, and networks that end in one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedstat._utils.lazy import functional, torch
from fedstat.fl.nets.base import Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def shapes(layer: str, n_in: int, n_out: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a dense layer's parameters."""
    return {f"{layer}.weight": (n_out, n_in), f"{layer}.bias": (n_out,)}


def norm_shapes(layer: str, units: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a normalisation of a layer's outputs."""
    return {f"{layer}.scale": (units,), f"{layer}.shift": (units,)}


def weights(layers: Iterable[str]) -> tuple[str, ...]:
    """Names of dense layers' weights."""
    return tuple(f"{layer}.weight" for layer in layers)


def draw_parameters(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Params:
    """Draw starting values as in ``torch.nn`` of dense layers, convolutions and normalisation, in this order."""
    start: Params = {}
    for name, shape in shapes.items():
        layer, kind = name.split(".")
        if kind in ("weight", "bias"):
            start |= uniform(rng, {name: shape}, 1 / math.sqrt(math.prod(shapes[f"{layer}.weight"][1:])))
        else:
            start[name] = torch.full(shape, 1.0 if kind in ("scale", "running_var") else 0.0)
    return start


def uniform(rng: np.random.Generator, shapes: Mapping[str, Sequence[int]], bound: float) -> Params:
    """Starting values from U(−bound, bound)."""
    return {name: torch.from_numpy(rng.uniform(-bound, bound, shape)).float() for name, shape in shapes.items()}


def linear(params: Params, layer: str, h: Tensor) -> Tensor:
    """Outputs (client, row, out) of a dense layer for h (client, row, in); see ``Net.thin``."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"].unsqueeze(1)
    if (left := params.get(f"{layer}.left")) is None:
        return torch.baddbmm(bias, h, weight.mT)
    right = params[f"{layer}.right"]
    if not cheaper(h.shape[1], weight.shape[1:]):
        return torch.baddbmm(bias, h, torch.baddbmm(weight, left, right).mT)
    return torch.baddbmm(torch.baddbmm(bias, h, weight.mT), torch.bmm(h, right.mT), left.mT)


def cheaper(rows: int, shape: Sequence[int]) -> bool:
    """Whether so many rows take fewer products with two thin factors than the product of the factors takes."""
    return rows * sum(shape) < math.prod(shape)


def below(params: Params, layer: str, delta: Tensor) -> Tensor:
    """Derivative (client, row, in) at the inputs of a dense layer, from that at its outputs."""
    found = torch.bmm(delta, params[f"{layer}.weight"])
    if (left := params.get(f"{layer}.left")) is None:
        return found
    return found.baddbmm_(torch.bmm(delta, left), params[f"{layer}.right"])


def accumulate(params: Params, layer: str, h: Tensor, delta: Tensor, into: Params, beta: float, alpha: float) -> None:
    """Into ← beta·into + alpha·∂loss for a dense layer's parameters, from inputs and derivative at the outputs."""
    weight, bias, left, right = (f"{layer}.{kind}" for kind in ("weight", "bias", "left", "right"))
    # Each factor's derivative needs the other before it moves.
    seen = torch.bmm(h, params[right].mT) if left in into else None
    sent = torch.bmm(delta, params[left]) if right in into else None
    for name, outer, inner in ((weight, delta, h), (left, delta, seen), (right, sent, h)):
        if name in into and outer is not None and inner is not None:
            _add_product(into[name], outer.mT, inner, beta, alpha)
    if bias in into:
        _scaled(into[bias], beta).add_(delta.sum(1, dtype=into[bias].dtype), alpha=alpha)


def _add_product(into: Tensor, outer: Tensor, inner: Tensor, beta: float, alpha: float) -> None:
    if outer.dtype == inner.dtype == into.dtype:
        into.baddbmm_(outer, inner, beta=beta, alpha=alpha)
    else:  # autocast rounds the factors of a product, but of none that adds in place
        _scaled(into, beta).add_(torch.bmm(outer, inner), alpha=alpha)


def _scaled(into: Tensor, beta: float) -> Tensor:
    return into if beta == 1 else into.mul_(beta)


def linear_autograd(params: Params, layer: str, h: Tensor) -> Tensor:
    """The same as :func:`linear`, for a layer that autograd differentiates: its backward pass takes half the time."""
    weight, bias = params[f"{layer}.weight"], params[f"{layer}.bias"]
    factors = [params[f"{layer}.{kind}"] for kind in ("left", "right") if f"{layer}.{kind}" in params]
    if factors and not cheaper(h.shape[1], weight.shape[1:]):
        weight, factors = torch.baddbmm(weight, *factors), []
    if len(h) == 1:
        # squeeze, not [0]: the derivative of squeeze is a view, that of [0] a copy into zeros of the stacked size.
        h = h.squeeze(0)
        out = functional.linear(h, weight.squeeze(0), bias.squeeze(0))
        if factors:
            left, right = (p.squeeze(0) for p in factors)
            out = out + functional.linear(functional.linear(h, right), left)
        return out.unsqueeze(0)
    # Weights on the left, so that autograd returns their gradient in their own memory order.
    out = torch.baddbmm(bias.unsqueeze(2), weight, h.mT)
    if factors:
        out = torch.baddbmm(out, factors[0], torch.bmm(factors[1], h.mT))
    return out.mT


def layer_norm(params: Params, layer: str, h: Tensor) -> Tensor:
    """Normalise h (client, row, unit) over its units, with each client's scale and shift."""
    plain = functional.layer_norm(h, h.shape[-1:])
    return torch.addcmul(params[f"{layer}.shift"].unsqueeze(1), plain, params[f"{layer}.scale"].unsqueeze(1))


def with_head(
    shapes: Mapping[str, tuple[int, ...]],
    init: Callable[[np.random.Generator], Params],
    features: Callable[[Params, Tensor], Tensor],
    *layers: str,
) -> Net:
    """Network of features (client, sample, feature) and a dense output layer, the last of its dense ``layers``."""

    def head(params: Params, h: Tensor) -> Tensor:
        return linear(params, layers[-1], h)

    def apply(params: Params, x: Tensor) -> Tensor:
        return head(params, features(params, x))

    return Net(shapes, init, apply, features=features, head=head, thin=weights(layers))
