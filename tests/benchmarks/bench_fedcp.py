"""FedCP rounds of the CNN and of an MLP against FedAvg's and against FedCP in a plain per-client torch loop."""

from __future__ import annotations

import numpy as np
import plain_fedcp
import pytest
import torch
import training_rounds
from torch import nn
from training_rounds import peak_memory

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, ACTIVE, SAMPLES, BATCH, EPOCHS, LR = 100, 10, 200, 32, 5, 1e-3
SIZES = [784, 200, 10]
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


class Extractor(nn.Module):
    """The 4-layer CNN without its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc1 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        h = nn.functional.max_pool2d(self.conv2(h).relu(), 2)
        return self.fc1(h.flatten(1)).relu()


def made(kind, algorithm, clients=CLIENTS):
    rng = np.random.default_rng(0)
    shape, net = ((1, 28, 28), nets.cnn((1, 28, 28), 10)) if kind == "cnn" else ((784,), nets.mlp(SIZES))
    x = torch.from_numpy(rng.standard_normal((clients * SAMPLES, *shape), dtype=np.float32))
    rows = Rows(x, torch.from_numpy(rng.integers(0, 10, len(x))), np.arange(clients + 1) * SAMPLES)
    net = algorithm.wrap(net) if algorithm.wrap else net
    loss = algorithm.loss(losses.cross_entropy, net) if algorithm.loss else losses.cross_entropy
    return Job(
        rows, rows, net, algorithm, loss,
        optimizer=optim.adam(LR), participation=ACTIVE / clients, batch_size=BATCH, local_epochs=EPOCHS,
    )  # fmt: skip


def stacked(kind, algorithm):
    return training_rounds.stacked(made(kind, algorithm))


@pytest.mark.parametrize("kind", ["cnn", "mlp"])
@pytest.mark.parametrize("settings", [{}, {"align": False}, {"policy": False}], ids=str)
def bench_against_fedavg(compare, kind, settings):
    compare(
        f"FedCP{settings or ''}, {kind}, {ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, adam",
        stacked(kind, algorithms.fedcp(**settings)), stacked(kind, algorithms.fedavg()), "FedAvg", rounds=3,
    )  # fmt: skip


def bench_against_a_plain_loop(compare):
    job = made("cnn", algorithms.fedcp(), clients=ACTIVE)  # so that the loop makes no more models than it trains

    def plain():
        plain_fedcp.run(job, Extractor, lambda p: torch.optim.Adam(p, lr=LR), rounds=1, score=False)

    compare("FedCP, CNN, 1 thread", training_rounds.stacked(job), plain, "plain loop", rounds=3)


def bench_peak_memory(benchmark, capsys):
    def peak(algorithm):
        return peak_memory(f"from bench_fedcp import *; run = stacked('cnn', algorithms.{algorithm}); run(); run()")

    full, less = benchmark.pedantic(peak, ("fedcp()",), rounds=1), peak("fedavg()")
    with capsys.disabled():
        print(
            f"\npeak memory of FedCP rounds of the CNN: {full:.0f} MB; FedAvg: {less:.0f} MB; ratio {full / less:.3g}"
        )
