"""One epoch of 100 client MLPs 784-200-10 as the motivating study trains them, against a plain per-client loop."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import trainer

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import ComputeConfig, Job

SIZES, CLIENTS, SAMPLES, BATCH, LR = [784, 200, 10], 100, 600, 16, 1e-3


@pytest.fixture
def rows():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.uniform(size=(CLIENTS * SAMPLES, SIZES[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, SIZES[-1], CLIENTS * SAMPLES))
    return Rows(x, y, np.arange(CLIENTS + 1) * SAMPLES)


@pytest.mark.parametrize("threads", [1, 2])
def bench_client_mlps(compare, rows, threads):
    job = Job(
        rows, rows, nets.mlp(SIZES), algorithms.local(), losses.cross_entropy,
        optimizer=optim.adam(LR),
        local_epochs=1, batch_size=BATCH, compute=ComputeConfig(threads=2),
    )  # fmt: skip
    start = trainer.start(job)

    def plain():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for c in range(CLIENTS):
            mine = slice(c * SAMPLES, (c + 1) * SAMPLES)
            plain_loop.train_client(
                plain_loop.module(SIZES), rows.x[mine], rows.y[mine], lambda p: torch.optim.Adam(p, lr=LR),
                epochs=1, batch_size=BATCH, rng=np.random.default_rng(c),
            )  # fmt: skip
        torch.set_num_threads(before)

    compare(
        "100 MLPs 784-200-10, batch 16, one epoch, stacked, 2 threads",
        lambda: trainer.step(job, start), plain, f"plain loop, {threads} thread(s)", rounds=3,
    )  # fmt: skip
