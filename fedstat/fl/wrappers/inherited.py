"""A model of each client's own that lasts between rounds, with which it predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstat import _random
from fedstat._later import torch
from fedstat.fl.algorithm import Memory, Phase, RoundContext, Samples, Start
from fedstat.fl.nets import Net, Params

if TYPE_CHECKING:
    from torch import Tensor

TIMES = "times"
"""Rounds in which a client has trained, beside its model in the memory."""


def beginning(start: Start) -> Memory:
    """The memory before the first round: every client's model is the common start."""
    n, first = len(start.sizes), start.net.init(_random.generator(start.seed, "start"))
    models = {name: p.to(start.device).expand(n, *p.shape).clone() for name, p in first.items()}
    return Memory({TIMES: torch.zeros(n, device=start.device), **models})


def averaged(up: RoundContext, past: Tensor) -> Memory:
    """The memory after a round: of each client ``past`` (client,) of its old model, the rest of the one it trained."""
    of = up.memory.clients
    now = {name: torch.lerp(p, of[name], past.view(-1, *(1,) * (p.ndim - 1))) for name, p in up.after.items()}
    return Memory({TIMES: of[TIMES] + 1, **now})


def model(memory: Memory) -> Params:
    """The clients' models in the memory."""
    return {name: p for name, p in memory.clients.items() if name != TIMES}


def _own(_: Net, params: Params, samples: Samples, memory: Memory) -> Tensor:
    has = memory.clients[TIMES] > 0
    for name, p in model(memory).items():
        params[name].copy_(torch.where(has.view(-1, *(1,) * (p.ndim - 1)), p, params[name]))
    return samples.y


TO_PREDICT = (Phase(0, weigh=_own),)
"""For ``Algorithm.finetune``: a client predicts with the model in its memory or, if it never trained, its download."""
