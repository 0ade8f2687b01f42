"""FedRoD, FedPHP, pFedSD and FedBN in plain torch: modules of single clients, autograd, Python loops."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import plain_loop
import torch
import trainer
from plain_fedcp import mmd
from plain_loop import batches, descend, loss
from torch import nn
from torch.nn.functional import batch_norm, kl_div, layer_norm

from fedstat._utils import streams
from fedstat.fl.job import Job

Models = tuple[list[dict[str, torch.Tensor]], np.ndarray]


def mlp() -> nn.Sequential:
    return plain_loop.module([6, 10, 3])


def averaged(job: Job, active: np.ndarray, modules: list[nn.Module]) -> dict[str, torch.Tensor]:
    return plain_loop.mean_by_samples(job, active, [module.state_dict() for module in modules])


def started(job: Job, make: Callable[[], nn.Module]) -> nn.Module:
    net, drawn = make(), job.net.init(streams.generator(job.seed, "start"))
    net.load_state_dict({name: drawn[name] for name in net.state_dict()})
    return net


def fedrod(job: Job, make_optimizer: Callable, rounds: int, make: Callable = mlp) -> Models:
    """Chen and Chao (2022): balanced softmax for body and generic head, cross-entropy of the sum for the own head."""
    server = started(job, make)
    heads = [copy.deepcopy(server.fc2) for _ in range(job.clients)]
    for number in range(rounds):
        active, trained = trainer.active(job, number), []
        for c in active:
            net, head, (x, y) = copy.deepcopy(server), heads[c], plain_loop.samples(job.train, c)
            counts = torch.bincount(y, minlength=max(2, head.out_features))
            generic, own = make_optimizer(net.parameters()), make_optimizer(head.parameters())
            for rows in batches(job, c, "batches", number, 0):
                h = net[:-1](x[rows])
                out = net.fc2(h)
                if out.shape[1] == 1:  # two classes: the logit of class 0 is 0
                    balanced = torch.cat([torch.zeros_like(out), out], 1) + counts.log()
                    first = nn.functional.cross_entropy(balanced, y[rows])
                else:
                    first = nn.functional.cross_entropy(out + counts.log(), y[rows])
                second = loss(out.detach() + head(h.detach()), y[rows])
                descend(generic, first)
                descend(own, second)
            trained.append(net)
        server.load_state_dict(averaged(job, active, trained))
    own = [{f"personal.{n}": p.detach() for n, p in head.named_parameters()} for head in heads]
    scores = plain_loop.accuracies(job, lambda c, x: server(x) + heads[c](server[:-1](x)))
    return [server.state_dict() | one for one in own], scores


def personal(
    job: Job, make_optimizer: Callable, rounds: int, of_batch: Callable, past: Callable, make: Callable = mlp
) -> Models:
    """FedAvg whose clients keep a model: ``of_batch`` is the loss, ``past`` the old model's share in the new one."""
    server = started(job, make)
    own, times = [copy.deepcopy(server) for _ in range(job.clients)], np.zeros(job.clients, int)
    for number in range(rounds):
        active, trained = trainer.active(job, number), []
        for c in active:
            net, (x, y) = copy.deepcopy(server), plain_loop.samples(job.train, c)
            optimizer = make_optimizer(net.parameters())
            for rows in batches(job, c, "batches", number, 0):
                descend(optimizer, of_batch(net, own[c], x[rows], y[rows], times[c]))
            share = past(times[c])
            with torch.no_grad():
                for old, new in zip(own[c].parameters(), net.parameters(), strict=True):
                    old.copy_(share * old + (1 - share) * new)
            times[c] += 1
            trained.append(net)
        server.load_state_dict(averaged(job, active, trained))
    scores = plain_loop.accuracies(job, lambda c, x: (own[c] if times[c] else server)(x))
    return [server.state_dict()] * job.clients, scores


