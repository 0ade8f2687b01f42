"""Pools of trained clients, from which simulations draw: MLPs 196-32-32-10 on MNIST at 14 x 14 pixels."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch

from fedstat import data
from fedstat._utils.streams import generator

CLIENTS, SAMPLES, BATCH, RATE, ADAM_RATE = 400, 60, 10, 0.1, 0.001
REPLICATED, REPLICATES = 200, 12
WIDTHS = (196, 32, 32, 10)
STEPS = (1, 6, 60)
Kind = Literal[
    "iid", "one class", "two classes", "five classes", "Dirichlet .1", "random labels", "own starts", "two starts",
    "two domains", "four domains", "ten domains", "five classes, ten domains", "two rotations", "four rotations",
]  # fmt: skip
CLASSES = {"one class": 1, "two classes": 2, "five classes": 5, "five classes, ten domains": 5}
Optimizer = Literal["SGD", "Adam"]
STARTS = {"own starts": CLIENTS, "two starts": 2}
DOMAINS = 10
SHIFTS = {
    "two domains": (0, 5), "four domains": (0, 3, 5, 8),
    **dict.fromkeys(("ten domains", "five classes, ten domains"), tuple(range(DOMAINS))),
}  # fmt: skip
"""Numbers that groups of clients add to their labels, modulo 10."""
TURNS = {"two rotations": 2, "four rotations": 4}
"""Numbers of groups of clients, each of which turns its images by another 90 degrees."""


class Pool(NamedTuple):
    """Weights of a layer of all clients after some steps of training.

    Attributes
    ----------
    weights : array (client, unit, weight)
    initial : array (client, unit, weight)
        Parameters before training, which clients of one start have in common.
    start : int array (client,)
        Number of the client's start.
    group : int array (client,)
        Number of the client's start, set of labels or rotation; 0 if all clients have these in common.
    """

    weights: np.ndarray
    initial: np.ndarray
    start: np.ndarray
    group: np.ndarray


def pool(kind: Kind, steps: int, layer: int, optimizer: Optimizer = "SGD") -> Pool:
    """Train a pool, or return one that this process has trained.

    Parameters
    ----------
    kind : str
        Classes or labels of the clients' samples, or starts of clients with samples of all classes.
    steps : int
        One of ``STEPS``.
    layer : int
        1 to 3.
    optimizer : {"SGD", "Adam"}
        Clients have the same samples, batches and starts under both.
    """
    start = np.arange(CLIENTS) * STARTS.get(kind, 1) // CLIENTS
    params, initial = _trained(kind, optimizer, replicated=False)
    group = start if kind in STARTS else np.arange(CLIENTS) % _n_groups(kind)
    return Pool(params[steps][layer - 1][..., :-1], initial[layer - 1][start, :, :-1], start, group)


def _n_groups(kind: Kind) -> int:
    """Number of groups of clients with data of their own kind, which alternate."""
    return TURNS.get(kind, len(SHIFTS.get(kind, (0,))))


def replicates(kind: Kind, steps: int, layer: int) -> np.ndarray:
    """Changes (client, replicate, unit, weight) of clients, each trained on several samples of its own."""
    params, initial = _trained(kind, "SGD", replicated=True)
    w = (params[steps][layer - 1] - initial[layer - 1])[..., :-1]
    return w.reshape(REPLICATED, REPLICATES, *w.shape[1:])


@cache
def accuracies(kind: Kind, steps: int) -> np.ndarray:
    """Accuracy (client,) of each network of a pool on 1,000 images of all classes."""
    x, y = (torch.as_tensor(a[-1000:]) for a in mnist())
    params, _ = _trained(kind, "SGD", replicated=False)
    outputs = _outputs([torch.as_tensor(w) for w in params[steps]], x.expand(CLIENTS, -1, -1))
    return (outputs.argmax(dim=2) == y).double().mean(dim=1).numpy()


@cache
def _trained(
    kind: Kind, optimizer: Optimizer, *, replicated: bool
) -> tuple[dict[int, list[np.ndarray]], list[np.ndarray]]:
    """Parameters by steps and layer, initial ones by layer; the same on every machine but for rounding.

    The last column of a layer is its bias.
    """
    rng = generator(0, "pool of replicates" if replicated else "pool", kind)
    n, n_replicates = (REPLICATED * REPLICATES, REPLICATES) if replicated else (CLIENTS, 1)
    n_starts = 1 if replicated else STARTS.get(kind, 1)
    x, y = (torch.as_tensor(a) for a in _samples(kind, n, n_replicates, rng))
    bounds = [n**-0.5 for n in WIDTHS[:-1]]
    shapes = [(b, a + 1) for a, b in pairwise(WIDTHS)]
    drawn = [rng.uniform(-b, b, (n_starts, *shape)) for b, shape in zip(bounds, shapes, strict=True)]
    initial = [one.astype(np.float32) for one in drawn]
    params = [torch.tensor(one[np.arange(n) * n_starts // n], requires_grad=True) for one in initial]
    order = torch.as_tensor(np.stack([_batches(x.shape[1], rng) for _ in range(n)]))
    adam = torch.optim.Adam(params, ADAM_RATE)
    found: dict[int, list[np.ndarray]] = {}
    for step in range(max(STEPS)):
        here = order[:, step * BATCH : (step + 1) * BATCH]
        outputs = _outputs(params, torch.gather(x, 1, here[..., None].expand(-1, -1, x.shape[2])))
        labels = torch.gather(y, 1, here)
        loss = torch.nn.functional.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(dim=1).sum()
        for w, gradient in zip(params, torch.autograd.grad(loss, params), strict=True):
            if optimizer == "Adam":
                w.grad = gradient
            else:
                w.data -= RATE * gradient
        if optimizer == "Adam":
            adam.step()
        if step + 1 in STEPS:
            found[step + 1] = [w.detach().numpy().copy() for w in params]
    return found, initial


def _outputs(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Outputs (network, sample, class) of all networks."""
    for number, w in enumerate(params, 1):
        x = torch.baddbmm(w[:, None, :, -1], x, w[:, :, :-1].transpose(1, 2))
        x = torch.relu(x) if number < len(params) else x
    return x


