"""FedAvg rounds of image networks: the stacked engine against a plain per-client torch loop."""

from __future__ import annotations

import pytest
import torch
import trainer
import training_rounds
from torch import nn

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import ComputeConfig

CLIENTS, ACTIVE, SAMPLES, BATCH, LR = 100, 10, 600, 50, 1e-3
OPTIMIZERS = {
    "adam": (optim.adam(LR), lambda p: torch.optim.Adam(p, lr=LR)),
    "sgd": (optim.sgd(LR), lambda p: torch.optim.SGD(p, lr=LR)),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def data():
    return training_rounds.rows(CLIENTS, SAMPLES, (1, 28, 28), 10)


def module():
    """The network as it is usually written (McMahan et al. 2017; PFLlib's FedAvgCNN)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(inplace=True), nn.Linear(512, 10),
    )  # fmt: skip


def make(optimizer, *, threads, algorithm=None):
    job = training_rounds.job(
        algorithm or algorithms.fedavg(), nets.cnn((1, 28, 28), 10), data(), optimizer=OPTIMIZERS[optimizer][0],
        participation=ACTIVE / CLIENTS, local_epochs=1, batch_size=BATCH, compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(optimizer, *, threads):
    return training_rounds.plain(
        module, data(), threads=threads, participation=ACTIVE / CLIENTS, make_optimizer=OPTIMIZERS[optimizer][1],
        epochs=1, batch_size=BATCH,
    )  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def bench_cnn(compare, optimizer, ours, theirs):
    compare(
        f"CNN 28×28, {ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, {optimizer}, {ours} thread(s)",
        make(optimizer, threads=ours), plain(optimizer, threads=theirs), f"plain loop, {theirs} thread(s)",
        rounds=3,
    )  # fmt: skip


@pytest.mark.parametrize(("layer", "kappa"), [("conv2", 0.85), ("fc1", 0.75), ("fc1", 0.85)])
def bench_dynamic_fedfac(compare, layer, kappa):
    fedfac = algorithms.fedfac([layer], kappa=kappa)
    compare(
        f"dynamic FedFac round of the CNN, Λ = {layer}, κ = {kappa}, 1 local epoch, adam, 2 threads",
        make("adam", threads=2, algorithm=fedfac), make("adam", threads=2), "FedAvg round", rounds=5,
    )  # fmt: skip


def many_clients(algorithm):
    """Two rounds and an evaluation of 1,000 clients of a network with 987,210 parameters, a tenth of them active."""
    job = training_rounds.job(
        algorithm, nets.mlp([784, 1000, 200, 10]), training_rounds.rows(1000, 20, (784,), 10), optimizer=optim.adam(LR),
        participation=0.1, local_epochs=1, batch_size=10, compute=ComputeConfig(threads=2),
    )  # fmt: skip
    evaluate(job, trainer.step(job, trainer.step(job, trainer.start(job))))


@pytest.mark.parametrize(
    "algorithm", ["fedavg()", "fedper()", "fedfac(['fc2'], kappa=0.75)", "random_split(['fc1'])", "local()"]
)
def bench_memory_of_a_thousand_clients(compare_memory, algorithm):
    """What is kept of clients that are not active: nothing, a head, a layer, half a layer, everything."""
    compare_memory(
        f"1,000 clients × 987,210 parameters, 100 active, {algorithm}",
        f"from bench_nets import *; many_clients(algorithms.{algorithm})",
    )


def bench_peak_memory(compare_memory):
    rounds = "from bench_nets import *; run = {}('adam', threads=2); run(); run()"
    compare_memory(
        f"FedAvg rounds of the CNN, {CLIENTS} clients", rounds.format("make"),
        plain_loop=rounds.format("plain"), data="from bench_nets import *; data()",
    )  # fmt: skip
