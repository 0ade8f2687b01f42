"""The round: download, local steps, split, aggregation by mask. Pure functions of a job and a state."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstat import _random
from fedstat.fl import halves, masks
from fedstat.fl.algorithm import Phase, Sharing, Start, Uploads
from fedstat.fl.job import Job, State, active, by_size, personal
from fedstat.fl.local_training import local_training
from fedstat.fl.nets import Params

__all__ = ["Job", "Round", "State", "active", "personal", "round_of", "start", "step"]


class Round(NamedTuple):
    """What a round leaves beside the new state.

    Attributes
    ----------
    clients : int array (active,)
        By falling number of training samples.
    after : Params (active, ...)
        Their parameters as they left local training.
    loss : Tensor (active,)
        Mean loss of their batches.
    """

    clients: np.ndarray
    after: Params
    loss: Tensor


def start(job: Job) -> State:
    """State before the first round: one start for all clients.

    Raises
    ------
    ValueError
        If the method's split has no bool mask that broadcasts against (client, *shape) for every parameter.
    """
    server = {name: p.to(job.device) for name, p in job.net.init(_random.generator(job.seed, "start")).items()}

    alone = State(-1, {}, {}, server, Sharing(masks.nothing(job.net, job.device)), {})
    fresh = replace(job, optimizer_state="reset")

    def pretrain(epochs: int | None) -> Params:
        order = by_size(job.train, np.arange(job.clients))
        trained, _, _ = local_training(fresh, alone, order, (Phase(epochs),))
        return {name: p[np.argsort(order)] for name, p in trained.items()}

    def pretrain_halves(epochs: int | None) -> tuple[Params, np.ndarray | None]:
        some = np.flatnonzero(job.train.sizes >= 2)
        return halves.trained(fresh, alone, some, (Phase(epochs),))

    split = job.algorithm.sharing(Start(job.net, job.train.sizes, job.seed, job.device, pretrain, pretrain_halves))
    masks.require(job.net, split.shared, job.clients, job.algorithm.name)
    if job.algorithm.uploads:
        masks.require(job.net, job.algorithm.uploads(job.net, split), job.clients, f"{job.algorithm.name}, uploads")
    kept = _kept(job, split)
    _require_kept(job, kept, split)
    params = {name: (server[name] if at is None else server[name][at]) for name, at in kept.items()}
    params = {name: p.expand(job.clients, *p.shape).clone() for name, p in params.items()}
    optimizer: Params = {}
    if job.optimizer_state == "keep":
        optimizer = job.optimizer.init({name: p.expand(job.clients, *p.shape) for name, p in server.items()})
    return State(0, params, kept, server, split, optimizer)


def _kept(job: Job, split: Sharing) -> dict[str, Tensor | None]:
    """Units of each parameter of which clients' own copies have to be kept."""
    algorithm = job.algorithm
    if algorithm.mix:  # every client has a mixture of its own, of shared entries too
        return dict.fromkeys(job.net.shapes)
    if algorithm.reshare:
        return dict.fromkeys(algorithm.keeps(job.net) if algorithm.keeps else job.net.shapes)
    kept: dict[str, Tensor | None] = {}
    for name, mask in split.shared.items():
        shape = job.net.shapes[name]
        if bool(mask.all()):
            continue
        by_unit = mask.shape == (shape[0], *(1,) * (len(shape) - 1))
        kept[name] = torch.nonzero(~mask.flatten()).squeeze(1) if by_unit else None
    return kept


def _require_kept(job: Job, kept: Collection[str], split: Sharing) -> None:
    for name, mask in split.shared.items():
        if name not in kept and not bool(mask.all()):
            raise ValueError(
                f"method {job.algorithm.name!r} makes entries of {name!r} personal, but its keeps(net) names only "
                f"{list(kept)}. Name every parameter that may turn personal, or leave keeps out."
            )


def step(job: Job, state: State) -> State:
    """One communication round; see :func:`round_of`."""
    return round_of(job, state)[0]


def round_of(job: Job, state: State) -> tuple[State, Round]:
    """One communication round: download, local training, split, aggregation (FedFac Alg. 1 and 2).

    Raises
    ------
    ValueError
        If the new split is no mask of every parameter, or makes entries personal of which no copies are kept.
    FloatingPointError
        If a client's loss or parameters are no longer finite after local training.
    """
    algorithm = job.algorithm
    clients = by_size(job.train, active(job, state.round))
    after, optimizer, loss = local_training(job, state, clients, job.phases)
    sizes = torch.from_numpy(job.train.sizes[clients]).to(job.device, torch.float32)
    weights = sizes / sizes.sum()
    mean = {name: torch.mv(p.flatten(1).T, weights).view(p.shape[1:]) for name, p in after.items()}
    _require_finite(mean, after, loss, clients, state.round + 1)

    uploads = Uploads(
        job.net, state.round, job.seed, clients, weights, lambda: personal(job, state, clients), after, state.sharing
    )
    split = state.sharing
    if algorithm.reshare:
        split = algorithm.reshare(uploads)
        masks.require(job.net, split.shared, job.clients, algorithm.name)
        _require_kept(job, state.kept, split)
    done = Round(clients, dict(after), loss)
    if algorithm.mix:
        mixture = algorithm.mix(uploads)
        for name, p in after.items():
            shared = masks.of_clients(split.shared[name], p.ndim - 1, clients)
            after[name] = torch.where(shared, torch.tensordot(mixture, p, 1), p)
    server = {name: _server_step(job, state, split.shared[name], name, mean[name]) for name in mean}
    params = {name: after[name] if at is None else after[name][:, at] for name, at in state.kept.items()}
    if len(clients) < job.clients or (clients[1:] < clients[:-1]).any():
        at = torch.from_numpy(clients).to(job.device)
        params = {name: state.params[name].index_copy(0, at, p) for name, p in params.items()}
    return State(state.round + 1, params, state.kept, server, split, optimizer), done


def _server_step(job: Job, state: State, shared: Tensor, name: str, mean: Tensor) -> Tensor:
    """W ← W + η_g (mean − W) where an entry stays shared, the mean where it turns shared, the old copy elsewhere.

    Where masks differ between clients, an entry is shared if some client shares it; the mean is of all active clients.
    """
    old, was = state.server[name], masks.by_some(state.sharing.shared[name], mean.ndim)
    moved = torch.where(was, torch.lerp(old, mean, job.server_lr), mean)
    return torch.where(masks.by_some(shared, mean.ndim), moved, old)


def _require_finite(mean: Params, after: Params, loss: Tensor, clients: np.ndarray, number: int) -> None:
    def diverged(what: str, bad: np.ndarray) -> FloatingPointError:
        return FloatingPointError(
            f"training diverged in round {number}: {what} of client {int(clients[bad].min())} is not finite "
            f"({int(bad.sum())} of {len(clients)} active clients). Lower the learning rate, or scale the inputs."
        )

    for name, total in mean.items():
        if not bool(torch.isfinite(total).all()):
            raise diverged(name, ~torch.isfinite(after[name].flatten(1)).all(1).cpu().numpy())
    if not bool(torch.isfinite(loss).all()):
        raise diverged("the loss", ~torch.isfinite(loss).cpu().numpy())
