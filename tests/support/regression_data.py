"""Data with real-valued targets, and a run of them on one of several processes."""

from __future__ import annotations

import numpy as np
import xarray as xr
from ranks_worker import process_group

from fedstat.fl import algorithms, nets, train

SIZES = [30, 12, 21, 17]
RUN = {"rounds": 3, "batch_size": 8, "lr": 0.05, "seed": 3, "local_epochs": 2}


def dataset(sizes=SIZES, *, targets=1, seed=0, validation=False, n_test=12):
    """Linear targets of five features, with noise and an effect of the client."""
    rng = np.random.default_rng(seed)
    beta = np.random.default_rng(99).normal(size=(5, targets))
    subsets = {"train": sizes, "test": [n_test] * len(sizes)} | ({"validation": [8] * len(sizes)} if validation else {})
    client = np.concatenate([np.repeat(np.arange(len(n)), n) for n in subsets.values()])
    x = rng.normal(size=(len(client), 5))
    y = x @ beta + 0.5 * client[:, None] + 0.1 * rng.normal(size=(len(client), targets))
    return xr.Dataset(
        {"x": (("sample", "feature"), x), "y": (("sample", "target"), y) if targets > 1 else ("sample", y[:, 0])},
        {"client": ("sample", client), "split": ("sample", np.repeat([*subsets], [sum(n) for n in subsets.values()]))},
    )


def train_rank(folder: str) -> None:
    """Train a shared run in this process."""
    with process_group():
        train(dataset(targets=2), nets.mlp([5, 6, 2]), algorithms.fedper(), out=f"{folder}/run.zarr", **RUN)
