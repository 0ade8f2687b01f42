"""FedCAC, pFedPara and pFedGate in plain torch: one module per client, autograd, Python loops."""

from __future__ import annotations

from functools import partial

import numpy as np
import plain_loop
import torch
import trainer
from torch import nn

from fedstat._utils import streams

SIZES = [6, 10, 3]


def _copy(params):
    return {name: p.detach().clone() for name, p in params.items()}


def fedcac(j, optimizer, rounds, *, tau=0.5, beta=3, sizes=SIZES):
    """Wu et al. (2023), Algorithm 1."""
    server = j.net.init(streams.generator(j.seed, "start"))
    model = [_copy(server) for _ in range(j.clients)]  # what each client begins with
    own = [_copy(server) for _ in range(j.clients)]  # its customised model
    mask = [{n: torch.zeros(p.shape, dtype=torch.bool) for n, p in server.items()} for _ in range(j.clients)]
    for number in range(rounds):
        active, trained = trainer.active(j, number), {}
        for c in active:
            trained[c] = plain_loop.trained(j, plain_loop.module(sizes), model[c], c, optimizer, "batches", number, 0)
            for n, p in trained[c].items():
                s = (p * (p - model[c][n])).abs().flatten()
                best = torch.argsort(s, descending=True)[: int(tau * len(s))]
                mask[c][n] = torch.zeros(len(s), dtype=torch.bool)
                mask[c][n][best] = True
                mask[c][n] = (mask[c][n] & (s > 0)).view(p.shape)
        n = {c: float(j.train.sizes[c]) for c in active}
        server = {k: sum(n[c] / sum(n.values()) * trained[c][k] for c in active) for k in server}

        def apart(a, b):
            flat = [torch.cat([m.flatten().float() for m in mask[c].values()]) for c in (a, b)]
            return 1 - float((flat[0] - flat[1]).abs().sum() / (flat[0].sum() + flat[1].sum()))

        o = {(a, b): apart(a, b) for a in active for b in active if a != b}
        mean, most = (np.mean(list(o.values())), max(o.values())) if o else (0, 0)
        least = mean + (number + 1) / beta * (most - mean)
        for a in active:
            group = [a, *(b for b in active if b != a and o[a, b] >= least - 1e-12)]
            own[a] = {n: sum(trained[b][n] for b in group) / len(group) for n in server}
        # with the masks of each client's last round
        model = [{n: torch.where(mask[c][n], own[c][n], server[n]) for n in server} for c in range(j.clients)]
    return model, plain_loop.scores(j, lambda: plain_loop.module(sizes), model)


class Hadamard(nn.Module):
    """A dense layer of weight (X₁Y₁ᵀ) ⊙ (X₂Y₂ᵀ + 1)."""

    def __init__(self, inputs, outputs, rank):
        super().__init__()
        for i in (1, 2):
            setattr(self, f"x{i}", nn.Parameter(torch.zeros(outputs, rank)))
            setattr(self, f"y{i}", nn.Parameter(torch.zeros(inputs, rank)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, h):
        return h @ ((self.x1 @ self.y1.T) * (self.x2 @ self.y2.T + 1)).T + self.bias


class HadamardMlp(nn.Module):
    def __init__(self, ranks=(3, 2), sizes=SIZES):
        super().__init__()
        self.fc1, self.fc2 = (Hadamard(sizes[i], sizes[i + 1], rank) for i, rank in enumerate(ranks))

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


def pfedpara(j, optimizer, rounds, *, ranks=(3, 2), sizes=SIZES):
    """Hyeon-Woo et al. (2022), §2.3: of R for 10 × 6, r_min = 3 and r_max = 1; for 3 × 10, 2 and 1."""
    split = {n: np.asarray(not n.endswith(("x2", "y2"))) for n in j.net.shapes}
    made = partial(HadamardMlp, ranks, sizes)
    return plain_loop.run(j, made, optimizer, rounds=rounds, shared=lambda *_: split, before=split)


class Gate(nn.Module):
    """Normalisation, a dense layer and normalisation: a weight for every block of a model's parameters."""

    def __init__(self, inputs, blocks):
        super().__init__()
        self.layer, self.norm = nn.Linear(inputs, blocks), nn.LayerNorm(blocks)

    def forward(self, x):
        return torch.sigmoid(self.norm(self.layer(nn.functional.layer_norm(x, x.shape[1:]))))

    def named(self):
        names = ("gate.weight", "gate.bias", "gate.scale", "gate.shift")
        return dict(zip(names, self.parameters(), strict=True))


def chunks(params, blocks):
    """Blocks (name, first entry, last) of all parameters."""
    found = []
    for name, p in params.items():
        size = -(-p.numel() // min(blocks, p.numel()))
        found += [(name, low, min(low + size, p.numel())) for low in range(0, p.numel(), size)]
    return found


def chosen(m, parts, s):
    """Greedy knapsack: first blocks, then by descending weight those that fit into s of all entries."""
    sizes = [high - low for _, low, high in parts]
    open_ = {i for i, (_, low, _) in enumerate(parts) if low == 0}
    room = int(s * sum(sizes) + 1e-9) - sum(sizes[i] for i in open_)
    for i in sorted(set(range(len(parts))) - open_, key=lambda i: -m[i].item()):
        if sizes[i] <= room:
            open_.add(i)
            room -= sizes[i]
    return torch.tensor([float(i in open_) for i in range(len(parts))])


def sparse(params, g, parts):
    """The model: every block times its gate."""
    factors = {name: torch.zeros(0) for name in params}
    for gate, (name, low, high) in zip(g, parts, strict=True):
        factors[name] = torch.cat([factors[name], gate.expand(high - low)])
    return {name: p * factors[name].view(p.shape) for name, p in params.items()}


def mlp(params, x):
    h = (x @ params["fc1.weight"].T + params["fc1.bias"]).relu()
    return h @ params["fc2.weight"].T + params["fc2.bias"]


def pfedgate(j, optimizer, rounds, *, s=0.5, blocks=5):
    """Chen et al. (2023), Algorithm 1."""
    start = j.net.init(streams.generator(j.seed, "start"))
    server = {n: p for n, p in start.items() if not n.startswith("gate")}
    parts = chunks(server, blocks)
    gates = [Gate(start["gate.weight"].shape[1], len(parts)) for _ in range(j.clients)]
    for gate in gates:
        for name, p in gate.named().items():
            p.data.copy_(start[name])
    seen = [torch.ones(len(parts)) for _ in gates]
    for number in range(rounds):
        active, trained = trainer.active(j, number), []
        for c in active:
            x, y = plain_loop.samples(j.train, c)
            theta = {name: p.clone().requires_grad_() for name, p in server.items()}
            rule = optimizer([*gates[c].parameters(), *theta.values()])
            for rows in plain_loop.batches(j, c, "batches", number, 0):
                m = gates[c](x[rows]).mean(0)
                g = m * (chosen(m, parts, s) + m - m.detach())
                out = mlp(sparse(theta, g, parts), x[rows])
                plain_loop.descend(rule, nn.functional.cross_entropy(out, y[rows]))
            m = gates[c](x).mean(0).detach()
            seen[c] = m * chosen(m, parts, s)
            trained.append(_copy(theta))
        server = plain_loop.mean_by_samples(j, active, trained)
    models = [server | _copy(gate.named()) | {"gate.open": seen[c]} for c, gate in enumerate(gates)]
    return models, plain_loop.accuracies(j, lambda c, x: mlp(sparse(server, seen[c], parts), x))


PLAIN = {"fedcac": fedcac, "pfedgate": pfedgate, "pfedpara": pfedpara}
