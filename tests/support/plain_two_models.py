"""Per-FedAvg, pFedMe and Ditto in plain torch: one module per client and model, autograd, Python loops."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import numpy as np
import plain_loop
import torch
import trainer
from algorithm_jobs import SETTINGS
from plain_loop import batches, descend, mean, mean_by_samples
from torch import nn

from fedstat._utils import streams


def module(params):
    """An MLP of these parameters, whose names give its sizes."""
    weights = [p for name, p in params.items() if name.endswith("weight")]
    return plain_loop.loaded(plain_loop.module([weights[0].shape[1], *map(len, weights)]), params)


def values(net):
    return {name: p.detach().clone() for name, p in net.state_dict().items()}


def gradient(net, x, y):
    return torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))


def begin(j, prefix=""):
    start = j.net.init(streams.generator(j.seed, "start"))
    return {name.removeprefix(prefix): p for name, p in start.items() if name.startswith(prefix)}


def away(net, direction, step):
    """A copy of a module, a step along a direction."""
    there = deepcopy(net)
    for p, d in zip(there.parameters(), direction, strict=True):
        p.data += step * d
    return there


def gradient_away(net, direction, step, x, y):
    """The gradient a step along a direction; the module stays where it is."""
    before = [p.detach().clone() for p in net.parameters()]
    for p, d in zip(net.parameters(), direction, strict=True):
        p.data.add_(d, alpha=step)
    found = gradient(net, x, y)
    for p, was in zip(net.parameters(), before, strict=True):
        p.data.copy_(was)
    return found


def of_meta_loss(net, x, y, alpha, difference):
    """Fallah et al. (2020), Algorithm 1: its first-order (difference None) or Hessian-free gradient at one batch."""
    parts = 2 if difference is None else 3
    first, second, *third = ([*range(i, len(x), parts)] or [i % len(x)] for i in range(parts))
    v = gradient_away(net, gradient(net, x[first], y[first]), -alpha, x[second], y[second])
    for rows in third:
        ahead, behind = (gradient_away(net, v, step, x[rows], y[rows]) for step in (difference, -difference))
        v = [d - alpha * (a - b) / (2 * difference) for d, a, b in zip(v, ahead, behind, strict=True)]
    return v


def per_fedavg(j, make_optimizer, rounds, *, alpha, finetune_steps, difference=None, score=True):
    server = begin(j)
    for number in range(rounds):
        sent = []
        for c in trainer.active(j, number):
            net, (x, y) = module(server), plain_loop.samples(j.train, c)
            optimizer = make_optimizer(net.parameters())
            for rows in batches(j, c, "batches", number, 0):
                for p, d in zip(net.parameters(), of_meta_loss(net, x[rows], y[rows], alpha, difference), strict=True):
                    p.grad = d
                optimizer.step()
            sent.append(values(net))
        server = mean(sent, [1 / len(sent)] * len(sent))

    def tuned(c, test):
        net, (x, y) = module(server), plain_loop.samples(j.train, c)
        each = -(-len(x) // min(j.batch_size or len(x), len(x)))
        drawn = batches(j, c, "finetune", rounds, 0, epochs=-(-finetune_steps // each))
        for rows, _ in zip(drawn, range(finetune_steps), strict=False):
            net = away(net, gradient(net, x[rows], y[rows]), -alpha)
        return net(test)

    return [server] * j.clients, plain_loop.accuracies(j, tuned) if score else np.zeros(0)


def moreau(net, w, x, y, make_optimizer, drawn, *, lam, eta, inner_steps):
    """Dinh et al. (2020), Algorithm 1, lines 4 to 10, of one client: θ, in place, and w."""
    optimizer = make_optimizer(net.parameters())
    for rows in drawn:
        for _ in range(inner_steps):
            far = sum((p - w[name]).square().sum() for name, p in net.named_parameters())
            descend(optimizer, nn.functional.cross_entropy(net(x[rows]), y[rows]) + lam / 2 * far)
        w = {name: w[name] - eta * lam * (w[name] - p.detach()) for name, p in net.named_parameters()}
    return w


def pfedme(j, make_optimizer, rounds, *, variant="paper", score=True, **settings):
    server = begin(j, "global_")
    own = [server] * j.clients
    for number in range(rounds):
        sent, active = [], trainer.active(j, number)
        for c in active:
            net, (x, y) = module(server), plain_loop.samples(j.train, c)
            drawn = batches(j, c, "batches", number, 0)
            sent.append(moreau(net, server, x, y, make_optimizer, drawn, **settings))
            own[c] = values(net)
        n = j.train.sizes[active] if variant == "code" else np.ones(len(active))
        new = mean(sent, (n / n.sum()).tolist())
        server = {name: (1 - j.server_lr) * p + j.server_lr * new[name] for name, p in server.items()}
    return both(server, own), plain_loop.accuracies(j, lambda c, x: module(own[c])(x)) if score else np.zeros(0)


def ditto(j, make_optimizer, rounds, *, lam, own_epochs, score=True):
    """Li et al. (2021), Algorithm 1."""
    server = begin(j, "global_")
    own = [server] * j.clients
    for number in range(rounds):
        sent, active = [], trainer.active(j, number)
        for c in active:
            far = lambda now, _, w=server: lam / 2 * sum((p - w[n]).square().sum() for n, p in now.items())  # noqa: E731
            trained = []
            for position, (params, penalty, epochs) in enumerate(
                [(server, None, j.local_epochs), (own[c], far, own_epochs)]
            ):
                key, how = ("batches", number, position), {"epochs": epochs, "penalty": penalty}
                trained.append(plain_loop.trained(j, module(params), params, c, make_optimizer, *key, **how))
            sent.append(trained[0])
            own[c] = trained[1]
        server = mean_by_samples(j, active, sent)
    return both(server, own), plain_loop.accuracies(j, lambda c, x: module(own[c])(x)) if score else np.zeros(0)


def both(server, own):
    return [{f"global_{n}": p for n, p in server.items()} | {f"own_{n}": p for n, p in one.items()} for one in own]


PLAIN = {
    "per-fedavg": partial(per_fedavg, **SETTINGS["per-fedavg"]),
    "per-fedavg-hf": partial(per_fedavg, **SETTINGS["per-fedavg-hf"]),
    "pfedme": partial(pfedme, **SETTINGS["pfedme"]),
    "ditto": partial(ditto, **SETTINGS["ditto"]),
}
