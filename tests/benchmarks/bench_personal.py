"""What probing and choosing cost: ratios to the training that they stand beside, in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch
import trainer

from fedstat.fl import algorithms, nets, optim, split_halves
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import of_round
from fedstat.fl.job import ComputeConfig, Job
from fedstat.fl.local_training import train_locally
from fedstat.fl.losses import for_outputs
from fedstat.fl.state import Download

CLIENTS, TRAIN, TEST = 100, 128, 20


def rows(each: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(CLIENTS * each, 3, 32, 32)).astype(np.float32))
    y = torch.from_numpy(rng.integers(0, 10, CLIENTS * each))
    return Rows(x, y, np.arange(CLIENTS + 1) * each)


@pytest.fixture(scope="module")
def job() -> Job:
    net = nets.named("cnn", (3, 32, 32), 10, width=0.25)
    settings = {"participation": 0.1, "local_epochs": 5, "batch_size": 32, "track": True}
    return Job(
        rows(TRAIN, 0), rows(TEST, 1), net, algorithms.fedavg(), for_outputs(10), optimizer=optim.adam(1e-3),
        validation=rows(10, 2), compute=ComputeConfig(threads=2), **settings,
    )  # fmt: skip


def ratio(first, second, repeats: int = 5) -> float:
    """Median of first's time over second's, taken in turn."""
    found = []
    for _ in range(repeats):
        spent = []
        for work in (first, second):
            begun = time.perf_counter()
            work()
            spent.append(time.perf_counter() - begun)
        found.append(spent[0] / spent[1])
    return median(found)


def test_probe_of_halves(benchmark, job):
    """Two halves trained and compared, against one round of local training of the same clients: at most 1.2.

    Where halves leave a small last batch that the whole does not, they take more steps: 80 samples in batches of 32 are
    3 steps an epoch, their halves 2 and 2.
    """
    state = trainer.step(job, trainer.start(job))
    cohort, download = of_round(job, state.round).at_least(2), Download(job, state)
    found = ratio(
        lambda: split_halves.parts(job, download, cohort, job.phases),
        lambda: train_locally(job, download, cohort.local, job.phases),
    )
    benchmark.extra_info["ratio"] = found
    print(f"\nprobe by halves / a round of local training: {found:.2f}")
    benchmark.pedantic(lambda: split_halves.parts(job, download, cohort, job.phases), rounds=1)


@pytest.mark.parametrize("by", ["pooled", "client", "layer"])
@pytest.mark.parametrize("participation", [0.1, 1.0])
def test_shrunken_against_fine_tuned(benchmark, job, by, participation):
    """A round and its evaluation, FedAvg-shrunken / FedAvg+: at most 1.1 for the pooled rule."""

    def work(algorithm: Algorithm):
        one = replace(job, algorithm=algorithm, participation=participation)
        state = trainer.start(one)
        return lambda: trainer.measured(one, state)

    shrunken, plus = work(algorithms.shrunken(algorithms.fedavg(), by=by)), work(algorithms.fedavg_plus())
    found = ratio(shrunken, plus, 3)
    print(f"\nfedavg-shrunken by {by} / fedavg+, {participation:.0%} active: {found:.2f}")
    benchmark.pedantic(shrunken, rounds=1)
