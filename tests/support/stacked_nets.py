"""Inputs, gradients and a user's module for tests of client-stacked networks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CLIENTS, SAMPLES = 3, 4


def images(channels, size=28, samples=SAMPLES):
    return torch.from_numpy(np.random.default_rng(7).normal(size=(CLIENTS, samples, channels, size, size)))


def gradients(net, params, out, weight=1.0):
    trained = [name for name in net.shapes if name not in net.buffers]
    return dict(
        zip(trained, torch.autograd.grad((out.sin() * weight).sum(), [params[n] for n in trained]), strict=True)
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(4)  # registered before what it normalises
        self.conv = nn.Conv2d(3, 4, 3, 2, 1, bias=False)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 5)

    def forward(self, x):
        h = self.bn(self.conv(x)).relu()
        return self.head(self.pool(self.body(h) + h).flatten(1))


class Convolutions(TorchDispatchMode):
    """Record the kernel (row, column), the stride and the padding of every convolution that torch computes."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.seen.append((tuple(args[1].shape[2:]), max(args[3]), max(args[4])))
        return function(*args, **kwargs or {})
