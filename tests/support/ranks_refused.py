"""What several processes refuse, each named by process 0."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from algorithm_jobs import SAMPLES, SIZES, dataset, make

from fedstat.fl import nets, ranks, train
from fedstat.fl.algorithm import Algorithm, SharedMask


def uneven(start):
    shared = {name: torch.ones((), dtype=torch.bool) for name in start.net.shapes}
    shared["fc1.weight"] = (torch.arange(len(start.sizes)) % 2 == 0).view(-1, 1, 1)
    return SharedMask(shared)


def main(folder: str) -> None:
    dist.init_process_group("cpu:gloo")
    rank = dist.get_rank()
    cases = {
        "few": {"participation": 1 / 6},
        "seed": {"seed": rank},
        "data": {"data": dataset(SAMPLES, seed=rank)},
        "nowhere": {"out": None},
        "masks": {"algorithm": Algorithm("uneven", uneven)},
    }
    for name, case in cases.items():
        given = {"data": dataset(SAMPLES), "algorithm": make("fedavg"), "rounds": 1, "out": Path(folder) / name} | case
        data, algorithm = given.pop("data"), given.pop("algorithm")
        try:
            train(data, nets.mlp(SIZES), algorithm, **given)
        except ValueError as error:
            print(f"{name}: {error}")
    try:
        ranks.begin(dataset(SAMPLES)["y"].to_numpy(), 6, torch.device("cuda"), {})
    except ValueError as error:
        print(f"backend: {error}")
    dist.destroy_process_group()
