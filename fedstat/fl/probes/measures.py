"""Probes: measures of the algorithm, drift of clients, and training on each half of the samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets, split_halves
from fedstat.fl.cohort import Cohort
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.probes import Observer, Values
from fedstat.fl.state import Download, State

_OF_CLIENTS = ("client", "other")


def measures_probe(job: Job, rounds: int) -> Observer:
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
    return Observer(groups, on_round_end=_measures if groups else None)


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


def _measures(job: Job, outcome: Outcome) -> Values:
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


def drift_probe(job: Job, rounds: int) -> Observer:
    """Group ``drift``: distance (round, client, layer), ‖σ_i − σ̄‖ of the entries that are shared after the round.

    σ_i are a client's parameters as they leave local training, σ̄ the server's after aggregation (FedDecomp Fig. 5).
    NaN for inactive clients, 0 in a layer without shared entries.
    """
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    text = "Euclidean distance of the shared entries from the server's, before aggregation"
    group = store.group(coords, distance=("round client layer", "float32", text))
    return Observer({"drift": group}, on_round_end=_drift)


def _drift(job: Job, outcome: Outcome) -> Values:
    layers, clients, state = list(nets.layers(job.net)), outcome.cohort.local, outcome.state
    square = torch.zeros(len(clients), len(layers), dtype=torch.float64, device=job.device)
    for name, p in outcome.trained.params.items():
        shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, clients)
        if bool(shared.any()):
            away = (p - state.global_params[name]) * shared
            square[:, layers.index(nets.layer_of(name))] += away.flatten(1).square().sum(1, dtype=torch.float64)
    found = np.full((job.clients, len(layers)), np.nan, np.float32)
    found[clients] = square.sqrt().cpu().numpy()
    return {"drift/distance": found}


_TEXTS = {
    "between": "sum of squares of the means of two models, trained on halves, about their fit over clients",
    "within": "sum of squares between the two models",
}


def halves_probe(job: Job, rounds: int) -> Observer:
    """Group ``probe``: between, within (round, client, layer), see :func:`fedstat.fl.split_halves.parts`.

    NaN in rounds without evaluation, and for clients that are inactive or have one sample.

    Raises
    ------
    ValueError
        If a round may have too few active clients with two samples or more.
    """
    split_halves.require(job, "probe='halves'", split_halves.least_clients(job))
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    sizes = {"n_train": ("client", job.train.sizes), "n_weights": ("layer", split_halves.n_weights(job.net))}
    group = store.group(
        coords | sizes, **{name: ("round client layer", "float64", text) for name, text in _TEXTS.items()}
    )
    return Observer({"probe": group}, on_round_start=_halves, only_evaluated=True)


def _halves(job: Job, state: State, cohort: Cohort) -> Values:
    some = cohort.at_least(2)
    clients = np.sort(some.ids)
    parts = split_halves.parts(job, Download(job, state), some, job.phases)
    layers = list(nets.layers(job.net))
    found = {f"probe/{name}": np.full((len(job.sizes), len(layers)), np.nan) for name in _TEXTS}
    for layer, part in parts.items():
        found["probe/between"][clients, layers.index(layer)] = part.between[:, 0].cpu()
        found["probe/within"][clients, layers.index(layer)] = part.within[:, 0].cpu()
    return found
