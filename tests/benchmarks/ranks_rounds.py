"""Median seconds of a round and peak resident memory, of a process alone or of one that torchrun started."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fedstat.fl import algorithms, engine, job, losses, nets, optim, ranks
from fedstat.fl.batches import Rows

CLIENTS, SAMPLES, ROUNDS = 20, 200, 7


def make(net: str, threads: int) -> engine.Job:
    """FedFac that decides in every round, all clients active."""
    rng, shape = np.random.default_rng(0), (1, 28, 28) if net == "cnn" else (784,)
    x = torch.from_numpy(rng.standard_normal((CLIENTS * SAMPLES, *shape), dtype=np.float32))
    rows = Rows(x, torch.from_numpy(rng.integers(0, 10, len(x))), np.arange(CLIENTS + 1) * SAMPLES)
    made = nets.cnn(shape, 10) if net == "cnn" else nets.mlp([784, 200, 10])
    return engine.Job(
        rows, rows, made, algorithms.named("fedfac-dynamic", layers=["fc1"], kappa=0.85, tau=0.5), losses.cross_entropy,
        optimizer=optim.adam(1e-3), threads=threads, batch_size=32, local_epochs=1 if net == "cnn" else 5,
    )  # fmt: skip


def main() -> None:
    net, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    with ranks.launched("cpu") as (rank, _, _):
        whole = make(net, threads)
        own = job.of_rank(whole, ranks.begin(whole.sizes, CLIENTS, whole.device, {}))
        del whole
        state, seconds = engine.step(own, engine.start(own)), []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            state = engine.step(own, state)
            seconds.append(time.perf_counter() - begun)
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    print(json.dumps({"rank": rank, "seconds": statistics.median(seconds), "peak": peak}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
