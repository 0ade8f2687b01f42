"""What a method itself measures in every round, and its server's mixing matrix."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat._later import torch, xr
from fedstat.fl import nets
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values
from fedstat.store import Group, Variable

_OF_CLIENTS = ("client", "other")


def probe(job: Job, rounds: int) -> Observer:
    """Groups ``measures``, from the algorithm's ``measures``, and ``mixing``: weight (round, client, other).

    NaN where either client is inactive.
    """
    own, groups = job.algorithm.measures, {}
    _require(job)
    if own:
        sizes = {dim: n for measure in own.values() for dim, n in _sizes(job, measure.sizes).items()}
        used = {dim: np.arange(sizes[dim]) for measure in own.values() for dim in measure.dims}
        if "layer" in used:
            used["layer"] = np.array(list(nets.layers(job.net)), object)
        texts = {name: {"long_name": m.long_name, "units": m.units} for name, m in own.items()}
        variables = {
            name: Variable(("round", *m.dims), "float64", attrs={k: v for k, v in texts[name].items() if v})
            for name, m in own.items()
        }
        groups["measures"] = Group(xr.Dataset(coords={"round": np.arange(1, rounds + 1), **used}), variables)
    if job.algorithm.mix:
        every = np.arange(job.clients)
        coords = xr.Dataset(coords={"round": np.arange(1, rounds + 1), "client": every, "other": every})
        text = "weight of the other client's entries in a client's own mixture"
        weight = Variable(("round", "client", "other"), "float32", attrs={"long_name": text})
        groups["mixing"] = Group(coords, {"weight": weight})
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
