"""One of several processes that share runs. Arguments: folder, rounds, resume or begin, names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import trainer
from algorithm_jobs import SAMPLES, dataset, job, make, net_of
from measured_runs import TIES, measured_run
from small_runs import NET, dense
from toy_methods import REMEMBERS, toy

from fedstat.fl import aggregate, algorithms, nets, ranks, train
from fedstat.fl.cohort import fewest
from fedstat.fl.job import Job, of_rank
from fedstat.fl.loop import observed_round
from fedstat.fl.probes import Values, measures


def settings(name: str, rounds: int) -> dict:
    """Of a run in which a round may leave a process without active clients."""
    return {
        "algorithm": make(name), "rounds": rounds, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.1,
        "seed": 4, "threads": 1,
    }  # fmt: skip


def largest(sent: aggregate.Sent) -> dict[str, torch.Tensor]:
    """Coordinate by coordinate, which is no sum over clients."""
    return {name: p.max(0).values for name, p in sent.values.items()}


AGGREGATORS = {
    "median": aggregate.median(),
    "trimmed": aggregate.trimmed_mean(0.34),
    "largest": aggregate.stateless("largest", largest),
    "halved": aggregate.chain(
        aggregate.weighted_mean(),
        aggregate.stateless("halved", lambda sent: {name: p / 2 for name, p in sent.values.items()}, needs="sum"),
    ),
    "liar": aggregate.stateless("liar", largest, needs="sum"),
}
# Its hook that counts models is the only one to read what processes gather.
COUNTS = toy(init_state=REMEMBERS.init_state, downloads=lambda up: np.full(len(up.clients), len(up.before)))


def job_of(case: str) -> Job:
    """The job of an algorithm, of FedPer with an aggregator, or of COUNTS."""
    if case == "counts":
        return job(COUNTS, participation=0.34, track=True)
    options = {"aggregator": AGGREGATORS[case]} if case in AGGREGATORS else {}
    return job(make("fedper" if options else case), participation=0.5, track=True, **options)


def course(case: str) -> tuple[list[Values], dict[str, torch.Tensor]]:
    """What a process observes in three rounds, and its clients' models after them; of all clients, if it is alone."""
    all_clients = job_of(case)
    selected = fewest(all_clients.participation, all_clients.clients)
    local = of_rank(all_clients, ranks.begin(all_clients.sizes, selected, all_clients.device, {}))
    observers = [*measures.observers(list(nets.layers(local.net))), measures.measures_probe(local, 3)]
    state, observed = trainer.start(local), []
    for _ in range(3):
        state, values = observed_round(local, state, observers)
        observed.append(values)
    return observed, trainer.models(local, state)


@contextmanager
def process_group() -> Iterator[int]:
    """The rank of this process."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    yield dist.get_rank()
    dist.destroy_process_group()


def courses(folder: str, *cases: str) -> None:
    """Save courses, and print errors."""
    with process_group() as rank:
        for case in cases:
            try:
                torch.save(course(case), Path(folder) / f"{case}-{rank}.pt")
            except ValueError as error:
                print(error)


def measured(folder: str, *names: str) -> None:
    """Runs in which everything is measured."""
    with process_group():
        for name in names:
            measured_run(name, TIES, batch_size=3, out=Path(folder) / f"{name}.zarr")


def of_named_clients(out: str) -> None:
    """A run whose clients have names."""
    data = dense().assign_coords(client=[f"site {i}" for i in range(5)])
    train(data, NET, algorithms.fedfac(["fc1"]), rounds=2, lr=0.1, seed=4, threads=1, participation=0.6, out=out)


def named(out: str) -> None:
    with process_group():
        of_named_clients(out)


def main(folder: str, rounds: str, how: str, *names: str) -> None:
    with process_group():
        for name in names:
            data, out = dataset(SAMPLES, method=name), Path(folder) / f"{name}.zarr"
            train(data, net_of(name), out=out, resume=how == "resume", **settings(name, int(rounds)))


if __name__ == "__main__":
    main(*sys.argv[1:])
