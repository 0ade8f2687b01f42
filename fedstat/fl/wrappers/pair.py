"""Networks of several copies of a network, and models that clients inherit from earlier rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import AlgorithmState, InitContext, Phase, RoundContext, Samples
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Gradient, Net, Params

if TYPE_CHECKING:
    from torch import Tensor


def part(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of the copy with this prefix, by their names in the network."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def join(parts: Iterable[Mapping[str, Any]], prefixes: Sequence[str]) -> dict[str, Any]:
    """Return the values of all copies, by their names with the prefix of the copy."""
    pairs = zip(prefixes, parts, strict=True)
    return {prefix + name: value for prefix, values in pairs for name, value in values.items()}


def copies(net: Net, prefixes: Sequence[str], more: Mapping[str, tuple[int, ...]] | None = None, **fields: Any) -> Net:
    """Make a network of several copies of a network, whose parameters have the prefix of their copy.

    Parameters
    ----------
    net : Net
    prefixes : sequence of str
        Prefix of each copy; no prefix begins with another.
    more : mapping from name to tuple of int, optional
        Shapes of parameters that belong to no copy; they come first.
    **fields
        ``init``, ``apply``, ``accumulate`` and ``base`` of the new network, and further fields that do not follow from
        ``net``.
    """
    more = more or {}

    def of_all_copies(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in prefixes for name in names)

    def compose(params: Params) -> Params:
        weights = [nets.whole(net, part(params, prefix)) for prefix in prefixes]
        return {name: params[name] for name in more} | join(weights, prefixes)

    shapes = {**more, **join([net.shapes] * len(prefixes), prefixes)}
    heads, composer = of_all_copies(nets.head_layers(net)), compose if net.whole else None
    names = {name: of_all_copies(getattr(net, name)) for name in ("buffers", "unshared", "undivided", "thin")}
    return nets.derive(net, shapes=shapes, heads=heads, whole=composer, **names, **fields)


GLOBAL, OWN = "global_", "own_"
PREFIXES = (GLOBAL, OWN)


def pair(net: Net) -> Net:
    """Return a network of two copies with equal initial parameters: global "global_<...>" and personal "own_<...>".

    Its outputs (client, sample, 2·output) are the global copy's, then the personal copy's. Copies without parameters in
    ``into`` are not run for a gradient.
    """

    def apply(params: Params, x: Tensor, **arguments: Any) -> Tensor:
        return torch.cat([net.apply(part(params, prefix), x, **arguments) for prefix in PREFIXES], -1)

    def accumulate(
        params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **arguments: Any
    ) -> None:
        accumulate_copy = net.accumulate or partial(nets.accumulate_by_autograd, net.apply)
        for prefix in PREFIXES:
            if moving := part(into, prefix):
                accumulate_copy(part(params, prefix), x, gradient, moving, beta, alpha, **arguments)

    def init(rng: np.random.Generator) -> Params:
        start = net.init(rng)
        return {prefix + name: p.clone() for prefix in PREFIXES for name, p in start.items()}

    base = None if net.base is None else pair(net.base)
    return copies(net, PREFIXES, init=init, apply=apply, accumulate=accumulate, base=base)


def pair_loss(inner: Loss, net: Net) -> Loss:
    """Return the loss of a :func:`pair`: in training each copy's, else the personal copy's, which predicts."""
    n = nets.n_outputs(net)

    def gradient(out: Tensor, y: Tensor, weight: Tensor, *extra: Tensor) -> Tensor:
        return torch.cat([inner.gradient(z.clone(), y, weight, *extra) for z in out.split(n, -1)], -1)

    return loss_of_part(inner, lambda out: out[..., -n:], gradient)


share_global = masks.keep_layers(lambda net: [layer for layer in nets.layers(net) if is_personal(layer)])
"""Mask that shares only the global copy."""


def is_personal(name: str) -> bool:
    """Return True for a parameter of the personal copy."""
    return name.startswith(OWN)


def counterpart(name: str) -> str:
    """Return the global copy's parameter for a parameter of the personal copy."""
    return GLOBAL + name.removeprefix(OWN)


TIMES = "times"
"""Name, in the algorithm's state, of the number of rounds in which a client has trained."""


def beginning(context: InitContext) -> AlgorithmState:
    """Return the state before the first round: every client's model has the common initial parameters."""
    n, first = len(context.sizes), context.net.init(streams.generator(context.seed, "start"))
    models = {name: p.to(context.device).expand(n, *p.shape).clone() for name, p in first.items()}
    return AlgorithmState({TIMES: torch.zeros(n, device=context.device), **models})


def averaged(context: RoundContext, past: Tensor) -> AlgorithmState:
    """Return the state after a round: ``past`` (client,) is the old models' weight, 1 − ``past`` the new models'."""
    old = context.state.clients
    models = {name: torch.lerp(p, old[name], past.view(-1, *(1,) * (p.ndim - 1))) for name, p in context.after.items()}
    return AlgorithmState({TIMES: old[TIMES] + 1, **models})


def model(state: AlgorithmState) -> Params:
    """Return the clients' models in the state."""
    return {name: p for name, p in state.clients.items() if name != TIMES}


def _load_model(_: Net, params: Params, __: Samples, state: AlgorithmState) -> None:
    has_trained = state.clients[TIMES] > 0
    for name, p in model(state).items():
        params[name].copy_(torch.where(has_trained.view(-1, *(1,) * (p.ndim - 1)), p, params[name]))


TO_PREDICT = (Phase(0, on_phase_start=_load_model),)
"""For ``Algorithm.finetune``: a client predicts with the model in its state or, if it never trained, its download."""
