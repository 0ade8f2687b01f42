"""Rounds of FedAMP, FedFomo and Clustered-FL against plain per-client torch loops of them and against FedAvg."""

from __future__ import annotations

import numpy as np
import plain_servers
import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, SAMPLES, HELD_OUT, LR = 100, 100, 20, 0.05
METHODS = {
    "fedamp": (plain_servers.fedamp, {"sigma": 10.0}),
    "fedfomo": (plain_servers.fedfomo, {}),
    "clustered-fl": (plain_servers.clustered, {}),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def made(name, **settings):
    rng = np.random.default_rng(0)

    def rows(n):
        x = torch.from_numpy(rng.standard_normal((CLIENTS * n, 100), dtype=np.float32))
        return Rows(x, torch.from_numpy(rng.integers(0, 2, len(x))), np.arange(CLIENTS + 1) * n)

    train, held_out = rows(SAMPLES), rows(HELD_OUT)
    return Job(
        train, held_out, nets.mlp([100, 200, 2]), algorithms.named(name, **settings), losses.cross_entropy, held_out,
        optimizer=optim.sgd(LR), local_epochs=5, batch_size=10,
    )  # fmt: skip


def looped(name):
    loop, settings = METHODS[name]
    job = made(name, **settings)
    return lambda: loop(job, lambda p: torch.optim.SGD(p, lr=LR), 1, **settings)


@pytest.mark.parametrize("name", METHODS)
def bench_against_a_plain_loop(compare, name):
    stacked = training_rounds.stacked(made(name, **METHODS[name][1]))
    compare(f"{name} round, 100 clients, MLP 100-200-2, 1 thread", stacked, looped(name), "plain loop", rounds=3)


@pytest.mark.parametrize("name", METHODS)
def bench_against_fedavg(compare, name):
    stacked, fedavg = (
        training_rounds.stacked(made(one, **more)) for one, more in ((name, METHODS[name][1]), ("fedavg", {}))
    )
    compare(f"{name} round, 100 clients, MLP 100-200-2, 1 thread", stacked, fedavg, "FedAvg", rounds=5)
