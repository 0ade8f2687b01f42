"""The state of a run between two rounds, and the models of its clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._later import torch
from fedstat.fl import kept, masks
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
        elif job.hooks.downloads_differ:  # already mixed, or for receive to decide
            p.copy_(mine)
        else:
            shared = masks.of_clients(state.sharing.shared[name], state.server[name].ndim, clients)
            torch.where(shared, state.server[name], mine, out=p)

    def given() -> Received:
        shared = {n: masks.of_clients(m, state.server[n].ndim, clients) for n, m in state.sharing.shared.items()}
        return Received(job.net, into, state.server, shared, remembered(state, clients))

    job.hooks.receive(given)
    return into


def on_disk(state: State) -> list[kept.Kept]:
    """Rows of clients that are not in memory."""
    parts = (state.params, state.optimizer, state.memory.clients)
    return [part for part in parts if isinstance(part, kept.Kept)]


def remembered(state: State, clients: np.ndarray) -> Memory:
    """Memory of some clients and of the server."""
    return Memory(kept.copies(state.memory.clients, clients), state.memory.server)