def fedphp(job: Job, make_optimizer: Callable, rounds: int, make: Callable = mlp, *, transfer: str = "mmd") -> Models:
    """Li et al. (2021): (1 − λ) cross-entropy + λ MMD² (or KD) to the moving average, with λ = 0.3, μ = 0.9, Z = 3."""

    def of_batch(net: nn.Module, teacher: nn.Module, x: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
        h, fixed = net[:-1](x), teacher[:-1](x).detach()
        out = net.fc2(h)
        if transfer == "mmd":
            return 0.7 * loss(out, y) + 0.3 * mmd(h, fixed)
        q = (teacher.fc2(fixed).detach() / 4).softmax(1)
        return 0.7 * loss(out, y) - 0.3 * (q * out.log_softmax(1)).sum(1).mean()

    return personal(job, make_optimizer, rounds, of_batch, lambda z: 0.9 * min(z / 3, 1), make)


def pfedsd(job: Job, make_optimizer: Callable, rounds: int, make: Callable = mlp) -> Models:
    """Jin et al. (2022): cross-entropy + λ T² KL from the last personal model, if there is one; λ = 0.7, T = 2."""

    def log_p(out: torch.Tensor) -> torch.Tensor:
        return (out if out.shape[1] > 1 else torch.cat([torch.zeros_like(out), out], 1)).div(2).log_softmax(1)

    def of_batch(net: nn.Module, teacher: nn.Module, x: torch.Tensor, y: torch.Tensor, times: int) -> torch.Tensor:
        out, q = net(x), log_p(teacher(x)).detach().exp()
        far = 0.7 * 2**2 * kl_div(log_p(out), q, reduction="batchmean")
        return loss(out, y) + far if times else loss(out, y)

    return personal(job, make_optimizer, rounds, of_batch, lambda _: 0, make)


class Normalised(nn.Linear):
    """A dense layer and the normalisation after it."""

    def __init__(self, n_in: int, n_out: int, *, batch: bool = False) -> None:
        super().__init__(n_in, n_out)
        self.scale, self.shift = nn.Parameter(torch.ones(n_out)), nn.Parameter(torch.zeros(n_out))
        if batch:
            self.register_buffer("running_mean", torch.zeros(n_out))
            self.register_buffer("running_var", torch.ones(n_out))
        self.batch = batch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = super().forward(x)
        if self.batch:
            return batch_norm(h, self.running_mean, self.running_var, self.scale, self.shift, training=self.training)
        return layer_norm(h, h.shape[1:], self.scale, self.shift)


def normalised(*, batch: bool = False) -> nn.Module:
    net = mlp()
    net.fc1 = Normalised(6, 10, batch=batch)
    return net


def fedbn(job: Job, make_optimizer: Callable, rounds: int, *, batch: bool = False) -> Models:
    """Li et al. (2021): what belongs to the normalisation is never averaged."""
    kinds = ("scale", "shift", "running_mean", "running_var")
    server = started(job, lambda: normalised(batch=batch))
    clients = [copy.deepcopy(server) for _ in range(job.clients)]

    def download(c: int, mean: dict[str, torch.Tensor]) -> None:
        clients[c].load_state_dict({n: p for n, p in mean.items() if not n.endswith(kinds)}, strict=False)

    mean = server.state_dict()
    for number in range(rounds):
        active = trainer.active(job, number)
        for c in active:
            download(c, mean)
            (x, y), optimizer = plain_loop.samples(job.train, c), make_optimizer(clients[c].parameters())
            for rows in batches(job, c, "batches", number, 0):
                descend(optimizer, loss(clients[c](x[rows]), y[rows]))
        mean = averaged(job, active, [clients[c] for c in active])
    for c in range(job.clients):
        download(c, mean)
    scores = plain_loop.accuracies(job, lambda c, x: clients[c].eval()(x))
    return [net.state_dict() for net in clients], scores


PLAIN = {"fedrod": fedrod, "fedphp": fedphp, "pfedsd": pfedsd, "fedbn": fedbn}
