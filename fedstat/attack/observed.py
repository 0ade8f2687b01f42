"""What a server sees of clients that take one local step, by the method's own record."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedstat import _random
from fedstat._later import torch
from fedstat.fl import masks, optim
from fedstat.fl.algorithm import Mask, Phase
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import of_local
from fedstat.fl.communication_round import Upload, encode, round_context
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_chunk
from fedstat.fl.nets import Params
from fedstat.fl.privacy import mean_update
from fedstat.fl.state import Download, State

if TYPE_CHECKING:
    from torch import Tensor


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
        stream = partial(_random.generator, job.seed, "attack", "privacy", state.round, client)
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
