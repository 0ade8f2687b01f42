"""Rounds of algorithms on a small MLP against plain per-client torch loops and FedAvg, and the memory they take."""

from __future__ import annotations

from functools import partial

import plain_heads
import plain_loop
import plain_servers
import plain_sparse
import plain_two_models
import pytest
import torch
import training_rounds

from fedstat.fl import algorithms, nets, optim

CLIENTS, SAMPLES, HELD_OUT, SIZES, LR = 100, 100, 20, [100, 200, 2], 0.05
NAME = f"MLP 100-200-2, {CLIENTS} clients, {SAMPLES} samples, batch 10, 5 epochs, one thread"
SETTINGS = {
    "fedphp": {"horizon": 3, "lam": 0.3},
    "pfedsd": {"lam": 0.7, "temperature": 2.0},
    "fedamp": {"sigma": 10.0},
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def make(name):
    data, held_out = (training_rounds.rows(CLIENTS, n, SIZES[:1], 2) for n in (SAMPLES, HELD_OUT))
    return training_rounds.job(
        algorithms.named(name, **SETTINGS.get(name, {})), nets.mlp(SIZES), data, held_out, validation=held_out,
        optimizer=optim.sgd(LR), local_epochs=5, batch_size=10,
    )  # fmt: skip


RANKS = tuple(make("pfedpara").net.shapes[f"{layer}.x1"][1] for layer in ("fc1", "fc2"))
MODULE = partial(plain_loop.module, SIZES)
PLAIN = {
    "fedrod": partial(plain_heads.fedrod, make=MODULE),
    "fedphp": partial(plain_heads.fedphp, make=MODULE),
    "pfedsd": partial(plain_heads.pfedsd, make=MODULE),
    "fedamp": partial(plain_servers.fedamp, sigma=10.0),
    "fedfomo": plain_servers.fedfomo,
    "clustered-fl": plain_servers.clustered,
    "fedcac": partial(plain_sparse.fedcac, sizes=SIZES),
    "pfedgate": plain_sparse.pfedgate,
    "pfedpara": partial(plain_sparse.pfedpara, sizes=SIZES, ranks=RANKS),
    "per-fedavg": partial(plain_two_models.per_fedavg, alpha=0.01, finetune_steps=1, score=False),
    "per-fedavg-hf": partial(
        plain_two_models.per_fedavg, alpha=0.01, finetune_steps=1, difference=1e-3, score=False
    ),
    "pfedme": partial(plain_two_models.pfedme, lam=15, eta=0.005, inner_steps=5, score=False),
    "ditto": partial(plain_two_models.ditto, lam=1, own_epochs=5, score=False),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def bench_against_a_plain_loop(compare, name):
    """From the first round on; FedRoD, FedPHP and pFedSD have a personal model to learn from in the second alone."""
    job, rounds = make(name), 2 if name in ("fedrod", "fedphp", "pfedsd") else 1

    def stacked():
        one_round = training_rounds.stacked(job)
        for _ in range(rounds):
            one_round()

    def plain():
        PLAIN[name](job, lambda p: torch.optim.SGD(p, lr=LR), rounds)

    compare(f"{rounds} round(s) of {name}, {NAME}", stacked, plain, "plain loop", rounds=2)


@pytest.mark.parametrize("name", PLAIN)
def bench_a_round_against_fedavg(compare, name):
    stacked, fedavg = (training_rounds.stacked(make(one)) for one in (name, "fedavg"))
    compare(f"{name}, {NAME}", stacked, fedavg, "FedAvg round", rounds=5)


@pytest.mark.parametrize("name", PLAIN)
def bench_peak_memory(compare_memory, name):
    rounds = "from bench_algorithms import *; run = training_rounds.stacked(make('{}')); run(); run()"
    compare_memory(f"{name}, {NAME}", rounds.format(name), fedavg=rounds.format("fedavg"))
