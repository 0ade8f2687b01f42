"""Clients one at a time, trained on samples other than the round's: what halves and choices must equal."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import torch
import trainer
from plain_loop import samples

from fedstat._utils import streams
from fedstat.fl import nets
from fedstat.fl.batches import Rows
from fedstat.fl.local_training import train_chunk
from fedstat.fl.state import Download


def halves(job, number, client):
    """Both halves of a client's samples, each (x, y)."""
    x, y = samples(job.train, client)
    order = streams.generator(job.seed, "halves", number, int(client)).permutation(len(y))
    return [(x[some], y[some]) for some in np.split(order, [(len(y) + 1) // 2])]


def train(job, state, client, own, phases, key):
    """The download of one client, and its model after training on samples (x, y), alone in its chunk."""
    x, y = own
    start = np.where(np.arange(job.clients + 1) <= client, 0, len(y))
    alone, who = replace(job, train=Rows(x, y, start)), np.array([client])
    before = trainer.models(job, state, who)
    after = {name: p.clone() for name, p in before.items()}
    train_chunk(alone, after, who, phases, key=(key, state.round), state=Download(alone, state).algorithm_state(who))
    return before, after


def components(job, state, clients, phases):
    """Sums of squares (client,) between clients and within them, by layer, of shared entries; by least squares."""
    sizes = job.train.sizes[clients].astype(float)
    found = {}
    for layer in nets.layers(job.net):
        models = []
        for client in clients:
            own = [train(job, state, client, half, phases, "batches")[1] for half in halves(job, state.round, client)]
            models.append([_shared(job, state, one, layer) for one in own])
        w = np.array(models)  # (client, half, weight)
        if not w.shape[2]:
            continue
        lone = np.unique(sizes, return_counts=True)[1].max() >= len(sizes) - 1
        x = np.ones((len(sizes), 1)) if lone else np.stack([np.ones_like(sizes), sizes], 1)
        mean = w.mean(1)
        rest = mean - x @ np.linalg.lstsq(x, mean, rcond=None)[0]
        found[layer] = (rest**2).sum(1), ((w[:, 0] - w[:, 1]) ** 2).sum(1) / 2
    return found


def _shared(job, state, model, layer):
    names = [n for n in job.net.shapes if nets.layer_of(n) == layer and n not in job.net.buffers]
    return np.concatenate(
        [np.empty(0), *(model[n][0][state.mask.shared[n].expand(job.net.shapes[n])].double().numpy() for n in names)]
    )


def score(job, params, own):
    """Mean accuracy and loss of one model on samples (x, y)."""
    x, y = own
    out = job.net.apply(params, x[None])
    return (job.loss.predict(out) == y).float().mean().item(), job.loss.value(out, y[None]).mean().item()


def choose(job, state):
    """Test accuracy and loss (client,) of what clients predict with, and the position (client,) of their candidate."""
    choice, phases = job.algorithm.choice, job.algorithm.finetune
    ways = [*product(choice.finetunings or (phases,), choice.steps)]
    validated = choice.held_out == "validation" or (choice.held_out is None and job.validation is not None)
    loss = np.zeros((job.clients, len(ways)))
    for client, (i, (finetuning, step)) in product(range(job.clients), enumerate(ways)):
        first, second = halves(job, state.round, client)
        whole = samples(job.train, client)
        folds = [(whole, samples(job.validation, client))] if validated else [(first, second), (second, first)]
        for own, held in folds:
            model = _between(*train(job, state, client, own, finetuning, "finetune"), step)
            loss[client, i] += len(held[1]) * score(job, model, held)[1]
    voters = trainer.active(job, max(state.round - 1, 0))
    best = loss.argmin(1) if choice.by == "client" else np.full(job.clients, loss[voters].sum(0).argmin())
    models = [
        _between(*train(job, state, client, samples(job.train, client), ways[i][0], "finetune"), ways[i][1])
        for client, i in enumerate(best)
    ]
    return np.array([score(job, one, samples(job.test, client)) for client, one in enumerate(models)]).T, best


def _between(before, after, step):
    return {name: torch.lerp(p, after[name], step) for name, p in before.items()}
