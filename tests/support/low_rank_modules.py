"""Modules whose weights are σ + τ, written as the paper has it: τ = BA as an (I·K) × (O·K) matrix, reshaped."""

from __future__ import annotations

import math

import torch
from torch import nn

RANKS = {"rank_linear": 0.3, "rank_conv": 0.6}


def is_personal(name):
    return name.endswith((".left", ".right"))


class LowRank(nn.Module):
    """A dense layer or convolution of weight σ + τ, with A = leftᵀ and B = rightᵀ."""

    def __init__(self, *shape, share, stride=1, padding=0, norm=False):
        super().__init__()
        outputs, inputs, *kernel = shape
        k = kernel[0] if kernel else 1
        rank = max(1, math.floor(share * min(inputs, outputs))) * k
        self.weight = nn.Parameter(torch.zeros(shape))
        self.left = nn.Parameter(torch.zeros(outputs, *kernel[1:], rank))
        self.right = nn.Parameter(torch.zeros(rank, inputs * k))
        self.options = (stride, padding)
        if norm:
            self.scale, self.shift = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))
        else:
            self.bias = nn.Parameter(torch.zeros(outputs))

    def composed(self):
        outputs, inputs, *kernel = self.weight.shape
        b, a = self.right.T, self.left.flatten(0, -2).T
        tau = b @ a
        if kernel:
            k = kernel[0]
            return self.weight + tau.reshape(inputs, k, outputs, k).permute(2, 0, 1, 3)
        return self.weight + tau.T

    def forward(self, x):
        weight = self.composed()
        bias = getattr(self, "bias", None)
        if weight.ndim == 2:
            return nn.functional.linear(x, weight, bias)
        h = nn.functional.conv2d(x, weight, bias, *self.options)
        return h if bias is not None else nn.functional.group_norm(h, math.gcd(len(weight), 8), self.scale, self.shift)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = LowRank(10, 6, share=0.3), LowRank(3, 10, share=0.3)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class Cnn(nn.Module):
    """The CNN of McMahan et al. for images of 28×28 and ten classes, of a number of channels."""

    def __init__(self, channels=(3, 6), hidden=51, features=96, share=(0.3, 0.6), outputs=3):
        super().__init__()
        dense, conv = share
        self.conv1 = LowRank(channels[0], 1, 5, 5, share=conv)
        self.conv2 = LowRank(channels[1], channels[0], 5, 5, share=conv)
        self.fc1, self.fc2 = LowRank(hidden, features, share=dense), LowRank(outputs, hidden, share=dense)

    def forward(self, h):
        for conv in (self.conv1, self.conv2):
            h = nn.functional.max_pool2d(conv(h), 2).relu()
        return self.fc2(self.fc1(h.flatten(1)).relu())


class ResNet8(nn.Module):
    """ResNet-8 with 4, 8 and 16 channels and group normalisation."""

    def __init__(self):
        super().__init__()
        sizes = {1: (4, 1, 1), 2: (4, 4, 1), 3: (4, 4, 1), 4: (8, 4, 2), 5: (8, 8, 1), 6: (16, 8, 2), 7: (16, 16, 1)}
        for i, (to, of, stride) in sizes.items():
            self.add_module(f"conv{i}", LowRank(to, of, 3, 3, share=0.6, stride=stride, padding=1, norm=True))
        for i in (4, 6):
            to, of, _ = sizes[i]
            self.add_module(f"shortcut{i}", LowRank(to, of, 1, 1, share=0.6, stride=2, norm=True))
        self.fc1 = LowRank(3, 16, share=0.3)

    def forward(self, x):
        parts = dict(self.named_children())
        h = parts["conv1"](x).relu()
        for i in (2, 4, 6):
            past = parts[f"shortcut{i}"](h) if f"shortcut{i}" in parts else h
            h = (parts[f"conv{i + 1}"](parts[f"conv{i}"](h).relu()) + past).relu()
        return self.fc1(h.mean((2, 3)))
