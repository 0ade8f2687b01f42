"""One round of the stacked engine against a plain per-client torch loop, and dynamic FedFac against FedAvg."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import plain_loop
import pytest
import torch
from threadpoolctl import threadpool_limits

from fedstat.fl import algorithms, engine, losses, nets, optim
from fedstat.fl.batches import Rows

WORKLOADS = {
    "MLP 100-200-1, 100 samples, batch 10": ([100, 200, 1], 100, 10, 0.05),
    "MLP 784-200-10, 600 samples, batch 50": ([784, 200, 10], 600, 50, 0.05),
}
CLIENTS, EPOCHS = 100, 5


def make(sizes, samples, batch_size, lr, *, threads, algorithm=None):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(CLIENTS * samples, sizes[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, max(2, sizes[-1]), CLIENTS * samples))
    rows = Rows(x, y, np.arange(CLIENTS + 1) * samples)
    job = engine.Job(
        rows, rows, nets.mlp(sizes), algorithm or algorithms.fedavg(), losses.for_outputs(sizes[-1]), optim.sgd(lr),
        local_epochs=EPOCHS, batch_size=batch_size, threads=threads,
    )  # fmt: skip
    state = engine.start(job)

    def one_round():
        nonlocal state
        state = engine.step(job, state)

    return one_round


def plain(sizes, samples, batch_size, lr, *, threads):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(CLIENTS, samples, sizes[0])).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, max(2, sizes[-1]), (CLIENTS, samples)))
    models = [plain_loop.module(sizes) for _ in range(CLIENTS)]

    def one_round():
        torch.set_num_threads(threads)
        for c, net in enumerate(models):
            plain_loop.train_client(
                net, x[c], y[c], lambda p: torch.optim.SGD(p, lr=lr), epochs=EPOCHS, batch_size=batch_size, rng=rng
            )
        mean = {
            name: torch.stack([net.state_dict()[name] for net in models]).mean(0) for name in models[0].state_dict()
        }
        for net in models:
            net.load_state_dict(mean)
        torch.set_num_threads(1)

    return one_round


@pytest.fixture(autouse=True)
def one_thread_an_operation():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1, user_api="blas"):
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("workload", WORKLOADS)
def bench_round(compare, workload, threads):
    size = WORKLOADS[workload]
    compare(
        f"FedAvg round, {workload}, {threads} thread(s)",
        make(*size, threads=threads), plain(*size, threads=threads), f"plain loop, {threads} thread(s)",
        rounds=5 if size[0][0] == 100 else 3,
    )  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def bench_dynamic_fedfac(compare, threads):
    size = WORKLOADS["MLP 100-200-1, 100 samples, batch 10"]
    fedfac = make(*size, threads=threads, algorithm=algorithms.fedfac(["fc1"]))
    fedavg = make(*size, threads=threads)
    compare(f"dynamic FedFac round, {threads} thread(s)", fedfac, fedavg, "FedAvg round", rounds=15)


def bench_peak_memory(benchmark, capsys):
    """Peak memory of a process that does FedAvg rounds, beside one that only imports the package."""
    base = "import fedstat.fl; "
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/benchmarks']; from bench_engine import *; "
        "run = make(*WORKLOADS['MLP 100-200-1, 100 samples, batch 10'], threads=2); run(); run(); "
    )
    # Not getrusage: its maximum starts from that of the process that forked this one.
    show = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')) / 1024)"

    def peak(source):
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
        return float(done.stdout)

    empty, full = peak(base + show), benchmark.pedantic(lambda: peak(code + show), rounds=1)
    with capsys.disabled():
        print(f"\npeak memory of FedAvg rounds: {full:.0f} MB, of which {empty:.0f} MB for importing torch and fedstat")