def _samples(kind: Kind, n: int, n_replicates: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Images (network, sample, pixel) and labels (network, sample); replicates of a client follow each other."""
    images, labels = mnist()
    size = SAMPLES if n_replicates == 1 else SAMPLES // 2
    if kind in CLASSES:
        own = np.stack([rng.permutation(10)[: CLASSES[kind]] for _ in range(n // n_replicates)])
        of = np.repeat(own, n_replicates, axis=0)[:, np.arange(size) % CLASSES[kind]]
        by_class = [np.flatnonzero(labels == c) for c in range(10)]
        chosen = np.array([[rng.choice(by_class[c]) for c in row] for row in of])
    elif kind == "Dirichlet .1":  # clients of unequal size: few samples are repeated
        n_clients = n // n_replicates
        proportions, sizes = rng.dirichlet(np.full(10, 0.1), n_clients), rng.integers(3, size + 1, n_clients)
        by_class = [np.flatnonzero(labels == c) for c in range(10)]
        of = [rng.choice(10, size, p=p) for p in np.repeat(proportions, n_replicates, axis=0)]
        chosen = np.array([[rng.choice(by_class[c]) for c in row] for row in of])
        repeated = np.arange(size) % np.repeat(sizes, n_replicates)[:, None]
        chosen = np.take_along_axis(chosen, repeated, axis=1)
    elif n * size <= len(labels):
        chosen = rng.permutation(len(labels))[: n * size].reshape(n, size)
    else:
        chosen = rng.integers(len(labels), size=(n, size))
    y = rng.integers(10, size=chosen.shape) if kind == "random labels" else labels[chosen]
    x, group = images[chosen], np.arange(n) // n_replicates % _n_groups(kind)
    if kind in TURNS:
        side = WIDTHS[0] ** 0.5
        x = np.stack([np.rot90(one.reshape(size, round(side), -1), g, (1, 2)) for one, g in zip(x, group, strict=True)])
        x = x.reshape(*chosen.shape, -1)
    shifts = np.array(SHIFTS.get(kind, (0,)))
    return x, (y + shifts[group % len(shifts), None]) % 10


def _batches(size: int, rng: np.random.Generator) -> np.ndarray:
    """Samples of one network in the order of training, epoch by epoch."""
    epochs = -(-max(STEPS) * BATCH // size)
    return np.concatenate([rng.permutation(size) for _ in range(epochs)])


@cache
def mnist() -> tuple[np.ndarray, np.ndarray]:
    """Images (sample, pixel) in [0, 1], means of 2 x 2 pixels, and labels; from the folder FEDSTAT_DATA."""
    found = data.load("mnist", split="train")
    x = found["x"].to_numpy().reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4), dtype=np.float32) / 255
    return x.reshape(len(x), -1), found["y"].to_numpy().astype(np.int64)
