"""Local training of the LSTM of the Shakespeare study against a loop over torch modules, and FedFac against FedAvg."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import plain_loop
import pytest
import torch
from threadpoolctl import threadpool_limits
from torch import nn

from fedstat.fl import algorithms, engine, losses, nets, optim
from fedstat.fl.batches import Rows

CLIENTS, SAMPLES, BATCH, LENGTH, VOCABULARY, HIDDEN, FC = 10, 128, 32, 80, 80, 64, 64
WORKLOAD = f"LSTM, {CLIENTS} clients of {SAMPLES} texts of {LENGTH}, batch {BATCH}, hidden {HIDDEN}"


def texts():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, VOCABULARY, (CLIENTS * SAMPLES, LENGTH)).astype(np.uint8))
    return x, torch.from_numpy(rng.integers(0, VOCABULARY, CLIENTS * SAMPLES))


def make(*, threads=2, algorithm=None, cell=None):
    rows = Rows(*texts(), np.arange(CLIENTS + 1) * SAMPLES)
    net = nets.lstm((LENGTH,), VOCABULARY, vocabulary=VOCABULARY, hidden=HIDDEN, fc=FC, cell=cell)
    job = engine.Job(
        rows, rows, net, algorithm or algorithms.fedavg(), losses.cross_entropy, optim.adam(1e-3),
        local_epochs=1, batch_size=BATCH, threads=threads,
    )  # fmt: skip
    state = engine.start(job)

    def one_round():
        nonlocal state
        state = engine.step(job, state)

    return one_round


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, HIDDEN, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(HIDDEN, FC), nn.Linear(FC, VOCABULARY)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(self.lstm(self.embedding(x.long()))[0][:, -1])))


def plain(*, threads):
    x, y = (part.view(CLIENTS, SAMPLES, *part.shape[1:]) for part in texts())
    rng, models = np.random.default_rng(0), [Module() for _ in range(CLIENTS)]

    def one_round():
        torch.set_num_threads(threads)
        for c, net in enumerate(models):
            plain_loop.train_client(
                net, x[c], y[c], lambda p: torch.optim.Adam(p, lr=1e-3), epochs=1, batch_size=BATCH, rng=rng
            )
        mean = {
            name: torch.stack([net.state_dict()[name] for net in models]).mean(0) for name in models[0].state_dict()
        }
        for net in models:
            net.load_state_dict(mean)
        torch.set_num_threads(1)

    return one_round


@pytest.fixture(autouse=True)
def one_thread_an_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1, user_api="blas"):
        yield
    torch.set_num_threads(before)


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


def bench_peak_memory(benchmark, capsys):
    """Peak memory of a process that does rounds, ours or the loop's, beside one that only imports the package."""
    base = "import sys; sys.path[:0] = ['tests', 'tests/benchmarks']; from bench_text import *; "
    # Not getrusage: its maximum starts from that of the process that forked this one.
    show = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 1024)"

    def peak(source):
        done = subprocess.run([sys.executable, "-c", base + source + show], capture_output=True, text=True, check=True)
        return float(done.stdout)

    full = benchmark.pedantic(lambda: peak("run = make(); run(); run(); "), rounds=1)
    loop, empty = peak("run = plain(threads=1); run(); run(); "), peak("")
    with capsys.disabled():
        print(f"\npeak memory: {full:.0f} MB, plain loop {loop:.0f} MB, of which {empty:.0f} MB for the imports")
