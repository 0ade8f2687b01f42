"""The round: download, local steps, sharing, aggregation by mask. Pure functions of a job and a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedstat import _random
from fedstat._later import torch
from fedstat.fl import client_rows, halves, masks, room, sums
from fedstat.fl.aggregate import Sent
from fedstat.fl.algorithm import Memory, Phase, Sharing, Start, Uploads
from fedstat.fl.hooks import Hooks, aggregated, aggregator_state
from fedstat.fl.job import Job
from fedstat.fl.local_training import Trained, local_training
from fedstat.fl.nets import Params
from fedstat.fl.participation import active, by_size, drawn, everyone_active, expected
from fedstat.fl.ranks import joined
from fedstat.fl.scores import diverged, losses_of
from fedstat.fl.state import State, StateMemory, personal, remembered

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Job",
    "Round",
    "State",
    "active",
    "moved",
    "personal",
    "pretrained",
    "require_finite",
    "round_of",
    "start",
    "step",
    "uploads_of",
]


class Round(NamedTuple):
    """What a round leaves besides the new state.

    Attributes
    ----------
    uploads : Uploads
        Of the active clients, by descending number of training samples.
    loss : Tensor (active,)
        Mean loss of each client's batches.
    sent : Params (active, ...)
        What was averaged or mixed where entries are shared.
    mixture : Tensor (active, active) or None
        The mixing matrix, if the algorithm mixes.
    whole : Uploads
        Of the active clients of all processes, where the method looks at more than sums; else ``uploads``.
    """

    uploads: Uploads
    loss: Tensor
    sent: Params
    mixture: Tensor | None
    whole: Uploads


def start(job: Job) -> State:
    """State before the first round: the same start for all clients.

    Raises
    ------
    ValueError
        If a parameter has no bool mask that broadcasts against (client, *shape), or a function of the method returns
        something that does not fit.
    """
    server = {name: p.to(job.device) for name, p in job.net.init(_random.generator(job.seed, "start")).items()}

    def pretrain(epochs: int | None) -> Params:
        room.require_for_all(job)
        return job.ranks.clients(pretrained(job, server, epochs))

    def pretrain_halves(epochs: int | None) -> tuple[Params, np.ndarray | None]:
        room.require_for_all(job)
        some = np.flatnonzero(job.train.sizes >= 2)
        return halves.trained(*_alone(job, server), some, (Phase(epochs),))

    def moments(epochs: int | None) -> Mapping[str, Any]:
        return joined(
            sums.over_clients(
                job, lambda span: _expanded(server, span.stop - span.start), pretrained(job, server, epochs, clients)
            )
            for clients in room.blocks(job)
        )

    before = Start(job.net, job.sizes, job.seed, job.device, pretrain, pretrain_halves, moments)
    sharing = job.hooks.sharing(before)
    own = job.hooks.keeps(sharing)
    params = {name: (server[name] if at is None else server[name][at]) for name, at in own.items()}
    first: Params = {}
    if job.optimizer_state == "keep":
        first = job.optimizer.init({name: p.unsqueeze(0) for name, p in server.items()})
        first = {name: p[0] for name, p in first.items()}
    memory = job.hooks.memory(before)
    if job.ranks.several:
        memory = memory._replace(clients={name: p[job.train.ids] for name, p in memory.clients.items()})
    of_aggregator = aggregator_state(job.aggregator, server)
    equal = {"params": _expanded(params, job.clients), "optimizer": _expanded(first, job.clients)}
    rows = client_rows.create(job, {**equal, "memory": memory.clients})
    stored = StateMemory(rows["memory"], memory.server)
    state = State(0, rows["params"], own, server, sharing, rows["optimizer"], stored, of_aggregator)
    some = active(job, 0)
    clients = by_size(job.train, some if len(some) else np.arange(job.clients))[:2]
    uploads = uploads_of(job, state, clients, personal(job, state, clients))
    job.hooks.try_out(uploads, sharing, (job.train.sizes[clients], job.ids(clients), job.everyone or job.clients))
    return state


def _expanded(params: Params, n: int) -> Params:
    return {name: p.expand(n, *p.shape) for name, p in params.items()}


def pretrained(job: Job, server: Params, epochs: int | None, clients: np.ndarray | None = None) -> Params:
    """Parameters (client, ...) of clients, by default all, after epochs from the server's copy, nothing shared."""
    order = by_size(job.train, np.arange(job.clients) if clients is None else clients)
    trained = local_training(*_alone(job, server), order, (Phase(epochs),)).params
    return {name: p[np.argsort(order)] for name, p in trained.items()}


