"""Rounds of Factorized-FL against FedAvg's, and against a plain loop of one torch module per client."""

from __future__ import annotations

import numpy as np
import plain_factorized
import plain_loop
import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, ACTIVE, SAMPLES, BATCH, EPOCHS, LR, SPARSITY = 100, 10, 200, 32, 5, 1e-3, 5e-4
METHODS = ("factorized-fl-alpha", "factorized-fl-beta")
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def data():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, 1, 28, 28), dtype=np.float32))
    return Rows(x, torch.from_numpy(rng.integers(0, 10, CLIENTS * SAMPLES)), np.arange(CLIENTS + 1) * SAMPLES)


def make(name):
    algorithm, net, rows = algorithms.named(name), nets.named("cnn", (1, 28, 28), 10), data()
    job = Job(
        rows, rows, algorithm.wrap(net) if algorithm.wrap else net, algorithm, losses.cross_entropy,
        optimizer=optim.adam(LR), participation=ACTIVE / CLIENTS, batch_size=BATCH, local_epochs=EPOCHS,
    )  # fmt: skip
    return training_rounds.stacked(job)


def shrink(named):
    for name, p in named.items():
        if name.endswith(".mu"):
            p.data = torch.nn.functional.softshrink(p.data, LR * SPARSITY)


def plain(name):
    """Every client's own module, trained; then matched and averaged, parameter by parameter."""
    rows, number, own = data(), 0, {}
    net = plain_factorized.Cnn((32, 64, 512), 1024, 10)
    with torch.no_grad():
        for p in net.parameters():
            p.uniform_(-0.05, 0.05)
    start = net.state_dict()

    def one_round():
        nonlocal number
        rng = np.random.default_rng(number)
        number += 1
        active = [int(c) for c in rng.choice(CLIENTS, ACTIVE, replace=False)]
        for c in active:
            net, (x, y) = plain_factorized.Cnn((32, 64, 512), 1024, 10), plain_loop.samples(rows, c)
            net.load_state_dict(own.get(c, start))
            plain_loop.train_client(
                net, x, y, lambda p: torch.optim.Adam(p, lr=LR), epochs=EPOCHS, batch_size=BATCH, rng=rng,
                after=shrink,
            )  # fmt: skip
            own[c] = net.state_dict()
        trained = [own[c] for c in active]
        sent = [n for n in start if not n.startswith("fc2") and (name.endswith("beta") or n.endswith(".u"))]
        matrix = plain_factorized.weights_of([m["fc1.v"].flatten().numpy() for m in trained], epsilon=1.0, tau=0.0)
        for c, row in zip(active, matrix, strict=True):
            own[c] = own[c] | {n: sum(w * m[n] for w, m in zip(row, trained, strict=True)) for n in sent}

    return one_round


WORK = f"CNN 28×28, {ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, {EPOCHS} epochs, Adam, 1 thread"


@pytest.mark.parametrize("name", METHODS)
def bench_against_fedavg(compare, name):
    compare(f"{name}, {WORK}", make(name), make("fedavg"), "FedAvg", rounds=3)


@pytest.mark.parametrize("name", METHODS)
def bench_against_the_plain_loop(compare, name):
    compare(f"{name}, {WORK}", make(name), plain(name), "plain loop", rounds=3)
