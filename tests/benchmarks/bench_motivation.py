"""One epoch of 100 client MLPs 784-200-10 as the motivating study trains them, against a plain per-client loop."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import trainer
import training_rounds

from fedstat.fl import algorithms, nets, optim
from fedstat.fl.job import ComputeConfig

SIZES, CLIENTS, SAMPLES, BATCH, LR = [784, 200, 10], 100, 600, 16, 1e-3


@pytest.mark.parametrize("threads", [1, 2])
def bench_client_mlps(compare, threads):
    rows = training_rounds.rows(CLIENTS, SAMPLES, SIZES[:1], SIZES[-1])
    job = training_rounds.job(
        algorithms.local(), nets.mlp(SIZES), rows, optimizer=optim.adam(LR), local_epochs=1, batch_size=BATCH,
        compute=ComputeConfig(threads=2),
    )  # fmt: skip
    start = trainer.start(job)

    def plain():
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for c in range(CLIENTS):
            plain_loop.train_client(
                plain_loop.module(SIZES), *plain_loop.samples(rows, c), lambda p: torch.optim.Adam(p, lr=LR),
                epochs=1, batch_size=BATCH, rng=np.random.default_rng(c),
            )  # fmt: skip
        torch.set_num_threads(before)

    compare(
        "100 MLPs 784-200-10, batch 16, one epoch, stacked, 2 threads",
        lambda: trainer.step(job, start), plain, f"plain loop, {threads} thread(s)", rounds=3,
    )  # fmt: skip
