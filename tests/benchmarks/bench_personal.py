"""What probing and choosing cost: ratios to the training that they stand beside, in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trainer
import training_rounds

from fedstat.fl import algorithms, nets, optim, split_halves
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.cohort import of_round
from fedstat.fl.job import ComputeConfig, Job
from fedstat.fl.local_training import train_locally
from fedstat.fl.state import Download

CLIENTS, TRAIN, TEST = 100, 128, 20


@pytest.fixture(scope="module")
def job() -> Job:
    train, test, validation = (
        training_rounds.rows(CLIENTS, n, (3, 32, 32), 10, seed) for seed, n in enumerate((TRAIN, TEST, 10))
    )
    return training_rounds.job(
        algorithms.fedavg(), nets.named("cnn", (3, 32, 32), 10, width=0.25), train, test, validation=validation,
        optimizer=optim.adam(1e-3), participation=0.1, local_epochs=5, batch_size=32, track=True,
        compute=ComputeConfig(threads=2),
    )  # fmt: skip


def test_probe_of_halves(compare, job):
    """Two halves trained and compared, against a round of local training of the same clients: a ratio of 0.83 or more.

    Where halves leave a small last batch that the whole does not, they take more steps: 80 samples in batches of 32 are
    3 steps an epoch, their halves 2 and 2.
    """
    state = trainer.step(job, trainer.start(job))
    cohort, download = of_round(job, state.round).at_least(2), Download(job, state)
    compare(
        "probe by halves",
        lambda: split_halves.parts(job, download, cohort, job.phases),
        lambda: train_locally(job, download, cohort.local, job.phases),
        "a round of local training",
    )


@pytest.mark.parametrize("by", ["pooled", "client", "layer"])
@pytest.mark.parametrize("participation", [0.1, 1.0])
def test_shrunken_against_fine_tuned(compare, job, by, participation):
    """A round and its evaluation, FedAvg-shrunken against FedAvg+: a ratio of 0.91 or more for the pooled rule."""

    def work(algorithm: Algorithm):
        one = replace(job, algorithm=algorithm, participation=participation)
        state = trainer.start(one)
        return lambda: trainer.measured(one, state)

    shrunken, plus = work(algorithms.shrunken(algorithms.fedavg(), by=by)), work(algorithms.fedavg_plus())
    compare(f"fedavg-shrunken by {by}, {participation:.0%} active", shrunken, plus, "fedavg+", rounds=3)
