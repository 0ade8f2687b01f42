"""One of several processes that share runs. Arguments: folder, rounds, resume or begin, names."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from algorithm_jobs import SAMPLES, dataset, make, net_of
from measured_runs import TIES, measured_run
from toy_methods import REMEMBERS, toy

from fedstat.fl import aggregate, train


def settings(name: str, rounds: int) -> dict:
    """Of a run in which a round may leave a process without active clients."""
    return {
        "algorithm": make(name), "rounds": rounds, "participation": 0.5, "local_epochs": 2, "batch_size": 5, "lr": 0.1,
        "seed": 4, "threads": 1, "probe": ("drift", "trained-weights"),
    }  # fmt: skip


def largest(sent: aggregate.Sent) -> dict[str, torch.Tensor]:
    """Coordinate by coordinate, which is no sum over clients."""
    return {name: p.max(0).values for name, p in sent.values.items()}


AGGREGATORS = {
    "median": "median",
    "trimmed": "trimmed-mean:0.34",
    "largest": aggregate.stateless("largest", largest),
    "halved": aggregate.chain(
        aggregate.weighted_mean(),
        aggregate.stateless("halved", lambda sent: {name: p / 2 for name, p in sent.values.items()}, needs="sum"),
    ),
}
# Its hook that counts models is the only one to read what processes gather.
COUNTS = toy(init_state=REMEMBERS.init_state, downloads=lambda up: np.full(len(up.clients), len(up.before)))
LIAR = aggregate.stateless("liar", largest, needs="sum")


def aggregated(folder: str) -> None:
    """Runs with aggregators that need all clients, that need sums, and one that says the wrong thing."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    for name, aggregator in AGGREGATORS.items():
        given = settings("fedper", 3) | {"aggregator": aggregator}
        train(dataset(SAMPLES), net_of("fedper"), out=Path(folder) / f"{name}.zarr", **given)
    given = settings("fedper", 3) | {"algorithm": COUNTS, "participation": 0.34}
    train(dataset(SAMPLES), net_of("fedper"), out=Path(folder) / "counts.zarr", **given)
    try:
        given = settings("fedper", 3) | {"aggregator": LIAR}
        train(dataset(SAMPLES), net_of("fedper"), out=Path(folder) / "liar.zarr", **given)
    except ValueError as error:
        print(error)
    dist.destroy_process_group()


def measured(folder: str, *names: str) -> None:
    """Runs in which everything is measured."""
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    for name in names:
        measured_run(name, TIES, batch_size=3, out=Path(folder) / f"{name}.zarr")
    dist.destroy_process_group()


def main(folder: str, rounds: str, how: str, *names: str) -> None:
    warnings.simplefilter("error")
    dist.init_process_group("gloo")
    for name in names:
        given = settings(name, int(rounds))
        data, out = dataset(SAMPLES, method=name), Path(folder) / f"{name}.zarr"
        train(data, net_of(name), out=out, resume=how == "resume", **given)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
