"""Rounds of Per-FedAvg, pFedMe and Ditto against their plain per-client loops and FedAvg, and the memory they take."""

from __future__ import annotations

from functools import partial

import numpy as np
import plain_two_models
import pytest
import torch
import training_rounds
from training_rounds import peak_memory

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, SAMPLES, SIZES, LR = 100, 100, [100, 200, 2], 0.05
NAME = f"MLP 100-200-2, {CLIENTS} clients, {SAMPLES} samples, batch 10, 5 epochs, one thread"
PLAIN = {
    "per-fedavg": partial(plain_two_models.per_fedavg, alpha=0.01, finetune_steps=1),
    "per-fedavg-hf": partial(plain_two_models.per_fedavg, alpha=0.01, finetune_steps=1, difference=1e-3),
    "pfedme": partial(plain_two_models.pfedme, lam=15, eta=0.005, inner_steps=5),
    "ditto": partial(plain_two_models.ditto, lam=1, own_epochs=5),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def job(name):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(CLIENTS * SAMPLES, SIZES[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 2, CLIENTS * SAMPLES))
    rows, net = Rows(x, y, np.arange(CLIENTS + 1) * SAMPLES), nets.mlp(SIZES)
    method, loss = algorithms.named(name), losses.cross_entropy
    net = method.wrap(net) if method.wrap else net
    loss = method.loss(loss, net) if method.loss else loss
    return Job(rows, rows, net, method, loss, optimizer=optim.sgd(LR), batch_size=10, local_epochs=5)


def make(name):
    return training_rounds.stacked(job(name))


@pytest.mark.parametrize("name", PLAIN)
def bench_a_round_against_the_plain_loop(compare, name):
    j = job(name)
    plain = partial(PLAIN[name], j, lambda p: torch.optim.SGD(p, lr=LR), 1, score=False)
    compare(f"{name}, {NAME}", make(name), plain, "plain loop", rounds=2)


@pytest.mark.parametrize("name", PLAIN)
def bench_a_round_against_fedavg(compare, name):
    compare(f"{name}, {NAME}", make(name), make("fedavg"), "FedAvg round", rounds=5)


@pytest.mark.parametrize("name", PLAIN)
def bench_memory(benchmark, capsys, name):
    """Peak memory of a process that does rounds: of FedAvg's, and of a method's that may keep every client's model."""
    base = "from bench_two_models import *; run = make('{}'); run(); run()"
    fedavg = peak_memory(base.format("fedavg"))
    ours = benchmark.pedantic(peak_memory, (base.format(name),), rounds=1)
    model = sum(int(np.prod(shape)) for shape in nets.mlp(SIZES).shapes.values()) * CLIENTS * 4 / 2**20
    with capsys.disabled():
        print(
            f"\npeak memory, {NAME}: FedAvg {fedavg:.0f} MB, {name} {ours:.0f} MB; all clients' models {model:.0f} MB"
        )
