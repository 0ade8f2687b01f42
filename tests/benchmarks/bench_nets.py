"""FedAvg rounds of dense and image networks: the stacked engine against a plain per-client torch loop, and FedFac."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import plain_loop
import pytest
import torch
import training_rounds
from torch import nn

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.job import ComputeConfig

CLIENTS = 100
OPTIMIZERS = {
    "adam": (optim.adam(1e-3), lambda p: torch.optim.Adam(p, lr=1e-3)),
    "sgd": (optim.sgd(0.05), lambda p: torch.optim.SGD(p, lr=0.05)),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def module():
    """The CNN as it is usually written (McMahan et al. 2017; PFLlib's FedAvgCNN)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(inplace=True), nn.Linear(512, 10),
    )  # fmt: skip


class Workload(NamedTuple):
    """A network, the module that is its twin, and the training of a round."""

    net: nets.Net
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    samples: int
    batch_size: int
    epochs: int
    participation: float
    optimizer: str

    def data(self):
        return training_rounds.rows(CLIENTS, self.samples, self.shape, self.classes)


def mlp(sizes, samples, batch_size):
    return Workload(
        nets.mlp(sizes), partial(plain_loop.module, sizes), (sizes[0],), max(2, sizes[-1]), samples, batch_size, 5, 1.0,
        "sgd",
    )  # fmt: skip


CNN = Workload(nets.cnn((1, 28, 28), 10), module, (1, 28, 28), 10, 600, 50, 1, 0.1, "adam")
WORKLOADS = {
    "MLP 100-200-1, 100 samples, batch 10": mlp([100, 200, 1], 100, 10),
    "MLP 784-200-10, 600 samples, batch 50": mlp([784, 200, 10], 600, 50),
    "CNN 28×28, 10 of 100 clients, 600 samples, batch 50, adam": CNN,
    "CNN 28×28, 10 of 100 clients, 600 samples, batch 50, sgd": CNN._replace(optimizer="sgd"),
}
SMALL = next(iter(WORKLOADS.values()))


def make(work, *, threads, algorithm=None):
    job = training_rounds.job(
        algorithm or algorithms.fedavg(), work.net, work.data(), optimizer=OPTIMIZERS[work.optimizer][0],
        participation=work.participation, local_epochs=work.epochs, batch_size=work.batch_size,
        compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(work, *, threads):
    return training_rounds.plain(
        work.module, work.data(), threads=threads, participation=work.participation,
        make_optimizer=OPTIMIZERS[work.optimizer][1], epochs=work.epochs, batch_size=work.batch_size,
    )  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("name", WORKLOADS)
def bench_round(compare, name, ours, theirs):
    work = WORKLOADS[name]
    stacked, loop = make(work, threads=ours), plain(work, threads=theirs)
    compare(f"FedAvg round, {name}, {ours} thread(s)", stacked, loop, f"plain loop, {theirs} thread(s)", rounds=3)


@pytest.mark.parametrize(
    ("work", "layer", "kappa"),
    [(SMALL, "fc1", 0.85), (CNN, "conv2", 0.85), (CNN, "fc1", 0.75), (CNN, "fc1", 0.85)],
    ids=["mlp", "conv2", "fc1, 0.75", "fc1"],
)
def bench_dynamic_fedfac(compare, work, layer, kappa):
    fedfac = make(work, threads=2, algorithm=algorithms.fedfac([layer], kappa=kappa))
    name = (
        f"dynamic FedFac round, {work.shape} inputs, Λ = {layer}, κ = {kappa}, {work.epochs} local epoch(s), 2 threads"
    )
    compare(name, fedfac, make(work, threads=2), "FedAvg round", rounds=15 if work is SMALL else 5)


@pytest.mark.parametrize("work", ["SMALL", "CNN"])
def bench_peak_memory(compare_memory, work):
    rounds = "from bench_nets import *; run = {}({}, threads=2); run(); run()"
    compare_memory(
        f"FedAvg rounds of {work}, {CLIENTS} clients", rounds.format("make", work),
        plain_loop=rounds.format("plain", work), data=f"from bench_nets import *; {work}.data()",
    )  # fmt: skip
