"""Factorized-FL written out: one torch module per client whose weights are u vᵀ + μ, and matching client by client."""

from __future__ import annotations

import math

import numpy as np
import plain_loop
import torch
import trainer
from scipy.spatial import distance
from torch import nn

from fedstat._utils import streams


class Factors(nn.Module):
    """A dense layer or convolution (and group normalisation), its weight made of factors as the equations say."""

    def __init__(self, outputs, inputs, size=0, *, rank=1, mu=True, kernels="base", norm=False, **options):
        super().__init__()
        self.shape, self.kernels, self.options = (outputs, inputs, *(size,) * (2 if size else 0)), kernels, options
        rows, columns = (outputs * inputs, size * size) if size else (outputs, inputs)
        if size and kernels == "mixed":
            rows, columns = outputs * size, inputs * size
        self.u, self.v = nn.Parameter(torch.zeros(columns, rank)), nn.Parameter(torch.zeros(rows, rank))
        self.mu = nn.Parameter(torch.zeros(self.shape)) if mu else None
        self.bias = None if norm else nn.Parameter(torch.zeros(outputs))
        self.scale, self.shift = (nn.Parameter(torch.ones(outputs)) if norm else None for _ in range(2))

    def weight(self):
        n = self.shape
        if len(n) == 2:
            product = torch.einsum("or,ir->oi", self.v, self.u)
        elif self.kernels == "mixed":
            product = torch.einsum("oar,ibr->oiab", self.v.view(n[0], n[2], -1), self.u.view(n[1], n[3], -1))
        elif self.kernels == "code":
            product = torch.einsum("fr,kr->fk", self.u, self.v).flatten().view(n)
        else:
            product = torch.einsum("oir,abr->oiab", self.v.view(*n[:2], -1), self.u.view(*n[2:], -1))
        return product if self.mu is None else product + self.mu

    def forward(self, x):
        if len(self.shape) == 2:
            return nn.functional.linear(x, self.weight(), self.bias)
        h = nn.functional.conv2d(x, self.weight(), self.bias, **self.options)
        return h if self.scale is None else nn.functional.group_norm(h, math.gcd(len(h[0]), 8), self.scale, self.shift)


class Mlp(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.fc1, self.fc2 = Factors(10, 6, **options), Factors(3, 10, **options)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Cnn(nn.Module):
    """``lenet`` of width 0.3 on 16×16, and of any widths that are given."""

    def __init__(self, widths=(2, 5, 36), features=5, outputs=3, **options):
        super().__init__()
        a, b, hidden = widths
        self.conv1, self.conv2 = Factors(a, 1, 5, **options), Factors(b, a, 5, **options)
        self.fc1, self.fc2 = Factors(hidden, features, **options), Factors(outputs, hidden, **options)

    def forward(self, h):
        for conv in (self.conv1, self.conv2):
            h = nn.functional.max_pool2d(conv(h), 2).relu()
        return self.fc2(self.fc1(h.flatten(1)).relu())


class ResNet8(nn.Module):
    """``resnet8`` of width 0.25 on images of one channel."""

    def __init__(self):
        super().__init__()
        for i, (a, b, stride) in enumerate(((1, 4, 1), (4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 16, 2)), 1):
            setattr(self, f"conv{i}", Factors(b, a, 3, norm=True, stride=stride, padding=1))
        self.conv7 = Factors(16, 16, 3, norm=True, padding=1)
        self.shortcut4 = Factors(8, 4, 1, norm=True, stride=2)
        self.shortcut6 = Factors(16, 8, 1, norm=True, stride=2)
        self.fc1 = Factors(3, 16)

    def forward(self, h):
        h = self.conv1(h).relu()
        h = (self.conv3(self.conv2(h).relu()) + h).relu()
        h = (self.conv5(self.conv4(h).relu()) + self.shortcut4(h)).relu()
        h = (self.conv7(self.conv6(h).relu()) + self.shortcut6(h)).relu()
        return self.fc1(h.mean((2, 3)))


def shrink(threshold):
    """Soft-thresholding of μ, entry by entry as the proximal operator of the L1 norm is defined."""

    def after(named):
        for name, p in named.items():
            if name.endswith(".mu"):
                x = p.data
                p.data = torch.where(x > threshold, x - threshold, torch.where(x < -threshold, x + threshold, 0 * x))

    return after


def weights_of(vectors, *, epsilon, tau, at_least=1):
    """Row i: the weights of equations (4) and (5) with which client i averages."""
    rows = []
    for i, mine in enumerate(vectors):
        sigma = [1.0 if k == i else 1 - distance.cosine(mine, other) for k, other in enumerate(vectors)]
        best = sorted(range(len(sigma)), key=lambda k: -sigma[k])[:at_least]
        e = [math.exp(epsilon * s) if s >= tau or k in best else 0.0 for k, s in enumerate(sigma)]
        rows.append([one / sum(e) for one in e])
    return rows


def run(job, module, make_optimizer, *, rounds, beta, compared="fc1", head="fc2", epsilon=1.0, tau=0.0, sparsity=5e-4):
    """Models and test accuracies of all clients, and the last round's matrix of weights."""
    start = job.net.init(streams.generator(job.seed, "start"))
    own = [{name: p.clone() for name, p in start.items()} for _ in range(job.clients)]
    for number in range(rounds):
        active = [int(c) for c in trainer.active(job, number)]
        for c in active:
            after = shrink(job.optimizer.lr * sparsity)
            own[c] = plain_loop.trained(job, module(), own[c], c, make_optimizer, "batches", number, 0, after=after)
        trained = [own[c] for c in active]
        matrix = weights_of([m[f"{compared}.v"].flatten().double().numpy() for m in trained], epsilon=epsilon, tau=tau)
        for c, row in zip(active, matrix, strict=True):
            mixed = {name: sum(w * m[name] for w, m in zip(row, trained, strict=True)) for name in start}
            sent = [n for n in start if not n.startswith(f"{head}.") and (beta or n.endswith(".u"))]
            own[c] = own[c] | {name: mixed[name] for name in sent}
    return own, plain_loop.scores(job, module, own), np.array(matrix)
