"""Median seconds of a round and resident memory, of a process alone or of one that torchrun started."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import trainer
import training_rounds

from fedstat.fl import algorithms, job, nets, optim, ranks
from fedstat.fl.job import ComputeConfig, Job

ROUNDS = 7


def make(net: str, threads: int, algorithm: algorithms.Algorithm, clients: int, samples: int) -> Job:
    """All clients active."""
    shape = (1, 28, 28) if net == "cnn" else (784,)
    train, test = (training_rounds.rows(clients, n, shape, 10) for n in (samples, 1))
    return training_rounds.job(
        algorithm, nets.cnn(shape, 10) if net == "cnn" else nets.mlp([784, 200, 10]), train, test,
        optimizer=optim.adam(1e-3), compute=ComputeConfig(threads=threads), batch_size=32,
        local_epochs=1 if net == "cnn" else 5,
    )  # fmt: skip


def main() -> None:
    net, name, threads, clients, samples = *sys.argv[1:3], *map(int, sys.argv[3:])
    settings = {"layers": ["fc1"], "kappa": 0.85, "tau": 0.5} if name == "fedfac-dynamic" else {}
    torch.set_num_threads(1)
    with ranks.launched("cpu") as (rank, _, _):
        whole = make(net, threads, algorithms.named(name, **settings), clients, samples)
        own = job.of_rank(whole, ranks.begin(whole.sizes, clients, whole.device, {}))
        del whole
        state, seconds = trainer.step(own, trainer.start(own)), []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            state = trainer.step(own, state)
            seconds.append(time.perf_counter() - begun)
    lines = Path("/proc/self/status").read_text().splitlines()
    held = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    said = json.dumps({"rank": rank, "seconds": statistics.median(seconds), "mb": held})
    sys.stdout.write(f"{said}\n")  # in one piece, beside the other process's


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
