"""The state of a run between two rounds, and what clients download from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import masks
from fedstat.fl.algorithm import AlgorithmState, DownloadContext, SharedMask
from fedstat.fl.client_rows import ClientRows, StackedRows
from fedstat.fl.cohort import Cohort
from fedstat.fl.job import Job
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor


class AlgorithmRows(NamedTuple):
    """An algorithm's state between rounds, with rows of all clients.

    Hooks get the rows of some clients, in an :class:`~fedstat.fl.algorithm.AlgorithmState`.

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
        Number of rounds done.
    client_params : ClientRows (client, personal unit, ...)
        Clients' copies of parameters that may be personal; entries that are shared now are outdated until downloaded.
    personal_units : mapping from name to int64 Tensor (personal unit,) or None
        Units of each parameter that ``client_params`` holds; None: all. Parameters that are never personal are absent.
    global_params : Params (...)
        The global model: every entry, shared or not.
    mask : SharedMask
    optimizer : ClientRows
        Clients' optimizer state; empty unless it lasts between rounds.
    common_params : ClientRows (client, unit, ...)
        Last common values of ``client_params``, where they differ between clients; else empty. See
        :func:`fedstat.fl.checkpoints.common_params`.
    algorithm_state : AlgorithmRows
        State of the algorithm besides models.
    aggregator : any
        The aggregator's state.
    """

    round: int
    client_params: ClientRows
    personal_units: dict[str, Tensor | None]
    global_params: Params
    mask: SharedMask
    optimizer: ClientRows
    common_params: ClientRows = StackedRows()
    algorithm_state: AlgorithmRows = AlgorithmRows()
    aggregator: Any = ()

    def after(
        self, cohort: Cohort, models: Params, optimizer: Params, algorithm_state: AlgorithmState | None, **server: Any
    ) -> State:
        """Return the state after a round, from the models of its clients and the values of the server.

        Parameters
        ----------
        models, optimizer : Params (local, ...)
        algorithm_state : AlgorithmState or None
            State of the clients that the hooks saw, over all processes, and of the server; None keeps the old state.
        **server
            ``global_params``, ``mask`` and ``aggregator``.
        """
        units = self.personal_units
        personal = {name: models[name] if units[name] is None else models[name][:, units[name]] for name in units}
        algorithm_rows = self.algorithm_state
        if algorithm_state is not None:
            rows = algorithm_rows.clients.updated(cohort.local, cohort.local_rows(algorithm_state.clients))
            algorithm_rows = AlgorithmRows(rows, dict(algorithm_state.server))
        return self._replace(
            round=self.round + 1,
            client_params=self.client_params.updated(cohort.local, personal),
            common_params=self.common_params.updated(cohort.local, self.common_values(cohort.local)),
            optimizer=self.optimizer.updated(cohort.local, optimizer),
            algorithm_state=algorithm_rows,
            **server,
        )

    def common_values(self, clients: np.ndarray) -> Params:
        """Return the last common values (client, ...) after a download by ``clients`` from this state."""
        values = {}
        for name, p in self.common_params.borrow(clients).items():
            shared = masks.of_clients(self.mask.shared[name], p.ndim - 1, clients)
            values[name] = torch.where(shared, self.global_params[name], p)
        return values

    @property
    def rows(self) -> tuple[ClientRows, ...]:
        """All client rows of the state."""
        return self.client_params, self.common_params, self.optimizer, self.algorithm_state.clients


@dataclass(frozen=True)
class Download:
    """Models and states that clients download from a state of the run: the only way to a client's model.

    Attributes
    ----------
    job : Job
    state : State
    """

    job: Job
    state: State

    def models(self, clients: np.ndarray | None = None, into: Params | None = None) -> Params:
        """Return the models with which clients predict now: parameters (client, ...).

        Shared entries are the server's, personal entries the client's; the result of the algorithm's ``on_download``
        replaces both.

        Parameters
        ----------
        clients : int array (client,), optional
            Rows of clients in the job's data; all by default.
        into : Params (client, ...), optional
            Tensors to write the models into.
        """
        job, state = self.job, self.state
        clients = np.arange(job.clients) if clients is None else clients
        if into is None:
            into = {name: p.new_empty(len(clients), *p.shape) for name, p in state.global_params.items()}
        rows = state.client_params.borrow(clients)
        for name, p in into.items():
            server = state.global_params[name]
            if name not in state.personal_units:
                p.copy_(server.expand_as(p))
            elif (units := state.personal_units[name]) is not None:
                p.copy_(server.expand_as(p))
                p[:, units] = rows[name]
            elif job.hooks.downloads_differ:  # already mixed, or set by on_download
                p.copy_(rows[name])
            else:
                shared = masks.of_clients(state.mask.shared[name], server.ndim, clients)
                torch.where(shared, server, rows[name], out=p)

        def make_context() -> DownloadContext:
            shared = {
                name: masks.of_clients(mask, state.global_params[name].ndim, clients)
                for name, mask in state.mask.shared.items()
            }
            return DownloadContext(job.net, into, state.global_params, shared, self.algorithm_state(clients))

        job.hooks.on_download(make_context)
        return into

    def algorithm_state(self, clients: np.ndarray) -> AlgorithmState:
        """Return the algorithm's state of clients, given by rows, and of the server."""
        return AlgorithmState(self.state.algorithm_state.clients.read(clients), self.state.algorithm_state.server)
