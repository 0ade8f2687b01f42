"""Rounds of FedCAC, pFedGate and pFedPara against the methods in a plain per-client torch loop."""

from __future__ import annotations

import numpy as np
import plain_sparse
import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, SAMPLES, SIZES, LR = 100, 100, [100, 200, 2], 0.01
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def made(algorithm):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, SIZES[0]), dtype=np.float32))
    rows = Rows(x, (x[:, 0] > 0).long(), np.arange(CLIENTS + 1) * SAMPLES)
    net = nets.mlp(SIZES)
    net = algorithm.wrap(net) if algorithm.wrap else net
    options = {"optimizer": optim.sgd(LR), "batch_size": 10, "local_epochs": 5}
    return Job(rows, rows, net, algorithm, losses.cross_entropy, **options)


@pytest.mark.parametrize("name", plain_sparse.PLAIN)
def bench_against_a_plain_loop(compare, name):
    job = made(algorithms.named(name))
    options = {} if name == "pfedgate" else {"sizes": SIZES}
    if name == "pfedpara":
        options["ranks"] = tuple(job.net.shapes[f"{layer}.x1"][1] for layer in ("fc1", "fc2"))

    def plain():
        plain_sparse.PLAIN[name](job, lambda p: torch.optim.SGD(p, lr=LR), 1, **options)

    compare(f"{name}, MLP, 1 thread", training_rounds.stacked(job), plain, "plain loop", rounds=1)
