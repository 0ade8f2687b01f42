"""The state of a run between two rounds, and the models of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._later import torch
from fedstat.fl import masks
from fedstat.fl.algorithm import Memory, Received, Sharing
from fedstat.fl.client_rows import ClientRows, StackedRows
from fedstat.fl.job import Job
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


class StateMemory(NamedTuple):
    """An algorithm's memory between rounds; hooks get that of some clients, a :class:`~fedstat.fl.algorithm.Memory`.

    Attributes
    ----------
    clients : ClientRows
    server : Params
    """

    clients: ClientRows = StackedRows()
    server: Mapping[str, Tensor] = {}


class State(NamedTuple):
    """State of a run between two rounds.

    Attributes
    ----------
    round : int
        Rounds done.
    params : ClientRows (client, own unit, ...)
        Clients' own copies of what may be personal; entries that are shared now are out of date until downloaded.
    own : mapping from name to int64 Tensor (own unit,) or None
        Units of each parameter that ``params`` holds; None: all. Parameters that are never personal are absent.
    server : Params (...)
        The server's copy of every entry, shared or not.
    sharing : Sharing
    optimizer : ClientRows
        Clients' optimiser state; empty unless it lasts between rounds.
    memory : StateMemory
        What the algorithm remembers besides models.
    aggregator : any
        The aggregator's state.
    """

    round: int
    params: ClientRows
    own: dict[str, Tensor | None]
    server: Params
    sharing: Sharing
    optimizer: ClientRows
    memory: StateMemory = StateMemory()
    aggregator: Any = ()

    @property
    def rows(self) -> tuple[ClientRows, ClientRows, ClientRows]:
        """All client rows of the state."""
        return self.params, self.optimizer, self.memory.clients


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
    mine_of = state.params.borrow(clients)
    for name, p in into.items():
        if name not in state.own:
            p.copy_(state.server[name].expand_as(p))
            continue
        mine, units = mine_of[name], state.own[name]
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


def remembered(state: State, clients: np.ndarray) -> Memory:
    """Memory of some clients and of the server."""
    return Memory(state.memory.clients.read(clients), state.memory.server)
