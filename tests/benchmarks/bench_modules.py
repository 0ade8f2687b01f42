"""FedAvg rounds of users' modules against a plain loop over them, and against the package's own networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import training_rounds
from torch import nn

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig

CLIENTS, SAMPLES, BATCH, CLASSES, VOCABULARY = 20, 80, 10, 10, 40
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


class Encoder(nn.Module):
    """Two encoder layers on tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, 32), nn.Parameter(torch.randn(16, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), enable_nested_tensor=False)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(self.embedding(x) + self.position).mean(1))


class Vision(nn.Module):
    """A vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.cls_token = nn.Conv2d(1, 64, 4, 4), nn.Parameter(torch.zeros(1, 1, 64))
        self.pos_embed = nn.Parameter(torch.randn(1, 50, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, CLASSES)

    def forward(self, x):
        h = self.patches(x).flatten(2).mT
        return self.head(self.encoder(torch.cat([self.cls_token.expand(len(h), -1, -1), h], 1) + self.pos_embed)[:, 0])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, CLASSES),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, CLASSES))


class Recurrent(nn.Module):
    """A bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(64, CLASSES)
        self.lstm = nn.LSTM(8, 32, 2, batch_first=True, bidirectional=True, dropout=0.2)

    def forward(self, x):
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


class Workload(NamedTuple):
    """A module, the shape of a sample, and the package's network of equal layers, if there is one."""

    module: Callable[[], nn.Module]
    shape: tuple[int, ...]
    net: Callable[[], nets.Net] | None = None

    def data(self):
        if len(self.shape) == 1 and self.module is not mlp:
            rng = np.random.default_rng(0)
            x = torch.from_numpy(rng.integers(0, VOCABULARY, (CLIENTS * SAMPLES, *self.shape)))
            y = torch.from_numpy(rng.integers(0, CLASSES, len(x)))
            return Rows(x, y, np.arange(CLIENTS + 1) * SAMPLES)
        return training_rounds.rows(CLIENTS, SAMPLES, self.shape, CLASSES)


IMAGE, TEXT = (1, 28, 28), (16,)
WORKLOADS = {
    "encoder": Workload(
        Encoder, TEXT, lambda: nets.transformer(TEXT, CLASSES, vocabulary=VOCABULARY, padding=None)
    ),
    "encoder with dropout": Workload(lambda: Encoder(0.1), TEXT),
    "vision transformer with dropout": Workload(Vision, IMAGE),
    "lenet": Workload(lenet, IMAGE, lambda: nets.lenet(IMAGE, CLASSES)),
    "mlp": Workload(mlp, (100,), lambda: nets.mlp([100, 200, CLASSES])),
    "bidirectional LSTM with dropout": Workload(Recurrent, TEXT),
}  # fmt: skip


def make(work, *, threads, net=None):
    data = work.data()
    job = training_rounds.job(
        algorithms.fedavg(), net or nets.from_module(work.module(), data.x[0]), data, optimizer=optim.sgd(0.05),
        local_epochs=1, batch_size=BATCH, compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(work):
    return training_rounds.plain(
        work.module, work.data(), make_optimizer=lambda p: torch.optim.SGD(p, lr=0.05), epochs=1,
        batch_size=BATCH,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WORKLOADS)
def bench_round(compare, name, threads):
    work = WORKLOADS[name]
    compare(
        f"FedAvg round of a user's {name}, {CLIENTS} clients, {threads} thread(s)", make(work, threads=threads),
        plain(work), "plain loop, 1 thread", rounds=5,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, work in WORKLOADS.items() if work.net])
def bench_own_networks(compare, name):
    work = WORKLOADS[name]
    compare(
        f"FedAvg round of a user's {name}, {CLIENTS} clients, 1 thread", make(work, threads=1),
        make(work, threads=1, net=work.net()), "the package's network", rounds=5,
    )  # fmt: skip
