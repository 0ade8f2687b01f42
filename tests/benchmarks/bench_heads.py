"""Rounds of FedRoD, FedPHP and pFedSD against plain per-client torch loops, and the memory that they take."""

from __future__ import annotations

import numpy as np
import plain_heads
import plain_loop
import pytest
import torch
import trainer
import training_rounds

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, SAMPLES, SIZES, LR = 100, 100, [100, 200, 2], 0.05
METHODS = {
    "fedrod": (algorithms.fedrod, plain_heads.fedrod),
    "fedphp": (lambda: algorithms.fedphp(horizon=3, lam=0.3), plain_heads.fedphp),
    "pfedsd": (lambda: algorithms.pfedsd(lam=0.7, temperature=2.0), plain_heads.pfedsd),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def made(algorithm):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, SIZES[0]), dtype=np.float32))
    rows = Rows(x, torch.from_numpy(rng.integers(0, 2, len(x))), np.arange(CLIENTS + 1) * SAMPLES)
    net = nets.mlp(SIZES)
    net = algorithm.wrap(net) if algorithm.wrap else net
    loss = algorithm.loss(losses.cross_entropy, net) if algorithm.loss else losses.cross_entropy
    return Job(rows, rows, net, algorithm, loss, optimizer=optim.sgd(LR), local_epochs=5, batch_size=10)


@pytest.mark.parametrize("name", METHODS)
def bench_against_a_plain_loop(compare, name):
    method, plain = METHODS[name]
    job = made(method())

    def rounds():
        trainer.step(job, trainer.step(job, trainer.start(job)))

    def loop():
        plain(job, lambda p: torch.optim.SGD(p, lr=LR), 2, lambda: plain_loop.module(SIZES))

    compare(f"two rounds of {name}, 100 clients, 1 thread", rounds, loop, "plain loop", rounds=3)


@pytest.mark.parametrize("name", METHODS)
def bench_peak_memory(benchmark, capsys, name):
    def peak(method):
        made = f"made({method})"
        return training_rounds.peak_memory(
            f"from bench_heads import *; run = training_rounds.stacked({made}); run(); run()"
        )

    full = benchmark.pedantic(peak, (f"METHODS[{name!r}][0]()",), rounds=1)
    less = peak("algorithms.fedavg()")
    with capsys.disabled():
        print(f"\npeak memory of {name} rounds: {full:.0f} MB; FedAvg: {less:.0f} MB; ratio {full / less:.3g}")