def _alone(job: Job, server: Params) -> tuple[Job, State]:
    """The job and the state in which every client trains alone, before the first round."""
    fresh = replace(job, optimizer_state="reset", algorithm=job.algorithm._replace(receive=None))
    none = client_rows.StackedRows()
    return fresh, State(-1, none, {}, server, Sharing(masks.nothing(job.net, job.device)), none)


def step(job: Job, state: State) -> State:
    """One communication round; see :func:`round_of`."""
    return round_of(job, state)[0]


def round_of(job: Job, state: State) -> tuple[State, Round]:
    """One communication round: download, local training, sharing, aggregation (FedFac Alg. 1 and 2).

    Raises
    ------
    ValueError
        If the new sharing lacks a parameter, or makes entries personal of which clients have no copies; if a function
        of the method returns something that does not fit.
    FloatingPointError
        If a client's loss or parameters are no longer finite after local training.
    """
    clients = by_size(job.train, active(job, state.round))
    hooks = job.hooks if len(clients) or len(drawn(job, state.round)) else job.hooks.of_empty_round()
    trained = local_training(job, state, clients, job.phases)
    require_finite(trained, job.ids(clients), state.round + 1)
    uploads = uploads_of(job, state, clients, trained.params)
    whole, mine = _whole(job, hooks, state, uploads)
    sharing = hooks.reshare(whole, state.own)
    sent = hooks.send(whole, sharing)
    mixture = hooks.mix(whole)
    models = trained.params if mixture is None else _mixed(job, uploads, sharing, sent, mixture[mine])
    server, of_aggregator = _aggregate(job, hooks, state, whole, sharing, sent, each=whole is uploads)
    memory = _remembered(job, state, whole, mine, hooks.remember(whole))
    own = {name: models[name] if units is None else models[name][:, units] for name, units in state.own.items()}
    params = state.params.updated(clients, own)
    optimizer = state.optimizer.updated(clients, trained.optimizer)
    new = State(state.round + 1, params, state.own, server, sharing, optimizer, memory, of_aggregator)
    return new, Round(uploads, trained.loss, {name: p[mine] for name, p in sent.items()}, mixture, whole)


def uploads_of(job: Job, state: State, clients: np.ndarray, after: Params) -> Uploads:
    """What a method's functions learn of clients (active,) whose models after local training are ``after``."""
    sizes = torch.from_numpy(job.train.sizes[clients]).to(job.device, torch.float32)
    weights = sizes / job.ranks.total({"n": sizes.sum()})["n"]

    def evaluate(models: Params, some: np.ndarray, which: np.ndarray | None = None) -> Tensor:
        own = {name: p for name, p in after.items() if name not in models}
        if own:
            row = {int(c): i for i, c in enumerate(clients)}
            own = {name: p[[row[int(c)] for c in some]] for name, p in own.items()}
        return losses_of(job, models, np.asarray(some), which, own)

    def before() -> Params:
        return personal(job, state, clients)

    return Uploads(
        job.net,
        state.round,
        job.seed,
        clients,
        weights,
        before,
        after,
        state.sharing,
        state.server,
        remembered(state, clients),
        evaluate,
        lambda: sums.over_clients(job, lambda span: personal(job, state, clients[span]), after),
        {},
        job.server_lr,
    )


def _whole(job: Job, hooks: Hooks, state: State, uploads: Uploads) -> tuple[Uploads, slice | np.ndarray]:
    """Uploads of the active clients of all processes, numbered in the whole, and the rows of this one's.

    Those of this process alone if there is no other, or if method and aggregator need only sums of them.
    """
    if not job.ranks.several or not (hooks.looks_at_clients or job.aggregator.needs == "clients"):
        return uploads, slice(None)
    clients = everyone_active(job, state.round)
    each = [job.ranks.of(rank, clients) for rank in range(job.ranks.number)]
    order = np.argsort(np.argsort(job.ranks.holder(clients), kind="stable"))

    def gathered(params: Mapping[str, Tensor]) -> Params:
        return {name: p[order] for name, p in job.ranks.rows(params, [len(own) for own in each]).items()}

    def evaluate(models: Params, some: np.ndarray, which: np.ndarray | None = None) -> Tensor:
        some = np.asarray(some)
        parts = [job.ranks.of(rank, some) for rank in range(job.ranks.number)]
        mine = parts[job.ranks.rank]
        asked = which if which is None else which[np.isin(some, mine)]
        own = uploads.evaluate(models, mine - job.ranks.bounds[job.ranks.rank], asked)
        found = job.ranks.rows({"": own}, [len(part) for part in parts])[""]
        return found[np.argsort(np.argsort(job.ranks.holder(some), kind="stable"))]

    whole = uploads._replace(
        clients=clients,
        weights=gathered({"": uploads.weights})[""],
        before=lambda: gathered(uploads.before()),
        after=gathered(uploads.after),
        memory=uploads.memory._replace(clients=gathered(uploads.memory.clients)),
        evaluate=evaluate,
    )
    return whole, np.flatnonzero(np.isin(clients, job.train.ids))


