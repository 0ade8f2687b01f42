"""Local training of the LSTM of the Shakespeare study against a loop over torch modules, and FedFac against FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import training_rounds
from torch import nn

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig

CLIENTS, SAMPLES, BATCH, LENGTH, VOCABULARY, HIDDEN, FC = 10, 128, 32, 80, 80, 64, 64
WORKLOAD = f"LSTM, {CLIENTS} clients of {SAMPLES} texts of {LENGTH}, batch {BATCH}, hidden {HIDDEN}"
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def texts():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, VOCABULARY, (CLIENTS * SAMPLES, LENGTH)).astype(np.uint8))
    return Rows(x, torch.from_numpy(rng.integers(0, VOCABULARY, len(x))), np.arange(CLIENTS + 1) * SAMPLES)


def make(*, threads=2, algorithm=None, cell=None):
    net = nets.lstm((LENGTH,), VOCABULARY, vocabulary=VOCABULARY, hidden=HIDDEN, fc=FC, cell=cell)
    job = training_rounds.job(
        algorithm or algorithms.fedavg(), net, texts(), optimizer=optim.adam(1e-3), local_epochs=1, batch_size=BATCH,
        compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, HIDDEN, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FC), nn.Linear(FC, VOCABULARY)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.lstm(self.embedding(x.long()))[0][:, -1])))


def plain(*, threads):
    return training_rounds.plain(
        Module, texts(), threads=threads, make_optimizer=lambda p: torch.optim.Adam(p, lr=1e-3), epochs=1,
        batch_size=BATCH,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def bench_round(compare, threads):
    compare(
        f"FedAvg round on 2 cores, {WORKLOAD}", make(), plain(threads=threads),
        f"plain loop over nn.LSTM, {threads} thread(s)", rounds=7 if threads == 1 else 2,
    )  # fmt: skip


def bench_cells(compare):
    compare(f"fused cell, {WORKLOAD}", make(cell="fused"), make(cell="stacked"), "stacked cell", rounds=5)


def bench_dynamic_fedfac(compare):
    fedfac = make(algorithm=algorithms.fedfac(["lstm2"]))
    compare(f"dynamic FedFac round, {WORKLOAD}", fedfac, make(), "FedAvg round", rounds=15)


def bench_peak_memory(compare_memory):
    rounds = "from bench_text import *; run = {}; run(); run()"
    compare_memory(
        WORKLOAD, rounds.format("make()"), plain_loop=rounds.format("plain(threads=1)"),
        imports="from bench_text import *",
    )  # fmt: skip
