"""Deep leakage from gradients: matching of gradients, and the gradients that a server observes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets, optim
from fedstat.fl.algorithm import Mask, Phase
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import of_local
from fedstat.fl.communication_round import Upload, encode, round_context
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_chunk
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params
from fedstat.fl.privacy import mean_update
from fedstat.fl.state import Download, State

if TYPE_CHECKING:
    from torch import Tensor


RATE, BETAS = 0.3, (0.9, 0.999)


class Recovered(NamedTuple):
    """What the attacker makes of what she sees.

    Attributes
    ----------
    x : Tensor (victim, ...)
        Images.
    y : int64 Tensor (victim,)
        Classes.
    distance : Tensor (victim,)
        Squared distance of the gradients, as a share of the squared norm of the gradient sent.
    """

    x: Tensor
    y: Tensor
    distance: Tensor


def recover(
    net: Net,
    loss: Loss,
    seen: Observed,
    start: Tensor,
    *,
    box: tuple[Tensor, Tensor],
    iterations: int,
    y: Tensor | None = None,
) -> Recovered:
    """Images, one for each victim, whose gradients are near those sent (Zhu, Liu and Han 2019, Algorithm 1).

    Zhu et al. minimise the squared distance by L-BFGS. Here it is Adam, the step falling from 0.3 to 0 along a cosine
    and images kept in the box: with ReLU and max pooling the distance is only piecewise smooth, and line searches
    spend five evaluations a step for no smaller distance. No victim's course depends on the others.

    Parameters
    ----------
    net : Net
    loss : Loss
    seen : Observed
    start : Tensor (victim, ...)
        Images to start from.
    box : pair of Tensor
        Least and largest pixel, which broadcast against an image.
    iterations : int
    y : int64 Tensor (victim,), optional
        Classes, if the attacker knows them, or :func:`by_sign` tells; otherwise soft labels, optimised with the images.
    """
    classes = max(nets.n_outputs(net), 2)
    free = [start.clone()] + ([] if y is not None else [start.new_zeros(len(start), classes)])
    norm = _sum_squares(seen.gradient.values()).clamp(min=torch.finfo(start.dtype).tiny)
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in free]
    best, least = [p.clone() for p in free], torch.full_like(norm, math.inf)
    for k in range(iterations + 1):
        distance, grads = _distance(net, loss, seen, free, y, norm)
        nearer = distance < least
        least = torch.where(nearer, distance, least)
        for kept, p in zip(best, free, strict=True):
            kept[nearer] = p[nearer]
        if k < iterations:
            _adam(free, grads, moments, k, iterations)
            torch.clamp(free[0], *box, out=free[0])
    return Recovered(best[0], best[1].argmax(1) if y is None else y, least)


def by_sign(net: Net, seen: Observed) -> Tensor | None:
    """Classes by the gradient of the output layer's bias, which is negative for the true class alone; None if not seen.

    Zhao, Mopuri and Bilen (2020), "iDLG", arXiv:2001.02610.
    """
    heads = nets.head_layers(net)
    bias = seen.gradient.get(f"{heads[0]}.bias")
    if len(heads) > 1 or bias is None or bias.ndim != 2 or not bool(seen.mask[f"{heads[0]}.bias"].all()):
        return None
    return bias.argmin(1) if bias.shape[1] > 1 else (bias[:, 0] < 0).long()


def _distance(
    net: Net, loss: Loss, seen: Observed, free: Sequence[Tensor], y: Tensor | None, norm: Tensor
) -> tuple[Tensor, Sequence[Tensor]]:
    """Relative squared distance (victim,) of the gradients, and its derivatives at images and soft labels."""
    leaves = {name: p.clone() if name in net.buffers else p.detach() for name, p in seen.model.items()}
    wanted = [leaves[name].requires_grad_() for name in seen.gradient]
    x, *soft = (p.detach().requires_grad_() for p in free)
    out = net.apply(leaves, x.unsqueeze(1), **nets.in_training(net, torch.ones_like(x[:, :1].flatten(1)[:, :1])))
    if y is not None:
        value = loss.value(out, y.unsqueeze(1)).sum()
    else:
        shares = torch.softmax(soft[0], 1)
        every = torch.arange(shares.shape[1], device=x.device).expand_as(shares)
        value = (loss.value(out.expand(-1, shares.shape[1], -1), every) * shares).sum()
    grads = torch.autograd.grad(value, wanted, create_graph=True, materialize_grads=True)
    # The distance's derivative at the gradients is twice the difference: no graph through squares and sums is needed.
    away = {name: grad.detach() - seen.gradient[name] for name, grad in zip(seen.gradient, grads, strict=True)}
    for name, p in away.items():
        if not bool(seen.mask[name].all()):
            p.mul_(seen.mask[name])
    distance = _sum_squares(away.values()) / norm
    through = [(g, t) for g, t in zip(grads, away.values(), strict=True) if g.requires_grad]
    found = torch.autograd.grad([g for g, _ in through], [x, *soft], [t for _, t in through], materialize_grads=True)
    for p in found:  # once here, and not at every entry of the gradients
        p.mul_((2 / norm).view(-1, *(1,) * (p.ndim - 1)))
    return distance, found


def _sum_squares(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([torch.linalg.vector_norm(p.flatten(1), dim=1).square() for p in parts]).sum(0)


def _adam(
    free: Sequence[Tensor], grads: Sequence[Tensor], moments: Sequence[tuple[Tensor, Tensor]], k: int, of: int
) -> None:
    """Step k of Adam, in place; the rate falls to 0 along a cosine."""
    rate = RATE * (1 + math.cos(math.pi * k / of)) / 2
    for p, grad, (mean, square) in zip(free, grads, moments, strict=True):
        mean.lerp_(grad, 1 - BETAS[0])
        square.lerp_(grad.square(), 1 - BETAS[1])
        root = (square / (1 - BETAS[1] ** (k + 1))).sqrt_().add_(torch.finfo(p.dtype).tiny ** 0.5)
        p.addcdiv_(mean, root, value=-rate / (1 - BETAS[0] ** (k + 1)))


class Observed(NamedTuple):
    """What the attacker has of some victims, each a client with one image.

    Attributes
    ----------
    model : Params (victim, ...)
        Every parameter as the server knows it: where the client sends an entry, its value before the step; elsewhere
        the server's copy, which for entries that are never shared is the common start.
    gradient : Params (victim, ...)
        What was sent minus what there was before, over minus the learning rate; 0 where ``mask`` is False.
    mask : mapping from name to bool Tensor (victim, ...)
        Entries that are both sent and trained, and so tell something of the image; broadcasts against the gradient.
    """

    model: Params
    gradient: Params
    mask: Mask

    def part(self, victims: slice | np.ndarray) -> Observed:
        """Some of the victims."""
        model, gradient = ({name: p[victims] for name, p in of.items()} for of in (self.model, self.gradient))
        rows = {
            name: m[victims] if m.ndim == self.model[name].ndim and len(m) > 1 else m for name, m in self.mask.items()
        }
        return Observed(model, gradient, rows)


def matched(job: Job, state: State) -> Mask:
    """Entries of each parameter that clients send and some phase trains: (client, *shape), or broadcasting against it.

    Parameters that have none are left out.

    Raises
    ------
    ValueError
        If there is none at all.
    """
    sent, moved = job.hooks.upload_mask(state.mask), _rates(job)
    found = {name: sent[name] for name in job.net.shapes if name in moved and bool(sent[name].any())}
    if not found:
        raise ValueError(
            f"{job.algorithm.name} sends nothing that it trains, so there is no gradient to attack. Attack a method "
            "that shares something."
        )
    return found


def observe(job: Job, state: State, clients: np.ndarray, x: Tensor, y: Tensor) -> Observed:
    """What the server sees if each of some clients takes one local step on one image of its own.

    The step is the method's: all its phases, with one batch each, its losses, penalties and own steps, what it weighs
    and what it sends in place of what it trained. It is a plain gradient step of the run's learning rate: Adam's first
    step would send little but signs. Of a private run it is not what a client sends, which nobody but the trusted
    server has, but what is left of a round's release to somebody who knows all that the other clients sent: the
    victim's update, clipped and with the noise of the sum.

    Parameters
    ----------
    job : Job
    state : State
        From which the clients download.
    clients : int array (victim,)
        Each client once.
    x, y : Tensor (victim, ...) and (victim,)
        Their images and classes.

    Returns
    -------
    Observed
        Victims in the order given.
    """
    cohort, download = of_local(job, clients), Download(job, state)
    order = cohort.local
    at = torch.from_numpy(np.argsort(clients)[np.searchsorted(np.sort(clients), order)])
    lr = job.optimizer.lr
    if lr is None:
        raise ValueError(f"the optimizer {job.optimizer.name!r} has no 'lr' to divide by. Use optim.sgd or optim.adam.")
    alone = replace(
        job,
        train=Rows(x[at], y[at], np.arange(len(order) + 1), job.train.ids[order]),
        batch_size=1,
        optimizer=optim.sgd(lr),
        track=False,
    )
    before = download.models(order)
    after = {name: p.clone() for name, p in before.items()}
    phases = tuple(_one_step(phase, job.local_epochs) for phase in job.phases)
    train_chunk(alone, after, np.arange(len(order)), phases, key=("attack",), state=download.algorithm_state(order))
    upload = encode(job.hooks, round_context(job, download, cohort, after), state.mask, cohort)
    sent = dict(upload.values)
    if job.aggregator.privacy:
        sent |= _released(job, state, order, before, upload)
    back = torch.argsort(at)
    wanted = matched(job, state)
    model, gradient, mask, rates = {}, {}, {}, _rates(job)
    for name, p in state.global_params.items():
        rows = masks.of_clients(upload.entries[name], p.ndim, clients)
        model[name] = torch.where(rows, before[name][back], p)
        if name in wanted:
            mask[name] = rows
            moved = (before[name] - sent[name])[back] / (lr * rates[name])
            gradient[name] = torch.where(rows, moved, 0.0)
    return Observed(model, gradient, mask)


def _released(job: Job, state: State, clients: np.ndarray, before: Params, upload: Upload) -> Params:
    """What a private aggregator releases of each of some clients (victim,), the rows of ``before``, alone."""
    assert job.aggregator.privacy is not None  # noqa: S101
    masks_of = upload.entries.items()
    shared = {name: masks.of_clients(mask, before[name].ndim - 1, clients) for name, mask in masks_of}
    away = {name: (upload.values[name] - before[name]) * mask for name, mask in shared.items() if bool(mask.any())}
    moved = []
    for i, client in enumerate(job.train.ids[clients].tolist()):
        stream = partial(streams.generator, job.seed, "attack", "privacy", state.round, client)
        one = {name: p[i : i + 1] for name, p in away.items()}
        moved.append(mean_update(one, job.aggregator.privacy, 1.0, stream))
    return {name: before[name] + torch.stack([one[name] for one in moved]) for name in away}


def _one_step(phase: Phase, local_epochs: int) -> Phase:
    """The phase with one batch; one of 0 epochs, which only weighs samples, has none."""
    return phase._replace(epochs=1, steps=1) if phase.length(local_epochs) else phase._replace(epochs=0)


def _rates(job: Job) -> dict[str, float]:
    """Sum of the steps' learning rates for every parameter that moves, as multiples of the run's."""
    found: dict[str, float] = {}
    for phase in job.phases:
        for name in phase.moves(job.net) if phase.length(job.local_epochs) else ():
            found[name] = found.get(name, 0.0) + phase.lr * phase.repeats
    return found