def _aggregate(
    job: Job, hooks: Hooks, state: State, uploads: Uploads, sharing: Sharing, sent: Params, *, each: bool
) -> tuple[Params, object]:
    """The server's copy after the round, of every entry, and the aggregator's state; see :func:`moved`.

    With ``each``, what was sent is that of this process's clients, and each of the others has its own.
    """
    ids = job.ids(uploads.clients) if each else uploads.clients
    sizes = job.train.sizes[uploads.clients] if each else job.sizes[ids]
    shared = {name: masks.by_some(sharing.shared[name], p.ndim) for name, p in state.server.items()}
    values = {name: p for name, p in sent.items() if bool(shared[name].any())}

    def everyone() -> tuple[np.ndarray, np.ndarray, int]:
        every = everyone_active(job, state.round) if job.ranks.several else ids
        return job.sizes[every] if job.ranks.several else sizes, every, job.everyone or job.clients

    means, of_aggregator = aggregated(
        job.aggregator,
        Sent(
            values,
            {name: state.server[name] for name in values},
            {name: shared[name] for name in values},
            torch.from_numpy(sizes).to(job.device, torch.float32),
            hooks.weights(ids, everyone),
            ids,
            state.round,
            job.seed,
            expected(job),
            *((job.ranks.total,) if each else ()),
        ),
        state.aggregator,
        job.ranks,
    )
    return moved(state.server, means, state.sharing, sharing, job.server_lr), of_aggregator


def moved(server: Params, means: Params, before: Sharing, after: Sharing, lr: float) -> Params:
    """The server's copy after a round, of every entry, from its copy before it and means over the active clients.

    W ← W + η_g (mean − W) where an entry stays shared, the mean where it becomes shared, the old copy elsewhere. If
    masks differ between clients, an entry is shared if any client shares it; the mean is over all active clients.

    Parameters
    ----------
    server : Params (...)
    means : Params (...)
        Of parameters with shared entries; other entries may hold anything.
    before, after : Sharing
    lr : float
        η_g.
    """
    found = dict(server)
    for name, new in means.items():
        was, now = (masks.by_some(sharing.shared[name], new.ndim) for sharing in (before, after))
        found[name] = torch.where(now, torch.where(was, torch.lerp(server[name], new, lr), new), server[name])
    return found


def _mixed(job: Job, uploads: Uploads, sharing: Sharing, sent: Params, mixture: Tensor) -> Params:
    """Active clients' models: where entries are shared, each client's own mixture of what was sent."""
    models = dict(uploads.after)
    before = uploads.before() if job.server_lr != 1 else {}
    for name, p in sent.items():
        mask = sharing.shared[name]
        if not bool(mask.any()):
            continue
        new = torch.tensordot(mixture, p, 1)
        if before:
            new = torch.lerp(before[name], new, job.server_lr)
        models[name] = torch.where(masks.of_clients(mask, p.ndim - 1, uploads.clients), new, uploads.after[name])
    return models


def _remembered(job: Job, state: State, uploads: Uploads, mine: slice | np.ndarray, new: Memory | None) -> StateMemory:
    """The memory after the round, given that of the active clients and the server; None: as before."""
    if new is None:
        return state.memory
    first = job.ranks.bounds[job.ranks.rank] if job.ranks.several else 0
    rows = {name: p[mine] for name, p in new.clients.items()}
    return StateMemory(state.memory.clients.updated(uploads.clients[mine] - first, rows), dict(new.server))


def require_finite(trained: Trained, clients: np.ndarray, number: int) -> None:
    """FloatingPointError, naming the client, if parameters or a loss after local training are not finite."""
    for name, p in trained.params.items() if not trained.finite.all() else ():
        if (bad := ~torch.isfinite(p.flatten(1)).all(1).cpu().numpy()).any():
            raise diverged(name, bad, clients, number)
    if not bool(torch.isfinite(trained.loss).all()):
        raise diverged("the loss", ~torch.isfinite(trained.loss).cpu().numpy(), clients, number)
