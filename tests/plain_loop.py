"""The readable twin of the stacked engine: one torch.nn module per client, torch.optim, Python loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from fedstat import _random
from fedstat.fl import engine


def module(sizes: list[int]) -> nn.Sequential:
    parts: list[tuple[str, nn.Module]] = []
    for i, (n_in, n_out) in enumerate(pairwise(sizes), 1):
        parts += [(f"fc{i}", nn.Linear(n_in, n_out)), (f"relu{i}", nn.ReLU())]
    net = nn.Sequential()
    for name, part in parts[:-1]:
        net.add_module(name, part)
    return net


def train_client(net, x, y, make_optimizer, *, epochs, batch_size, rng, penalty=None, trains=None) -> None:
    """Plain local training: shuffled batches, mean loss, one optimiser over the parameters that train."""
    named = dict(net.named_parameters())
    for name, p in named.items():
        p.requires_grad_(trains is None or trains(name))
    optimizer = make_optimizer([p for p in named.values() if p.requires_grad])
    anchor = {name: p.detach().clone() for name, p in named.items()}
    n, size = len(x), min(batch_size or len(x), len(x))
    shuffled = rng.permuted(np.tile(np.arange(n), (epochs, 1)), axis=1)
    for order in shuffled:
        for low in range(0, n, size):
            rows = torch.from_numpy(order[low : low + size])
            out = net(x[rows])
            if out.shape[1] == 1:
                loss = nn.functional.binary_cross_entropy_with_logits(out[:, 0], y[rows].float())
            else:
                loss = nn.functional.cross_entropy(out, y[rows])
            if penalty is not None:
                loss = loss + penalty(named, anchor)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def run(
    job: engine.Job,
    sizes: list[int],
    make_optimizer: Callable,
    *,
    rounds: int,
    shared: Callable[[dict[str, np.ndarray], int], dict[str, np.ndarray | bool]],
    phases: tuple[dict, ...] = ({},),
) -> tuple[list[dict[str, torch.Tensor]], np.ndarray]:
    """Train every client by itself and average entry by entry; returns client models and their test accuracies.

    ``shared(weights, round)`` gets the active clients' trained parameters, stacked, and returns the split.
    """
    clients = range(job.clients)
    server = job.net.init(_random.generator(job.seed, "start"))
    own = [{name: p.clone() for name, p in server.items()} for _ in clients]
    masks = {name: torch.ones_like(p, dtype=torch.bool) for name, p in server.items()}

    def download(c: int) -> dict[str, torch.Tensor]:
        return {name: torch.where(masks[name], server[name], own[c][name]) for name in server}

    for number in range(rounds):
        active = engine.active(job, number)
        for c in active:
            net = module(sizes)
            net.load_state_dict(download(c))
            rows = slice(job.train.start[c], job.train.start[c + 1])
            for position, phase in enumerate(phases):
                rng = _random.generator(job.seed, "batches", number, position, int(c))
                options = {"epochs": job.local_epochs, **phase}
                x, y = job.train.x[rows], job.train.y[rows]
                train_client(net, x, y, make_optimizer, batch_size=job.batch_size, rng=rng, **options)
            own[c] = {name: p.detach().clone() for name, p in net.state_dict().items()}
        trained = {name: np.stack([own[c][name].numpy() for c in active]) for name in server}
        new = {
            name: torch.as_tensor(np.broadcast_to(m, server[name].shape).copy())
            for name, m in shared(trained, number).items()
        }
        n = torch.tensor([float(job.train.sizes[c]) for c in active])
        for name in server:
            mean = sum(w * own[c][name] for w, c in zip(n / n.sum(), active, strict=True))
            moved = torch.where(masks[name], server[name] + job.server_lr * (mean - server[name]), mean)
            server[name] = torch.where(new[name], moved, server[name])
        masks = new
    models = [download(c) for c in clients]
    accuracy = []
    for c in clients:
        net = module(sizes)
        net.load_state_dict(models[c])
        rows = slice(job.test.start[c], job.test.start[c + 1])
        out = net(job.test.x[rows])
        guess = (out[:, 0] > 0).long() if out.shape[1] == 1 else out.argmax(1)
        accuracy.append((guess == job.test.y[rows]).float().mean().item())
    return models, np.array(accuracy)
