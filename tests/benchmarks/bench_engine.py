"""One round of the stacked engine against a plain per-client torch loop, and dynamic FedFac against FedAvg."""

from __future__ import annotations

from functools import partial

import plain_loop
import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.job import ComputeConfig

SMALL = ([100, 200, 1], 100, 10)
WORKLOADS = {
    "MLP 100-200-1, 100 samples, batch 10": SMALL,
    "MLP 784-200-10, 600 samples, batch 50": ([784, 200, 10], 600, 50),
}
CLIENTS, EPOCHS, LR = 100, 5, 0.05
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def data(sizes, samples):
    return training_rounds.rows(CLIENTS, samples, sizes[:1], max(2, sizes[-1]))


def make(sizes, samples, batch_size, *, threads, algorithm=None):
    job = training_rounds.job(
        algorithm or algorithms.fedavg(), nets.mlp(sizes), data(sizes, samples), optimizer=optim.sgd(LR),
        local_epochs=EPOCHS, batch_size=batch_size, compute=ComputeConfig(threads=threads),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(sizes, samples, batch_size, *, threads):
    return training_rounds.plain(
        partial(plain_loop.module, sizes), data(sizes, samples), threads=threads,
        make_optimizer=lambda p: torch.optim.SGD(p, lr=LR), epochs=EPOCHS, batch_size=batch_size,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("workload", WORKLOADS)
def bench_round(compare, workload, threads):
    size = WORKLOADS[workload]
    compare(
        f"FedAvg round, {workload}, {threads} thread(s)",
        make(*size, threads=threads), plain(*size, threads=threads), f"plain loop, {threads} thread(s)",
        rounds=5 if size is SMALL else 3,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def bench_dynamic_fedfac(compare, threads):
    fedfac = make(*SMALL, threads=threads, algorithm=algorithms.fedfac(["fc1"]))
    compare(
        f"dynamic FedFac round, {threads} thread(s)", fedfac, make(*SMALL, threads=threads), "FedAvg round", rounds=15
    )


def bench_peak_memory(compare_memory):
    rounds = "from bench_engine import *; run = make(*SMALL, threads=2); run(); run()"
    compare_memory("FedAvg rounds of the small MLP", rounds, imports="import fedstat.fl")
