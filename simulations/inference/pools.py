"""Pools of trained clients, from which simulations draw: MLPs 196-32-32-10 on MNIST at 14 x 14 pixels."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedstat import data
from fedstat._random import generator

CLIENTS, SAMPLES, BATCH, RATE = 400, 60, 10, 0.1
WIDTHS = (196, 32, 32, 10)
STEPS = (1, 6, 60)
Kind = Literal["iid", "two classes", "five classes", "random labels", "own starts", "two starts"]
CLASSES = {"two classes": 2, "five classes": 5}
STARTS = {"own starts": CLIENTS, "two starts": 2}


class Pool(NamedTuple):
    """Weights of a layer of all clients after some steps of SGD.

    Attributes
    ----------
    weights : array (client, unit, weight)
    initial : array (client, unit, weight)
        Parameters before training, which clients of one start have in common.
    start : int array (client,)
        Number of the client's start.
    """

    weights: np.ndarray
    initial: np.ndarray
    start: np.ndarray


def pool(kind: Kind, steps: int, layer: int) -> Pool:
    """Train a pool, or return one that this process has trained.

    Parameters
    ----------
    kind : str
        Classes or labels of the clients' samples, or starts of clients with samples of all classes.
    steps : int
        One of ``STEPS``.
    layer : int
        1 to 3.
    """
    weights, initial, start = _trained(kind)
    return Pool(weights[steps][layer - 1], initial[layer - 1], start)


@cache
def _trained(kind: Kind) -> tuple[dict[int, list[np.ndarray]], list[np.ndarray], np.ndarray]:
    """Weights by steps and layer, initial parameters by layer, starts; the same on every machine but for rounding."""
    rng = generator(0, "pool", kind)
    x, y = (torch.as_tensor(a) for a in _samples(kind, rng))
    start = np.arange(CLIENTS) * STARTS.get(kind, 1) // CLIENTS
    bounds = [n**-0.5 for n in WIDTHS[:-1]]
    shapes = [(b, a + 1) for a, b in pairwise(WIDTHS)]  # the last column is the bias
    drawn = [rng.uniform(-b, b, (start.max() + 1, *shape)) for b, shape in zip(bounds, shapes, strict=True)]
    initial = [one[start].astype(np.float32) for one in drawn]
    params = [torch.tensor(one, requires_grad=True) for one in initial]
    order = torch.as_tensor(np.stack([_batches(rng) for _ in range(CLIENTS)]))
    found: dict[int, list[np.ndarray]] = {}
    for step in range(max(STEPS)):
        here = order[:, step * BATCH : (step + 1) * BATCH]
        h = torch.gather(x, 1, here[..., None].expand(-1, -1, x.shape[2]))
        for n, w in enumerate(params, 1):
            h = torch.baddbmm(w[:, None, :, -1], h, w[:, :, :-1].transpose(1, 2))
            h = torch.relu(h) if n < len(params) else h
        labels = torch.gather(y, 1, here)
        loss = torch.nn.functional.cross_entropy(h.transpose(1, 2), labels, reduction="none").mean(dim=1).sum()
        for w, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            w.data -= RATE * gradient
        if step + 1 in STEPS:
            found[step + 1] = [w.detach().numpy()[:, :, :-1].copy() for w in params]
    return found, [one[:, :, :-1] for one in initial], start


def _samples(kind: Kind, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images (client, sample, pixel) and labels (client, sample)."""
    images, labels = _mnist()
    if kind in CLASSES:
        own = np.stack([rng.permutation(10)[: CLASSES[kind]] for _ in range(CLIENTS)])
        of = own[:, np.arange(SAMPLES) % CLASSES[kind]]
        by_class = [np.flatnonzero(labels == c) for c in range(10)]
        chosen = np.array([[rng.choice(by_class[c]) for c in row] for row in of])
    else:
        chosen = rng.permutation(len(labels))[: CLIENTS * SAMPLES].reshape(CLIENTS, SAMPLES)
    y = rng.integers(10, size=chosen.shape) if kind == "random labels" else labels[chosen]
    return images[chosen], y


def _batches(rng: np.random.Generator) -> np.ndarray:
    """Samples of one client in the order of training, epoch by epoch."""
    epochs = -(-max(STEPS) * BATCH // SAMPLES)
    return np.concatenate([rng.permutation(SAMPLES) for _ in range(epochs)])


@cache
def _mnist() -> tuple[np.ndarray, np.ndarray]:
    """Images (sample, pixel) in [0, 1], means of 2 x 2 pixels, and labels; from the folder FEDSTAT_DATA."""
    found = data.load("mnist", split="train")
    x = found["x"].to_numpy().reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32) / 255
    return x.reshape(len(x), -1), found["y"].to_numpy().astype(np.int64)
