"""From a data set and settings to a job: everything that can be checked before training."""

from __future__ import annotations

import os
from typing import Literal

import torch
import xarray as xr

from fedstat import _check
from fedstat.fl import batches, choice, halves, losses, nets
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Precision, Probe, device_named
from fedstat.fl.nets import Net
from fedstat.fl.optim import OPTIMIZERS, Optimizer


def prepare(
    data: xr.Dataset,
    net: Net,
    algorithm: Algorithm,
    *,
    participation: float,
    local_epochs: int,
    batch_size: int | None,
    optimizer: str | Optimizer,
    lr: float,
    server_lr: float,
    optimizer_state: Literal["reset", "keep"],
    seed: int,
    device: str,
    client_chunk: int | None,
    threads: int | None,
    precision: Precision = "float32",
    track: bool = False,
    probe: Probe | None = None,
) -> Job:
    """Check the settings of a run and bring the data to the device; arguments as in :func:`fedstat.fl.train`."""
    if not isinstance(data, xr.Dataset):
        raise ValueError(f"data must be an xarray.Dataset with variables x and y, but got {type(data).__name__}")
    if not isinstance(net, Net):
        raise ValueError(
            f"net must be a network of fedstat.fl.nets, but got {type(net).__name__}. "
            "Take a torch module with nets.from_module(module, sample)."
        )
    if not isinstance(algorithm, Algorithm):
        raise ValueError(
            f"algorithm must be one of fedstat.fl.algorithms, such as algorithms.fedavg(), but got {algorithm!r}"
        )
    if isinstance(optimizer, str):
        optimizer = OPTIMIZERS[_check.choice("optimizer", optimizer, OPTIMIZERS)](lr)
    if client_chunk is not None:
        _check.integer("client_chunk", client_chunk)
    at = device_named(device)
    train_rows, test_rows = (batches.rows_of(data, s, at) for s in ("train", "test"))
    splits = data["split"].to_numpy() if "split" in data.coords else ()
    validation = batches.rows_of(data, "validation", at) if "validation" in splits else None
    if len(train_rows.start) != len(test_rows.start):
        raise ValueError(
            f"every client needs train and test samples, but {len(train_rows.start) - 1} clients have train "
            f"and {len(test_rows.start) - 1} test samples"
        )
    try:
        net.apply({n: torch.zeros(1, *s, device=at) for n, s in net.shapes.items()}, train_rows.x[:1].unsqueeze(0))
    except RuntimeError as error:
        shape = tuple(train_rows.x.shape[1:])
        raise ValueError(f"the network does not take samples of shape {shape}: {error}") from None
    outputs = nets.n_outputs(net)
    for name, rows in {"train": train_rows, "test": test_rows, "validation": validation}.items():
        if rows is not None:
            require_classes(rows, outputs, name)
    _check.real("participation", participation, low=0, open_low=True, high=1)
    n_clients = len(train_rows.start) - 1
    if round(participation * n_clients) < 1:
        raise ValueError(
            f"participation selects no client: {participation} of {n_clients}. Use at least {1 / n_clients:.2g}."
        )
    if _check.choice("precision", precision, ("float32", "tf32", "bfloat16")) == "tf32" and at.type != "cuda":
        raise ValueError(f"precision='tf32' needs a CUDA device, but got device {device!r}. Use 'float32'.")
    if probe is not None:
        _check.choice("probe", probe, ("halves",))
    loss = losses.for_outputs(outputs)
    net = nets.require(algorithm.wrap(net) if algorithm.wrap else net)
    job = Job(
        train_rows,
        test_rows,
        net,
        algorithm,
        algorithm.loss(loss, net) if algorithm.loss else loss,
        optimizer,
        participation=participation,
        local_epochs=_check.integer("local_epochs", local_epochs),
        batch_size=None if batch_size is None else _check.integer("batch_size", batch_size),
        server_lr=_check.real("server_lr", server_lr, low=0, open_low=True),
        optimizer_state=_check.choice("optimizer_state", optimizer_state, ("reset", "keep")),
        seed=_check.integer("seed", seed, low=0),
        client_chunk=client_chunk,
        threads=os.cpu_count() or 1 if threads is None else _check.integer("threads", threads),
        validation=validation,
        precision=precision,
        track=track,
        probe=probe,
    )
    if probe:
        halves.require(job, f"probe={probe!r}", halves.fewest(job))
    choice.require(job)
    return job


def require_classes(rows: Rows, outputs: int, name: str) -> None:
    """ValueError if a split holds classes that the network has no output for."""
    low, top, classes = int(rows.y.min()), int(rows.y.max()), max(outputs, 2)
    if low < 0 or top >= classes:
        raise ValueError(
            f"y must lie in 0, ..., {classes - 1} for {outputs} output(s), but the {name} samples have {low} to {top}. "
            "Number the classes from 0, or give the network more outputs."
        )
