"""The state before the first round: what all clients begin with, pretraining, and a trial of the algorithm's hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedstat._utils import streams
from fedstat.fl import chunks, client_rows, cohort, masks, split_halves
from fedstat.fl.algorithm import InitContext, Phase, SharedMask
from fedstat.fl.communication_round import round_context
from fedstat.fl.hooks import aggregator_state
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_locally
from fedstat.fl.nets import Params
from fedstat.fl.ranks import joined
from fedstat.fl.state import AlgorithmRows, Download, State


def start(job: Job) -> State:
    """Return the state before the first round: the same parameters for all clients.

    Raises
    ------
    ValueError
        If a parameter has no bool mask that broadcasts against (client, *shape), or a hook returns something that does
        not fit.
    """
    params = {name: p.to(job.device) for name, p in job.net.init(streams.generator(job.seed, "start")).items()}
    before = InitContext(job.net, job.sizes, job.seed, job.device, *_pretraining(job, params))
    mask = job.hooks.init_mask(before)
    personal_units = job.hooks.personal_params(mask)
    own = {name: (params[name] if at is None else params[name][at]) for name, at in personal_units.items()}
    optimizer: Params = {}
    if job.optimizer_state == "keep":
        optimizer = job.optimizer.init({name: p.unsqueeze(0) for name, p in params.items()})
        optimizer = {name: p[0] for name, p in optimizer.items()}
    algorithm_state = job.hooks.init_state(before)
    if job.process_group.several:
        local = {name: p[job.train.ids] for name, p in algorithm_state.clients.items()}
        algorithm_state = algorithm_state._replace(clients=local)
    of_aggregator = aggregator_state(job.aggregator, params)
    equal = {"params": _expanded(own, job.clients), "optimizer": _expanded(optimizer, job.clients)}
    rows = client_rows.create(job, {**equal, "memory": algorithm_state.clients})
    stored = AlgorithmRows(rows["memory"], algorithm_state.server)
    state = State(0, rows["params"], personal_units, params, mask, rows["optimizer"], stored, of_aggregator)
    _try_out(job, state)
    return state


def pretrain(job: Job, params: Params, epochs: int | None, clients: np.ndarray | None = None) -> Params:
    """Train clients, by default all, from the server's parameters with nothing shared; Params (client, ...)."""
    some = cohort.of_local(job, np.arange(job.clients) if clients is None else clients)
    trained = train_locally(*_alone(job, params), some.local, (Phase(epochs),)).params
    return {name: p[np.argsort(some.local)] for name, p in trained.items()}


def _pretraining(job: Job, params: Params) -> tuple[Any, Any, Any]:
    """Return the functions ``pretrain``, ``halves`` and ``moments`` of :class:`~fedstat.fl.algorithm.InitContext`."""

    def models(epochs: int | None) -> Params:
        chunks.require_for_all(job)
        return job.process_group.clients(pretrain(job, params, epochs))

    def of_halves(epochs: int | None) -> tuple[Params, np.ndarray | None]:
        chunks.require_for_all(job)
        return split_halves.trained(*_alone(job, params), cohort.of_all(job).at_least(2), (Phase(epochs),))

    def moments(epochs: int | None) -> Mapping[str, Any]:
        def before(span: slice) -> Params:
            return _expanded(params, span.stop - span.start)

        each = (
            chunks.over_clients(job, before, pretrain(job, params, epochs, clients)) for clients in chunks.blocks(job)
        )
        return cohort.of_all(job).join(joined(each), job.device)

    return models, of_halves, moments


def _expanded(params: Params, n_clients: int) -> Params:
    return {name: p.expand(n_clients, *p.shape) for name, p in params.items()}


def _alone(job: Job, params: Params) -> tuple[Job, Download]:
    """Return the job in which every client trains alone, and what it downloads."""
    alone = replace(job, optimizer_state="reset", algorithm=job.algorithm._replace(on_download=None))
    none = client_rows.StackedRows()
    state = State(-1, none, {}, params, SharedMask(masks.share_none(job.net, job.device)), none)
    return alone, Download(alone, state)


def _try_out(job: Job, state: State) -> None:
    """Call the hooks of a round with two clients of this process that have not trained, so that errors show at once."""
    some = cohort.of_round(job, 0).local
    two = cohort.of_local(job, (some if len(some) else np.arange(job.clients))[:2])
    download = Download(job, state)
    context = round_context(job, download, two, download.models(two.local))
    job.hooks.try_out(context, state.mask, (two.sizes, two.ids, job.everyone or job.clients))
