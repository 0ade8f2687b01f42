"""A plain federated loop to try methods with: one torch module per client, every step written out by the caller."""

from __future__ import annotations

import plain_loop
import torch
import trainer
from plain_loop import mean
from torch.func import functional_call

from fedstat._utils import streams

LR = 0.1


def gradient(sizes, params, x, y):
    """Of the mean cross-entropy of some samples at one client's parameters."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = torch.nn.functional.cross_entropy(functional_call(plain_loop.module(sizes), leaves, (x,)), y)
    return dict(zip(leaves, torch.autograd.grad(loss, [*leaves.values()]), strict=True))


def descent(sizes, job, c, start, number, *, step=None, epochs=None, position=0):
    """Local training; ``step(params, x, y)`` gives the next parameters, by default those of a plain gradient step."""
    params, (x, y) = {name: p.clone() for name, p in start.items()}, plain_loop.samples(job.train, c)
    for rows in plain_loop.batches(job, c, "batches", number, position, epochs=epochs):
        if step is None:
            params = {n: params[n] - LR * g for n, g in gradient(sizes, params, x[rows], y[rows]).items()}
        else:
            params = step(params, x[rows], y[rows])
    return params


def run(job, rounds, *, local, server=None, download=None):
    """Rounds in which all that is sent is averaged.

    ``local(c, model, round)`` trains; ``download(server, c, round)`` is what a client begins with; ``server(old, sent,
    weights, round, clients)`` the new model of the server. Returns the server's model.
    """
    model = job.net.init(streams.generator(job.seed, "start"))
    for number in range(rounds):
        clients = [int(c) for c in trainer.active(job, number)]
        sizes = torch.tensor([float(job.train.sizes[c]) for c in clients])
        begin = {c: model if download is None else download(model, c, number) for c in clients}
        sent = [local(c, begin[c], number) for c in clients]
        old, weights = model, sizes / sizes.sum()
        model = mean(sent, weights) if server is None else server(old, sent, weights, number, clients)
    return model
