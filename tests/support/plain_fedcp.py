"""FedCP in plain torch: one module per client, autograd, Python loops (Zhang et al. 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plain_loop
import torch
import trainer
from torch import nn

from fedstat._utils import streams
from fedstat.fl import nets
from fedstat.fl.job import Job


class Model(nn.Module):
    """Extractor, two heads and the conditional policy network."""

    def __init__(self, body: nn.Module, features: int, outputs: int) -> None:
        super().__init__()
        self.body, self.own, self.globe = body, nn.Linear(features, outputs), nn.Linear(features, outputs)
        self.policy, self.norm = nn.Linear(features, 2 * features), nn.LayerNorm(2 * features)
        self.context = torch.zeros(features)

    def see_context(self) -> None:
        v = self.own.weight.detach().sum(0)
        self.context = v / v.norm()

    def separate(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.relu(self.norm(self.policy(self.context * h)))
        r, s = torch.softmax(torch.stack(a.chunk(2, 1)), 0)
        return r, s

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        r, s = self.separate(h)
        return self.globe(r * h) + self.own(s * h), h

    def named(self, head: str) -> dict[str, torch.Tensor]:
        """Parameters by their names in the package."""
        found = dict(self.body.named_parameters())
        found |= {f"policy1.{n}": p for n, p in self.policy.named_parameters()}
        found |= {"policy1.scale": self.norm.weight, "policy1.shift": self.norm.bias}
        found |= {f"global.{n}": p for n, p in self.globe.named_parameters()}
        return found | {f"{head}.{n}": p for n, p in self.own.named_parameters()}


def mmd(h: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Squared maximum mean discrepancy of two batches: the mean over all pairs of rows."""

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        square = (a[:, None] - b[None]).square().sum(-1)
        return sum(torch.exp(-square / (2 * width)) for width in (10, 15, 20, 50))

    return (kernel(h, h) + kernel(g, g) - 2 * kernel(h, g)).mean()


def train_client(
    model: Model, x: torch.Tensor, y: torch.Tensor, make_optimizer: Callable, *, lam: float, job: Job, rng
) -> float:
    """Local training; returns the mean of s before it."""
    model.see_context()
    with torch.no_grad():
        frozen = model.body(x)
        share = model.separate(frozen)[1].mean().item()
    for p in model.globe.parameters():
        p.requires_grad_(False)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for rows in plain_loop.shuffled(len(x), job.batch_size, job.local_epochs, rng):
        out, h = model(x[rows])
        plain_loop.descend(optimizer, plain_loop.loss(out, y[rows]) + lam * mmd(h, frozen[rows]))
    return share


def run(
    job: Job,
    make_body: Callable[[], nn.Module],
    make_optimizer: Callable,
    *,
    rounds: int,
    lam: float = 5,
    score: bool = True,
) -> tuple[list[dict[str, torch.Tensor]], np.ndarray, np.ndarray]:
    """Client models, their test accuracies, and the mean of s of the clients of the last round (NaN: not active)."""
    head, start = nets.head_layers(job.net)[-1], job.net.init(streams.generator(job.seed, "start"))
    outputs, features = start[f"{head}.weight"].shape
    clients = [Model(make_body(), features, outputs) for _ in range(job.clients)]
    server = {name: p for name, p in start.items() if not name.startswith("client.")}
    shared = [name for name in server if nets.layer_of(name) != head]

    def set_all(model: Model, values: dict[str, torch.Tensor], names: list[str]) -> None:
        named = model.named(head)
        for name in names:
            named[name].data.copy_(values[name])

    for model in clients:
        set_all(model, server, list(server))
        model.see_context()
    share = np.full(job.clients, np.nan)
    for number in range(rounds):
        active, sent = trainer.active(job, number), []
        for c in active:
            model, (x, y) = clients[c], plain_loop.samples(job.train, c)
            set_all(model, server, shared)
            rng = streams.generator(job.seed, "batches", number, 0, int(c))
            share[c] = train_client(model, x, y, make_optimizer, lam=lam, job=job, rng=rng)
            named = {name: p.detach() for name, p in model.named(head).items()}
            means = {n: (named[n] + named[n.replace("global", head)]) / 2 for n in named if n.startswith("global.")}
            sent.append({name: (named | means)[name].clone() for name in shared})
        share[np.setdiff1d(np.arange(job.clients), active)] = np.nan
        server = plain_loop.mean_by_samples(job, active, sent)
    for model in clients:
        set_all(model, server, shared)
    accuracy = plain_loop.accuracies(job, lambda c, x: clients[c](x)[0]) if score else np.zeros(0)
    named = [{name: p.detach() for name, p in model.named(head).items()} for model in clients]
    return [one | {"client.context": m.context} for one, m in zip(named, clients, strict=True)], accuracy, share
