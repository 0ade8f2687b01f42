"""The state of a run between two rounds, and the models of its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._later import torch
from fedstat.fl import checks, kept, masks
from fedstat.fl.algorithm import Memory, Received, Sharing
from fedstat.fl.job import Job
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


class State(NamedTuple):
    """State of a run between two rounds.

    Attributes
    ----------
    round : int
        Rounds done.
    params : Params (client, own unit, ...)
        Clients' own copies of what may be personal; entries that are shared now are out of date until downloaded. A
        mapping for reading, whose values may be copies: rows of idle clients are those of the state before.
    own : mapping from name to int64 Tensor (own unit,) or None
        Units of each parameter that ``params`` holds; None: all. Parameters that are never personal are absent.
    server : Params (...)
        The server's copy of every entry, shared or not.
    sharing : Sharing
    optimizer : Params (client, ...)
        Clients' optimiser state; empty unless it lasts between rounds.
    memory : Memory
        What the algorithm remembers besides models.
    aggregator : any
        The aggregator's state.
    """

    round: int
    params: kept.Clients
    own: dict[str, Tensor | None]
    server: Params
    sharing: Sharing
    optimizer: kept.Clients
    memory: Memory = Memory()
    aggregator: Any = ()


def personal(job: Job, state: State, clients: np.ndarray | None = None, into: Params | None = None) -> Params:
    """Clients' models as they would predict with them now: parameters (client, ...).

    Parameters
    ----------
    job : Job
    state : State
    clients : int array, optional
        All by default.
    into : Params, optional
        Where to write them.
    """
    clients = np.arange(job.clients) if clients is None else clients
    if into is None:
        into = {name: p.new_empty(len(clients), *p.shape) for name, p in state.server.items()}
    mine_of = kept.taken(state.params, clients)
    for name, p in into.items():
        if name not in state.own:
            p.copy_(state.server[name].expand_as(p))
            continue
        mine, units = mine_of(name), state.own[name]
        if units is not None:
            p.copy_(state.server[name].expand_as(p))
            p[:, units] = mine
        elif job.algorithm.mix or job.algorithm.receive:  # already mixed, or for receive to decide
            p.copy_(mine)
        else:
            shared = masks.of_clients(state.sharing.shared[name], state.server[name].ndim, clients)
            torch.where(shared, state.server[name], mine, out=p)
    if job.algorithm.receive:
        _receive(job, state, clients, into)
    return into


def on_disk(state: State) -> list[kept.Kept]:
    """Rows of clients that are not in memory."""
    parts = (state.params, state.optimizer, state.memory.clients)
    return [part for part in parts if isinstance(part, kept.Kept)]


def _receive(job: Job, state: State, clients: np.ndarray, own: Params) -> None:
    """Replace clients' own copies by what the algorithm makes of them."""
    assert job.algorithm.receive is not None  # noqa: S101
    shared = {name: masks.of_clients(m, state.server[name].ndim, clients) for name, m in state.sharing.shared.items()}
    given = Received(job.net, own, state.server, shared, remembered(state, clients))
    fixed = [*state.server.items(), *state.memory.server.items()]
    versions = [p._version for _, p in fixed]
    received = job.algorithm.receive(given)
    for (name, p), version in zip(fixed, versions, strict=True):
        if p._version != version:
            raise ValueError(
                f"method {job.algorithm.name!r}: receive(received) changes the server's {name!r}, of shape "
                f"{tuple(p.shape)}, in place. Return new values."
            )
    checks.entries(received, own, f"method {job.algorithm.name!r}: receive(received)")
    for name, p in own.items():
        if name in received:
            p.copy_(received[name])
        elif not job.algorithm.mix:  # a mixture is in place already
            torch.where(shared[name], state.server[name], p, out=p)


def remembered(state: State, clients: np.ndarray) -> Memory:
    """Memory of some clients and of the server."""
    return Memory(kept.copies(state.memory.clients, clients), state.memory.server)
