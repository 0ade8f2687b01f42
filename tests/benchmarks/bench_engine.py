"""One round of the stacked engine against a plain per-client torch loop, and dynamic FedFac against FedAvg."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import training_rounds
from training_rounds import peak_memory

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig, Job

WORKLOADS = {
    "MLP 100-200-1, 100 samples, batch 10": ([100, 200, 1], 100, 10, 0.05),
    "MLP 784-200-10, 600 samples, batch 50": ([784, 200, 10], 600, 50, 0.05),
}
CLIENTS, EPOCHS = 100, 5
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def make(sizes, samples, batch_size, lr, *, threads, algorithm=None):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(CLIENTS * samples, sizes[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, max(2, sizes[-1]), CLIENTS * samples))
    rows = Rows(x, y, np.arange(CLIENTS + 1) * samples)
    job = Job(
        rows, rows, nets.mlp(sizes), algorithm or algorithms.fedavg(), losses.for_outputs(sizes[-1]),
        optimizer=optim.sgd(lr),
        local_epochs=EPOCHS, batch_size=batch_size, compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(sizes, samples, batch_size, lr, *, threads):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(CLIENTS, samples, sizes[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, max(2, sizes[-1]), (CLIENTS, samples)))
    models = [plain_loop.module(sizes) for _ in range(CLIENTS)]

    return training_rounds.plain(
        models, x, y, threads=threads, rng=rng, make_optimizer=lambda p: torch.optim.SGD(p, lr=lr), epochs=EPOCHS,
        batch_size=batch_size,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("workload", WORKLOADS)
def bench_round(compare, workload, threads):
    size = WORKLOADS[workload]
    compare(
        f"FedAvg round, {workload}, {threads} thread(s)",
        make(*size, threads=threads), plain(*size, threads=threads), f"plain loop, {threads} thread(s)",
        rounds=5 if size[0][0] == 100 else 3,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def bench_dynamic_fedfac(compare, threads):
    size = WORKLOADS["MLP 100-200-1, 100 samples, batch 10"]
    fedfac = make(*size, threads=threads, algorithm=algorithms.fedfac(["fc1"]))
    fedavg = make(*size, threads=threads)
    compare(f"dynamic FedFac round, {threads} thread(s)", fedfac, fedavg, "FedAvg round", rounds=15)


def bench_peak_memory(benchmark, capsys):
    """Peak memory of a process that does FedAvg rounds, beside one that only imports the package."""
    code = (
        "from bench_engine import *; "
        "run = make(*WORKLOADS['MLP 100-200-1, 100 samples, batch 10'], threads=2); run(); run()"
    )
    empty, full = peak_memory("import fedstat.fl"), benchmark.pedantic(peak_memory, (code,), rounds=1)
    with capsys.disabled():
        print(f"\npeak memory of FedAvg rounds: {full:.0f} MB, of which {empty:.0f} MB for importing torch and fedstat")
