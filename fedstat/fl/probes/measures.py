"""What a method itself measures in every round, and its server's mixing matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat import store
from fedstat._later import torch
from fedstat.fl import nets
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values

_OF_CLIENTS = ("client", "other")


def probe(job: Job, rounds: int) -> Observer:
    """Groups ``measures``, from the algorithm's ``measures``, and ``mixing``: weight (round, client, other).

    NaN where either client is inactive.
    """
    measures, groups = job.algorithm.measures, {}
    _require(job)
    if measures:
        sizes = {dim: n for measure in measures.values() for dim, n in _sizes(job, measure.sizes).items()}
        coords = sizes | {"round": range(1, rounds + 1), "layer": [*nets.layers(job.net)]}
        arrays = {}
        for name, measure in measures.items():
            attrs = {"long_name": measure.long_name, "units": measure.units}
            arrays[name] = (("round", *measure.dims), "float64", {key: text for key, text in attrs.items() if text})
        groups["measures"] = store.group(coords, **arrays)
    if job.algorithm.mixing_weights:
        coords = {"round": range(1, rounds + 1), "client": job.clients, "other": job.clients}
        text = "weight of the other client's entries in a client's own mixture"
        groups["mixing"] = store.group(coords, weight=("round client other", "float32", text))
    return Observer(groups, on_round_end=_measure if groups else None)


def _require(job: Job) -> None:
    """ValueError unless the dims of all measures have one size each, and no measure has the name of a dim."""
    sizes: dict[str, int] = {}
    for name, measure in job.algorithm.measures.items():
        where, own = f"method {job.algorithm.name!r}: its measure {name!r}", _sizes(job, measure.sizes)
        for dim in measure.dims:
            if dim == "round" or dim not in own or sizes.setdefault(dim, own[dim]) != own[dim]:
                raise ValueError(
                    f"{where} has the dims {measure.dims} with sizes {dict(measure.sizes)}, but {dim!r} must have a "
                    "size, the same in every measure, and another name than 'round'"
                )
        if len(set(measure.dims)) < len(measure.dims):
            raise ValueError(f"{where} names a dim twice: {measure.dims}. Of a matrix the second is 'other'.")
    if taken := [name for name in job.algorithm.measures if name in (*sizes, "round") or "/" in name or not name]:
        raise ValueError(
            f"method {job.algorithm.name!r}: a measure cannot be called {taken[0]!r}, as a dim or with '/'"
        )


def _sizes(job: Job, own: Any) -> dict[str, int]:
    return {"client": job.clients, "other": job.clients, "layer": len(nets.layers(job.net))} | dict(own)


def _measure(job: Job, outcome: Outcome) -> Values:
    found, clients, every = {}, outcome.context.clients, len(job.sizes)
    if not len(clients):
        return {}
    for name, value in job.hooks.measures(outcome.context).items():
        found[f"measures/{name}"] = _of_all(_array(value), job.algorithm.measures[name].dims, clients, every)
    if outcome.mixing is not None:
        found["mixing/weight"] = _of_all(_array(outcome.mixing), _OF_CLIENTS, clients, every)
    return found


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _of_all(value: np.ndarray, dims: tuple[str, ...], clients: np.ndarray, n: int) -> np.ndarray:
    """Values with rows (and columns) for all clients: NaN for inactive ones."""
    shape = [n if dim in _OF_CLIENTS else size for dim, size in zip(dims, value.shape, strict=True)]
    whole = np.full(shape, np.nan)
    whole[np.ix_(*(clients if dim in _OF_CLIENTS else np.arange(k) for dim, k in zip(dims, shape, strict=True)))] = (
        value
    )
    return whole
