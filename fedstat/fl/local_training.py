"""Local training: the steps between download and upload, on client-stacked parameters."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedstat import _check
from fedstat.fl import batches
from fedstat.fl.algorithm import Mask, Phase
from fedstat.fl.job import Job, State, each_chunk, personal
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Gradient, Params, in_training
from fedstat.fl.optim import Optimizer


def local_training(
    job: Job, state: State, clients: np.ndarray, phases: tuple[Phase, ...]
) -> tuple[Params, Params, Tensor]:
    """Download and train some clients.

    Parameters
    ----------
    job : Job
    state : State
    clients : int array (active,)
        By falling number of training samples.
    phases : tuple of Phase

    Returns
    -------
    after : Params (active, ...)
        Parameters as trained.
    optimizer : Params (client, ...)
        Optimiser state of all clients, empty if it is not kept.
    loss : Tensor (active,)
        Mean loss of a client's batches, each before its step; 0 unless the job tracks it.
    """
    after = {name: p.new_empty(len(clients), *p.shape) for name, p in state.server.items()}
    optimizer = {name: p.clone() for name, p in state.optimizer.items()}
    loss = torch.zeros(len(clients), device=job.device)

    def work(span: slice) -> None:
        chunk = personal(job, state, clients[span], {name: p[span] for name, p in after.items()})
        kept = {name: p[clients[span]] for name, p in optimizer.items()}
        loss[span] = train_chunk(job, chunk, clients[span], phases, key=("batches", state.round), kept=kept)
        for name, p in kept.items():
            optimizer[name][clients[span]] = p

    each_chunk(job, len(clients), work)
    return after, optimizer, loss


def train_chunk(
    job: Job,
    params: Params,
    clients: np.ndarray,
    phases: tuple[Phase, ...],
    *,
    key: tuple[int | str, ...],
    kept: Params | None = None,
    frozen: Mask | None = None,
) -> Tensor:
    """Local training of one chunk of clients, in place; the mean loss of their batches (client,), if tracked.

    Parameters
    ----------
    job : Job
    params : Params (client, ...)
    clients : int array (client,)
        By falling number of training samples.
    phases : tuple of Phase
    key : tuple
        Names the stream of the batches.
    kept : Params, optional
        Optimiser state to go on with; changed in place.
    frozen : Mask, optional
        Entries that stay as they are; without rows of clients.
    """
    state = kept or job.optimizer.init(params)
    total, batches_seen = torch.zeros(len(clients), device=job.device), np.zeros(len(clients))
    held = {name: (mask, params[name].clone()) for name, mask in (frozen or {}).items() if bool(mask.any())}
    for position, phase in enumerate(phases):
        own = None if phase.weigh is None else _weigh(job, phase, params, clients)
        epochs = job.local_epochs if phase.epochs is None else phase.epochs
        trained = phase.moves(job.net)
        if not trained or epochs == 0:
            continue
        anchor = {name: p.clone() for name, p in params.items()} if phase.penalty else {}
        rule = _scaled(job.optimizer, phase.lr)
        lr = None if phase.penalty else rule.plain_lr
        grads = {name: torch.zeros_like(params[name]) for name in trained} if lr is None else {}
        plan = batches.plan(
            job.train, clients, epochs=epochs, batch_size=job.batch_size, seed=job.seed, key=(*key, position)
        )
        batches_seen += (plan.live > np.arange(len(clients))[:, None]).sum(1)
        y, live = job.train.y[plan.rows], 0
        for s, k in enumerate(plan.live):
            if k != live:  # the first k clients still have batches; views of them, made anew when k falls
                live, now = k, _first(params, k)
                into, before, optimizer = _first(grads, k), _first(anchor, k), _first(state, k)
                if lr is not None:
                    into = {name: now[name] for name in trained}
            rows, weight = plan.rows[s, :k], plan.weight[s, :k]
            x = job.train.x.index_select(0, rows.flatten()).view(*rows.shape, *job.train.x.shape[1:])
            extra = () if own is None else (_of_rows(own[:k], rows, job.train.start[clients[:k]]),)
            gradient = partial(_gradient, job.loss, y[s, :k], weight, extra, total[:k] if job.track else None)
            if lr is not None:
                _accumulate(job, now, x, weight, gradient, into, 1.0, -lr)
            else:
                _accumulate(job, now, x, weight, gradient, into, 0.0, 1.0)
                if phase.penalty:
                    for name, added in phase.penalty(now, before).items():
                        if name in into:
                            into[name].add_(added)
                        elif name not in now:
                            _check.choice("a parameter that a phase's penalty returns a gradient for", name, list(now))
                rule.step(now, into, optimizer)
            for name, (mask, fixed) in held.items():
                torch.where(mask, fixed[:k], now[name], out=now[name])
    return total / torch.from_numpy(np.maximum(batches_seen, 1)).to(total)


def _scaled(optimizer: Optimizer, factor: float) -> Optimizer:
    if factor == 1:
        return optimizer
    if optimizer.scaled is None:
        raise ValueError(
            f"a phase of the method trains at {factor:g} times the learning rate, but the optimizer {optimizer.name!r} "
            "has no 'scaled'. Give it one, or use optim.sgd or optim.adam."
        )
    return optimizer.scaled(factor)


def _gradient(
    loss: Loss, y: Tensor, weight: Tensor, extra: tuple[Tensor, ...], total: Tensor | None, out: Tensor
) -> Tensor:
    """Derivative at the outputs; adds the batch's mean loss to ``total`` (client,), if there is one."""
    if total is not None:
        total += (loss.value(out, y) * weight).sum(1)
    return loss.gradient(out, y, weight, *extra)


def _weigh(job: Job, phase: Phase, params: Params, clients: np.ndarray) -> Tensor:
    """``Phase.weigh`` of whole training sets, padded."""
    assert phase.weigh is not None  # noqa: S101
    rows, live = batches.whole(job.train, clients)
    return phase.weigh(job.net, params, job.train.x[rows], job.train.y[rows], live)


def _of_rows(own: Tensor, rows: Tensor, first: np.ndarray) -> Tensor:
    """Entries (client, batch, ...) of ``own`` (client, sample, ...) that belong to rows of the data."""
    at = (rows - torch.from_numpy(first).to(rows.device)[:, None]).clamp_(min=0)
    return own[torch.arange(len(own), device=rows.device)[:, None], at.clamp_(max=own.shape[1] - 1)]


def _first(params: Params, k: int) -> Params:
    return {name: p[:k] for name, p in params.items()}


def _accumulate(
    job: Job, params: Params, x: Tensor, weight: Tensor, gradient: Gradient, into: Params, beta: float, alpha: float
) -> None:
    """Into ← beta·into + alpha·∂loss, by the network's own derivative or by autograd."""
    net = job.net
    given = in_training(net, weight)
    if net.accumulate and job.precision != "bfloat16":
        net.accumulate(params, x, gradient, into, beta, alpha, **given)
        return
    # .data, not detach(): chunks are views of one tensor, and another thread's step is no change here.
    leaves = {name: p.data.requires_grad_(name in into) for name, p in params.items()}
    with torch.autocast(job.device.type, torch.bfloat16, enabled=job.precision == "bfloat16"):
        out = net.apply(leaves, x, **given)
    grads = torch.autograd.grad(out, [leaves[name] for name in into], gradient(out.detach().float().clone()).to(out))
    for total, grad in zip(into.values(), grads, strict=True):
        total.mul_(beta).add_(grad, alpha=alpha)
