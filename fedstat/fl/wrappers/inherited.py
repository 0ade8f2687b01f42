"""A model of each client's own that lasts between rounds, with which it predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat import _random
from fedstat._later import torch
from fedstat.fl.algorithm import AlgorithmState, InitContext, Phase, RoundContext, Samples
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor

TIMES = "times"
"""Rounds in which a client has trained, beside its model in the algorithm's state."""


def beginning(context: InitContext) -> AlgorithmState:
    """Return the state before the first round: every client's model is the common start."""
    n, first = len(context.sizes), context.net.init(_random.generator(context.seed, "start"))
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
