"""FedAvg rounds of image networks: the stacked engine against a plain per-client torch loop."""

from __future__ import annotations

import numpy as np
import plain_loop
import pytest
import torch
import trainer
import training_rounds
from torch import nn
from training_rounds import peak_memory

from fedstat.fl import algorithms, losses, nets, optim
from fedstat.fl.batches import Rows
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import ComputeConfig, Job

CLIENTS, ACTIVE, SAMPLES, BATCH, LR = 100, 10, 600, 50, 1e-3
OPTIMIZERS = {
    "adam": (optim.adam(LR), lambda p: torch.optim.Adam(p, lr=LR)),
    "sgd": (optim.sgd(LR), lambda p: torch.optim.SGD(p, lr=LR)),
}
pytestmark = pytest.mark.usefixtures("one_thread_an_operation")


def data():
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, 1, 28, 28), dtype=np.float32))
    return x, torch.from_numpy(rng.integers(0, 10, CLIENTS * SAMPLES))


def module():
    """The network as it is usually written (McMahan et al. 2017; PFLlib's FedAvgCNN)."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 512), nn.ReLU(inplace=True), nn.Linear(512, 10),
    )  # fmt: skip


def make(optimizer, *, threads, chunk=None, algorithm=None):
    x, y = data()
    rows = Rows(x, y, np.arange(CLIENTS + 1) * SAMPLES)
    job = Job(
        rows, rows, nets.cnn((1, 28, 28), 10), algorithm or algorithms.fedavg(), losses.cross_entropy,
        optimizer=OPTIMIZERS[optimizer][0], participation=ACTIVE / CLIENTS, local_epochs=1,
        batch_size=BATCH, compute=ComputeConfig(threads=threads, client_chunk=chunk),
    )  # fmt: skip
    return training_rounds.stacked(job)


def plain(optimizer, *, threads):
    x, y = (t.view(CLIENTS, SAMPLES, *t.shape[1:]) for t in data())
    server, number = module().state_dict(), 0

    def one_round():
        nonlocal server, number
        torch.set_num_threads(threads)
        rng = np.random.default_rng(number)
        number += 1
        trained = []
        for c in rng.choice(CLIENTS, ACTIVE, replace=False):
            net = module()
            net.load_state_dict(server)
            plain_loop.train_client(net, x[c], y[c], OPTIMIZERS[optimizer][1], epochs=1, batch_size=BATCH, rng=rng)
            trained.append(net.state_dict())
        server = {name: torch.stack([state[name] for state in trained]).mean(0) for name in server}
        torch.set_num_threads(1)

    return one_round


@pytest.mark.parametrize(("ours", "theirs"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def bench_cnn(compare, optimizer, ours, theirs):
    compare(
        f"CNN 28×28, {ACTIVE} of {CLIENTS} clients, {SAMPLES} samples, batch {BATCH}, {optimizer}, {ours} thread(s)",
        make(optimizer, threads=ours), plain(optimizer, threads=theirs), f"plain loop, {theirs} thread(s)",
        rounds=3,
    )  # fmt: skip


@pytest.mark.parametrize(("layer", "kappa"), [("conv2", 0.85), ("fc1", 0.75), ("fc1", 0.85)])
def bench_dynamic_fedfac(compare, layer, kappa):
    fedfac = algorithms.fedfac([layer], kappa=kappa)
    compare(
        f"dynamic FedFac round of the CNN, Λ = {layer}, κ = {kappa}, 1 local epoch, adam, 2 threads",
        make("adam", threads=2, algorithm=fedfac), make("adam", threads=2), "FedAvg round", rounds=5,
    )  # fmt: skip


def many_clients(algorithm):
    """Two rounds and an evaluation of 1,000 clients of a network with 987,210 parameters, a tenth of them active."""
    rng, clients = np.random.default_rng(0), 1000
    x = torch.from_numpy(rng.standard_normal((clients * 20, 784), dtype=np.float32))
    rows = Rows(x, torch.from_numpy(rng.integers(0, 10, clients * 20)), np.arange(clients + 1) * 20)
    job = Job(
        rows, rows, nets.mlp([784, 1000, 200, 10]), algorithm, losses.cross_entropy,
        optimizer=optim.adam(LR),
        participation=0.1, local_epochs=1, batch_size=10, compute=ComputeConfig(threads=2),
    )  # fmt: skip
    evaluate(job, trainer.step(job, trainer.step(job, trainer.start(job))))


@pytest.mark.parametrize(
    "algorithm", ["fedavg()", "fedper()", "fedfac(['fc2'], kappa=0.75)", "random_split(['fc1'])", "local()"]
)
def bench_memory_of_a_thousand_clients(benchmark, capsys, algorithm):
    """What is kept of clients that are not active: nothing, a head, a layer, half a layer, everything."""
    source = f"from bench_nets import *; many_clients(algorithms.{algorithm})"
    full = benchmark.pedantic(peak_memory, (source,), rounds=1)
    with capsys.disabled():
        print(f"\n1,000 clients × 987,210 parameters, 100 active, {algorithm}: peak {full / 1024:.2f} GiB")


def bench_peak_memory(benchmark, capsys):
    """Peak memory of a process that does FedAvg rounds, beside one that only makes the data."""

    base = "from bench_nets import *"
    ours = f"{base}; run = make('adam', threads=2); run(); run()"
    empty, full = peak_memory(f"{base}; data()"), benchmark.pedantic(peak_memory, (ours,), rounds=1)
    theirs = peak_memory(f"{base}; run = plain('adam', threads=2); run(); run()")
    with capsys.disabled():
        print(
            f"\npeak memory of FedAvg rounds of the CNN, {CLIENTS} clients: {full:.0f} MB; plain loop that keeps no "
            f"client's model: {theirs:.0f} MB; of both {empty:.0f} MB for torch, fedstat and the data"
        )
