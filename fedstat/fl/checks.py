"""Checks of what a method's functions return: in a trial before the first round, and in every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Memory, Sharing, Uploads
from fedstat.fl.job import Job
from fedstat.fl.nets import Params


def entries(found: Any, expected: Params, where: str) -> None:
    """ValueError unless ``found`` holds tensors of some of the expected names, in their shapes."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{where} must return a dict of tensors by name, but got {type(found).__name__}")
    for name, value in found.items():
        if name not in expected:
            raise ValueError(f"{where} returns {name!r}, but may only return {list(expected)}")
        shape = tuple(expected[name].shape)
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{where} must return {name!r} as a Tensor of shape {shape}, but got {seen}")


def sent(found: Any, uploads: Uploads, sharing: Sharing, method: str) -> Params:
    """What ``send`` returned; ValueError unless it has all active clients, and only parameters with shared entries."""
    where = f"method {method!r}: send(uploads)"
    entries(found, uploads.after, where)
    for name in found:
        if not bool(sharing.shared[name].any()):
            shape = tuple(uploads.server[name].shape)
            raise ValueError(
                f"{where} returns {name!r}, of shape {shape}, but no entry of it is shared: nobody would receive it. "
                "Share it, or leave it out."
            )
    return dict(found)


def weights(found: Any, clients: int, device: torch.device, method: str) -> Tensor:
    """Weights (active,) of the mean as a float32 Tensor; ValueError if they are none."""
    where = f"method {method!r}: weights(sizes, active)"
    given = torch.as_tensor(found, dtype=torch.float32, device=device)
    if tuple(given.shape) != (clients,):
        raise ValueError(f"{where} must have shape ({clients},), one for each active client, but got {(*given.shape,)}")
    low, total = float(given.min()), float(given.sum(dtype=torch.float64))
    if not low >= 0 or not total <= 1 + 1e-5:  # also true for NaN
        raise ValueError(
            f"{where} must be at least 0 and sum to at most 1 (the server's copy gets the rest), but the smallest is "
            f"{low:g} and the sum {total:g}"
        )
    return given


def memory(found: Memory, clients: int, method: str) -> None:
    """ValueError unless the first axis of the clients' memory is the clients."""
    for name, value in found.clients.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or len(value) != clients:
            seen = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"method {method!r}: memory(start) must give clients' {name!r} as a Tensor whose first axis is the "
                f"{clients} clients, but got {seen}"
            )


def remembered(found: Memory, before: Memory, method: str) -> None:
    """ValueError unless a new memory has the names and shapes of the one before."""
    for part in ("clients", "server"):
        new, old = getattr(found, part), getattr(before, part)
        where = f"method {method!r}: remember(uploads), {part}"
        entries(new, old, where)
        if missing := [name for name in old if name not in new]:
            raise ValueError(f"{where}, lacks {missing}: return all that is to be remembered, changed or not")


def measured(found: Any, shape: tuple[int, ...], name: str, method: str) -> None:
    """ValueError unless a measure has the shape of its dims."""
    seen = tuple(getattr(found, "shape", ()))
    if seen != shape:
        raise ValueError(f"method {method!r}: its measure {name!r} must have shape {shape}, but got {seen}")


def trial(job: Job, uploads: Uploads, sharing: Sharing) -> None:
    """Call the algorithm's functions for after local training once before it, so that errors show at once."""
    algorithm, clients = job.algorithm, uploads.clients
    if algorithm.send:
        sent(algorithm.send(uploads), uploads, sharing, algorithm.name)
    if algorithm.weights:
        found = algorithm.weights(job.train.sizes[clients], clients)
        weights(found, len(clients), job.device, algorithm.name)
    if algorithm.remember:
        remembered(algorithm.remember(uploads), uploads.memory, algorithm.name)
    for name, measure in algorithm.measures.items():
        of = {"client": len(clients), "other": len(clients), "layer": len(nets.layers(job.net))} | dict(measure.sizes)
        measured(measure.value(uploads), tuple(of[dim] for dim in measure.dims), name, algorithm.name)
    if algorithm.uploads:
        masks.require(job.net, algorithm.uploads(job.net, sharing), job.clients, f"{algorithm.name}, uploads")
