"""Rounds of algorithms on the CNN against plain per-client torch loops and FedAvg, and the memory they take."""

from __future__ import annotations

from functools import partial

import numpy as np
import plain_factorized
import plain_fedcp
import plain_loop
import pytest
import torch
import training_rounds
from low_rank_modules import Cnn, is_personal
from torch import nn

from fedstat.fl import algorithms, nets, optim

CLIENTS, ACTIVE, SAMPLES, BATCH, EPOCHS, LR = 100, 10, 200, 32, 5, 1e-3
NAME = f"{ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, {EPOCHS} epochs, Adam, one thread"
NETS = {
    "cnn": ((1, 28, 28), lambda: nets.cnn((1, 28, 28), 10)),
    "mlp": ((784,), lambda: nets.mlp([784, 200, 10])),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def make(name, net="cnn", clients=CLIENTS, **settings):
    shape, build = NETS[net]
    data, test = (training_rounds.rows(clients, n, shape, 10) for n in (SAMPLES, 1))
    return training_rounds.job(
        algorithms.named(name, **settings), build(), data, test, optimizer=optim.adam(LR),
        participation=ACTIVE / clients, batch_size=BATCH, local_epochs=EPOCHS,
    )  # fmt: skip


class Extractor(nn.Module):
    """The 4-layer CNN without its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc1 = nn.Conv2d(1, 32, 5), nn.Conv2d(32, 64, 5), nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
        h = nn.functional.max_pool2d(self.conv2(h).relu(), 2)
        return self.fc1(h.flatten(1)).relu()


def plain_feddecomp(job, optimizer, rounds):
    split = {name: np.asarray(not is_personal(name)) for name in job.net.shapes}
    phases = ({"epochs": 2, "is_trainable": is_personal},
              {"epochs": EPOCHS - 2, "is_trainable": lambda name: not is_personal(name)})  # fmt: skip
    module = partial(Cnn, (32, 64), 512, 1024, share=(0.6, 0.6), outputs=10)
    plain_loop.run(job, module, optimizer, rounds=rounds, shared=lambda *_: split, before=split, phases=phases)


def plain_factorized_fl(job, optimizer, rounds, *, beta):
    module = partial(plain_factorized.Cnn, (32, 64, 512), 1024, 10)
    plain_factorized.run(job, module, optimizer, rounds=rounds, beta=beta)


PLAIN = {
    "factorized-fl-alpha": partial(plain_factorized_fl, beta=False),
    "factorized-fl-beta": partial(plain_factorized_fl, beta=True),
    "fedcp": lambda job, optimizer, rounds: plain_fedcp.run(job, Extractor, optimizer, rounds=rounds, score=False),
    "feddecomp": plain_feddecomp,
}


@pytest.mark.parametrize(
    ("name", "net", "settings"),
    [
        ("factorized-fl-alpha", "cnn", {}),
        ("factorized-fl-beta", "cnn", {}),
        *(("fedcp", net, ways) for net in NETS for ways in ({}, {"align": False}, {"policy": False})),
        *(
            ("feddecomp", "cnn", ways)
            for ways in ({}, {"alternating": False}, {"lora_epochs": 0}, {"global_epochs": 0})
        ),
    ],
    ids=str,
)
def bench_a_round_against_fedavg(compare, name, net, settings):
    stacked, fedavg = make(name, net, **settings), make("fedavg", net)
    compare(
        f"{name} {settings or ''}, {net}, {NAME}",
        training_rounds.stacked(stacked), training_rounds.stacked(fedavg), "FedAvg round", rounds=3,
    )  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def bench_against_a_plain_loop(compare, name):
    job = make(name, clients=ACTIVE)  # so that the loop makes no more models than it trains

    def plain():
        PLAIN[name](job, lambda p: torch.optim.Adam(p, lr=LR), 1)

    compare(f"{name}, CNN, {NAME}", training_rounds.stacked(job), plain, "plain loop", rounds=3)


@pytest.mark.parametrize("name", ["fedcp", "feddecomp"])
def bench_peak_memory(compare_memory, name):
    """FedDecomp keeps the factors of every client."""
    rounds = "from bench_cnn_algorithms import *; run = training_rounds.stacked(make('{}')); run(); run()"
    compare_memory(f"{name}, CNN, {NAME}", rounds.format(name), fedavg=rounds.format("fedavg"))
