"""Networks of several copies of one, and models that clients inherit from earlier rounds."""

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
    """Return the values of one copy, by their names in the network."""
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
        One for each copy; no prefix begins with another.
    more : mapping from name to tuple of int, optional
        Shapes of parameters that belong to no copy; they come first.
    **fields
        ``init``, ``apply``, ``accumulate`` and ``base`` of the new network, and other fields that differ from those of
        one copy.
    """
    more = more or {}

    def every(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(prefix + name for prefix in prefixes for name in names)

    def whole(params: Params) -> Params:
        weights = [nets.whole(net, part(params, prefix)) for prefix in prefixes]
        return {name: params[name] for name in more} | join(weights, prefixes)

    shapes = {**more, **join([net.shapes] * len(prefixes), prefixes)}
    heads, weights = every(nets.head_layers(net)), whole if net.whole else None
    names = {name: every(getattr(net, name)) for name in ("buffers", "unshared", "undivided", "thin")}
    return nets.derive(net, shapes=shapes, heads=heads, whole=weights, **names, **fields)


GLOBAL, OWN = "global_", "own_"
PREFIXES = (GLOBAL, OWN)


def pair(net: Net) -> Net:
    """Two copies of a network, "global_<...>" and "own_<...>", which start equal.

    Its outputs (client, sample, 2·output) are those of the global and of the own copy side by side. A gradient is taken
    of the copies that train alone: those that do not are not even run.
    """

    def apply(params: Params, x: Tensor, **given: Any) -> Tensor:
        return torch.cat([net.apply(part(params, prefix), x, **given) for prefix in PREFIXES], -1)

    def accumulate(
        params: Params, x: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float, **given: Any
    ) -> None:
        one = net.accumulate or partial(nets.accumulate_by_autograd, net.apply)
        for prefix in PREFIXES:
            if moving := part(into, prefix):
                one(part(params, prefix), x, gradient, moving, beta, alpha, **given)

    def init(rng: np.random.Generator) -> Params:
        start = net.init(rng)
        return {prefix + name: p.clone() for prefix in PREFIXES for name, p in start.items()}

    base = None if net.base is None else pair(net.base)
    return copies(net, PREFIXES, init=init, apply=apply, accumulate=accumulate, base=base)


def pair_loss(inner: Loss, net: Net) -> Loss:
    """The loss of a :func:`pair`: in training of each copy, else of the own one, with which clients predict."""
    n = nets.n_outputs(net)

    def gradient(out: Tensor, y: Tensor, weight: Tensor, *extra: Tensor) -> Tensor:
        return torch.cat([inner.gradient(z.clone(), y, weight, *extra) for z in out.split(n, -1)], -1)

    return loss_of_part(inner, lambda out: out[..., -n:], gradient)


share_global = masks.keep_layers(lambda net: [layer for layer in nets.layers(net) if is_own(layer)])
"""Mask that shares the global copy alone."""


def is_own(name: str) -> bool:
    """Whether a parameter is of the own copy."""
    return name.startswith(OWN)


def counterpart(name: str) -> str:
    """The global copy's parameter for one of the own copy."""
    return GLOBAL + name.removeprefix(OWN)


TIMES = "times"
"""Rounds in which a client has trained, beside its model in the algorithm's state."""


def beginning(context: InitContext) -> AlgorithmState:
    """Return the state before the first round: every client's model is the common start."""
    n, first = len(context.sizes), context.net.init(streams.generator(context.seed, "start"))
    models = {name: p.to(context.device).expand(n, *p.shape).clone() for name, p in first.items()}
    return AlgorithmState({TIMES: torch.zeros(n, device=context.device), **models})


def averaged(context: RoundContext, past: Tensor) -> AlgorithmState:
    """Return the state after a round: ``past`` (client,) of each client's old model, and the rest of its new one."""
    of = context.state.clients
    now = {name: torch.lerp(p, of[name], past.view(-1, *(1,) * (p.ndim - 1))) for name, p in context.after.items()}
    return AlgorithmState({TIMES: of[TIMES] + 1, **now})


def model(state: AlgorithmState) -> Params:
    """Return the clients' models in the state."""
    return {name: p for name, p in state.clients.items() if name != TIMES}


def _own(_: Net, params: Params, samples: Samples, state: AlgorithmState) -> Tensor:
    has = state.clients[TIMES] > 0
    for name, p in model(state).items():
        params[name].copy_(torch.where(has.view(-1, *(1,) * (p.ndim - 1)), p, params[name]))
    return samples.y


TO_PREDICT = (Phase(0, sample_weights=_own),)
"""For ``Algorithm.finetune``: a client predicts with the model in its state or, if it never trained, its download."""
