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
    """Return the probe of groups ``measures``, by the algorithm, and ``mixing``: weight (round, client, other).

    Weights are NaN if one of the two clients was not selected.
    """
    measures, groups = job.algorithm.measures, {}
    _require_dims(job)
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


def _require_dims(job: Job) -> None:
    """Raise ValueError unless the dims of all measures have one size each, and no measure has the name of a dim."""
    sizes: dict[str, int] = {}
    for name, measure in job.algorithm.measures.items():
        where, dims = f"method {job.algorithm.name!r}: its measure {name!r}", _sizes(job, measure.sizes)
        for dim in measure.dims:
            if dim == "round" or dim not in dims or sizes.setdefault(dim, dims[dim]) != dims[dim]:
                raise ValueError(
                    f"{where} has the dims {measure.dims} with sizes {dict(measure.sizes)}, but {dim!r} must have a "
                    "size, equal in all measures, and another name than 'round'"
                )
        if len(set(measure.dims)) < len(measure.dims):
            raise ValueError(f"{where} names a dim twice: {measure.dims}. Name the second dim of a matrix 'other'.")
    if reserved := [name for name in job.algorithm.measures if name in (*sizes, "round") or "/" in name or not name]:
        raise ValueError(
            f"method {job.algorithm.name!r}: a measure cannot be called {reserved[0]!r}, as a dim or with '/'"
        )


def _sizes(job: Job, sizes: Any) -> dict[str, int]:
    return {"client": job.clients, "other": job.clients, "layer": len(nets.layers(job.net))} | dict(sizes)


def _measure(job: Job, outcome: Outcome) -> Values:
    values, clients, n_clients = {}, outcome.context.clients, len(job.sizes)
    if not len(clients):
        return {}
    for name, value in job.hooks.measures(outcome.context).items():
        values[f"measures/{name}"] = _expand(_array(value), job.algorithm.measures[name].dims, clients, n_clients)
    if outcome.mixing is not None:
        values["mixing/weight"] = _expand(_array(outcome.mixing), _OF_CLIENTS, clients, n_clients)
    return values


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _expand(value: np.ndarray, dims: tuple[str, ...], clients: np.ndarray, n: int) -> np.ndarray:
    """Return values with rows (and columns) for all clients: NaN for clients that were not selected."""
    shape = [n if dim in _OF_CLIENTS else size for dim, size in zip(dims, value.shape, strict=True)]
    expanded = np.full(shape, np.nan)
    expanded[np.ix_(*(clients if dim in _OF_CLIENTS else np.arange(k) for dim, k in zip(dims, shape, strict=True)))] = (
        value
    )
    return expanded


def drift_probe(job: Job, rounds: int) -> Observer:
    """Return the probe of group ``drift``: distance (round, client, layer) of clients from the global model.

    The distance is ‖σ_i − σ̄‖, over the entries that are shared after the round. σ_i are a client's parameters after
    local training, σ̄ the server's after aggregation (FedDecomp Fig. 5). It is NaN for clients that were not selected,
    and 0 in a layer without shared entries.
    """
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    text = "Euclidean distance of the shared entries from the server's, before aggregation"
    group = store.group(coords, distance=("round client layer", "float32", text))
    return Observer({"drift": group}, on_round_end=_measure_drift)


def _measure_drift(job: Job, outcome: Outcome) -> Values:
    layers, clients, state = list(nets.layers(job.net)), outcome.cohort.local, outcome.state
    square = torch.zeros(len(clients), len(layers), dtype=torch.float64, device=job.device)
    for name, p in outcome.trained.params.items():
        shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, clients)
        if bool(shared.any()):
            difference = (p - state.global_params[name]) * shared
            square[:, layers.index(nets.layer_of(name))] += difference.flatten(1).square().sum(1, dtype=torch.float64)
    distance = np.full((job.clients, len(layers)), np.nan, np.float32)
    distance[clients] = square.sqrt().cpu().numpy()
    return {"drift/distance": distance}


_TEXTS = {
    "between": "sum of squares of the means of two models, trained on halves, about their fit over clients",
    "within": "sum of squares between the two models",
}


def halves_probe(job: Job, rounds: int) -> Observer:
    """Return the probe of group ``probe``: between, within (round, client, layer) of split-half training.

    See :func:`fedstat.fl.split_halves.parts`. Values are NaN in rounds without evaluation, and for clients that were
    not selected or have one sample.

    Raises
    ------
    ValueError
        If a round may select too few clients with two samples or more.
    """
    split_halves.require(job, "probe='split-half'", split_halves.least_clients(job))
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    sizes = {"n_train": ("client", job.train.sizes), "n_weights": ("layer", split_halves.n_weights(job.net))}
    group = store.group(
        coords | sizes, **{name: ("round client layer", "float64", text) for name, text in _TEXTS.items()}
    )
    return Observer({"probe": group}, on_round_start=_compare_halves, only_evaluated=True)


def _compare_halves(job: Job, state: State, cohort: Cohort) -> Values:
    divisible = cohort.at_least(2)
    clients = np.sort(divisible.ids)
    parts = split_halves.parts(job, Download(job, state), divisible, job.phases)
    layers = list(nets.layers(job.net))
    values = {f"probe/{name}": np.full((len(job.sizes), len(layers)), np.nan) for name in _TEXTS}
    for layer, part in parts.items():
        values["probe/between"][clients, layers.index(layer)] = part.between[:, 0].cpu()
        values["probe/within"][clients, layers.index(layer)] = part.within[:, 0].cpu()
    return values
