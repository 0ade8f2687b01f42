"""FedDecomp rounds of the CNN: against FedAvg's, and against a plain per-client loop that composes its weights."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import training_rounds
from low_rank_modules import Cnn, is_personal
from training_rounds import peak_memory

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job

CLIENTS, ACTIVE, SAMPLES, BATCH, EPOCHS, LR = 100, 10, 200, 32, 5, 1e-3
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def data():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, 1, 28, 28), dtype=np.float32))
    return x, torch.from_numpy(rng.integers(0, 10, CLIENTS * SAMPLES))


def make(algorithm):
    x, y = data()
    rows, net = Rows(x, y, np.arange(CLIENTS + 1) * SAMPLES), nets.cnn((1, 28, 28), 10)
    job = Job(
        rows, rows, algorithm.wrap(net) if algorithm.wrap else net, algorithm, losses.cross_entropy,
        optimizer=optim.adam(LR), participation=ACTIVE / CLIENTS, batch_size=BATCH, local_epochs=EPOCHS,
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain():
    """Rounds of one module per active client, which keeps its factors."""
    x, y = (t.view(CLIENTS, SAMPLES, *t.shape[1:]) for t in data())
    module = Cnn((32, 64), 512, 1024, share=(0.6, 0.6), outputs=10)
    start = nets.cnn((1, 28, 28), 10).init(np.random.default_rng(0))
    drawn = {n: p.normal_(0, p.shape[-1] ** -0.5) for n, p in module.state_dict().items() if n.endswith(".left")}
    own = [{n: p.clone() for n, p in (module.state_dict() | drawn | start).items() if is_personal(n)}] * CLIENTS
    server, number = start, 0
    phases = ((2, is_personal), (EPOCHS - 2, lambda name: not is_personal(name)))

    def one_round():
        nonlocal server, number
        rng = np.random.default_rng(number)
        number += 1
        trained = []
        for c in rng.choice(CLIENTS, ACTIVE, replace=False):
            module.load_state_dict(server | own[c])
            for epochs, trains in phases:
                plain_loop.train_client(
                    module, x[c], y[c], lambda p: torch.optim.Adam(p, lr=LR),
                    epochs=epochs, batch_size=BATCH, rng=rng, is_trainable=trains,
                )  # fmt: skip
            after = {name: p.clone() for name, p in module.state_dict().items()}
            own[c] = {name: p for name, p in after.items() if is_personal(name)}
            trained.append(after)
        server = {name: torch.stack([state[name] for state in trained]).mean(0) for name in server}

    return one_round


NAME = f"CNN 28×28, {ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, adam, {EPOCHS} local epochs"


@pytest.mark.parametrize("ways", [{}, {"alternating": False}, {"lora_epochs": 0}, {"global_epochs": 0}])
def bench_a_round_against_fedavg(compare, ways):
    said = ", ".join(f"{name}={value}" for name, value in ways.items())
    compare(
        f"feddecomp({said}), {NAME}, one thread",
        make(algorithms.feddecomp(**ways)), make(algorithms.fedavg()), "FedAvg round", rounds=3,
    )  # fmt: skip


def bench_a_round_against_the_plain_loop(compare):
    compare(f"feddecomp(), {NAME}, one thread", make(algorithms.feddecomp()), plain(), "plain loop", rounds=3)


def bench_memory(benchmark, capsys):
    """Peak memory of a process that does rounds: FedAvg's, and FedDecomp's, which keeps every client's factors."""
    base = "from bench_feddecomp import *; run = make(algorithms.{}()); run(); run()"
    fedavg = peak_memory(base.format("fedavg"))
    ours = benchmark.pedantic(peak_memory, (base.format("feddecomp"),), rounds=1)
    net = algorithms.feddecomp().wrap(nets.cnn((1, 28, 28), 10))
    entries = sum(int(np.prod(shape)) for name, shape in net.shapes.items() if is_personal(name))
    with capsys.disabled():
        print(
            f"\npeak memory, {NAME}: FedAvg {fedavg:.0f} MB, FedDecomp {ours:.0f} MB; {CLIENTS} clients' personal "
            f"entries are {CLIENTS * entries * 4 / 2**20:.0f} MB"
        )
