"""Observers of every run (scores, losses, bytes, the split), and probes: measures, drift, split-half training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedstat import store
from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets, split_halves
from fedstat.fl.algorithm import Mask, SharedMask
from fedstat.fl.cohort import Cohort
from fedstat.fl.communication_round import Outcome
from fedstat.fl.evaluate import evaluate, measured, require_finite
from fedstat.fl.hooks import Hooks
from fedstat.fl.job import Job, Metrics
from fedstat.fl.nets import Net, Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.state import Download, State

_BYTES = 4  # of a float32 entry
Models = Callable[[], Params]


def of_round(job: Job, outcome: Outcome) -> tuple[int, int]:
    """Return the bytes that this process's clients of a round sent and received, in total; see :func:`in_bytes`."""
    cohort, upload, state = outcome.cohort, outcome.upload, outcome.state
    if not len(cohort):
        return 0, 0
    downloads = job.hooks.downloads(outcome.context, cohort.local_ids)  # in every process: the hook may gather rows
    if not len(cohort.local):
        return 0, 0

    values = lambda: upload.visible.local_rows(upload.values), lambda: Download(job, state).models(cohort.local)
    masks_of = upload.entries, state.mask, outcome.before.mask
    return in_bytes(job.hooks, *masks_of, cohort.local, values, downloads)


def in_bytes(
    hooks: Hooks,
    uploaded: Mask,
    mask: SharedMask,
    previous: SharedMask,
    clients: np.ndarray,
    values: tuple[Models, Models] | None = None,
    downloads: np.ndarray | None = None,
) -> tuple[int, int]:
    """Return the bytes that the selected clients send and receive in a round, in total.

    Parameters
    ----------
    hooks : Hooks
    uploaded : Mask
        Entries that a client sends: all entries that the new mask shares for any client, or the algorithm's
        ``upload_mask``. Dynamic FedFac sends all entries of the layers Λ, as its analysis reads every unit before it
        decides.
    mask, previous : SharedMask
        The mask after and before the round.
    clients : int array (selected,)
    values : pair of callable () -> Params (selected, ...), optional
        Values sent and received; needed if the algorithm sends ``sparse`` parameters.
    downloads : int array (selected,), optional
        Number of models that each client downloads; one by default.

    Returns
    -------
    up : int
        The entries that the server needs from each client.
    down : int
        The result of the round: the entries that the new mask shares for the client and, in whole bytes, the new mask
        of each layer in which it changed for the client: one bit per unit, or per entry if masks are finer than units.

    Notes
    -----
    A client downloads once in every round in which it is selected. Not counted are messages before round 1 (the initial
    parameters, equal for every method, and static FedFac's one upload of the layers Λ), and bytes that a transport adds
    or saves. A sparse parameter counts its non-zero entries and one bit per entry, which gives their positions.

    Examples
    --------
    >>> import torch
    >>> from fedstat.fl import algorithms, nets
    >>> net, client = nets.mlp([3, 4, 2]), np.array([0])  # 16 + 10 entries
    >>> hooks = Hooks(algorithms.fedsplit({}), net, clients=1)
    >>> old, new = ({"fc1": torch.tensor([True, second, False, False])} for second in (False, True))
    >>> a, b = (SharedMask(masks.units(net, flags, torch.device("cpu"))) for flags in (old, new))
    >>> in_bytes(hooks, b.shared, b, b, client), in_bytes(hooks, b.shared, b, a, client)
    ((72, 72), (72, 73))
    """
    net, changed = hooks.net, 0
    if mask.shared is not previous.shared:
        changed = sum(_count_mask(net, mask.shared, previous.shared, layer, clients) for layer in nets.layers(net))
    receivers = clients if downloads is None else np.repeat(clients, downloads)
    sent = _count_bytes(hooks, uploaded, clients, 0, values)
    return sent, _count_bytes(hooks, mask.shared, receivers, 1, values) + changed


def _count_bytes(hooks: Hooks, mask: Mask, clients: np.ndarray, side: int, values: tuple[Models, Models] | None) -> int:
    """Return the bytes of the entries that a mask marks for some clients, in total."""
    net, sparse = hooks.net, hooks.sparse()
    total = _BYTES * entries(net, mask, clients, leave_out=sparse)
    if sparse:
        assert values is not None  # noqa: S101
        params = values[side]()
        for name in sparse:
            marked = masks.of_clients(mask[name], len(net.shapes[name]), clients).expand_as(params[name]).flatten(1)
            total += _BYTES * int(((params[name].flatten(1) != 0) & marked).sum())
            total += sum(math.ceil(n / 8) for n in marked.sum(1).tolist())
    return total


def entries(net: Net, mask: Mask, clients: np.ndarray, *, leave_out: Sequence[str] = ()) -> int:
    """Return the number of entries that a mask marks for some clients, in total."""
    total = 0
    for name, shape in net.shapes.items():
        if name in leave_out or not len(clients):
            continue
        client_mask = masks.of_clients(mask[name], len(shape), clients)
        total += int(client_mask.sum()) * (len(clients) * math.prod(shape) // client_mask.numel())
    return total


def _count_mask(net: Net, new: Mask, old: Mask, layer: str, clients: np.ndarray) -> int:
    """Return the bytes that send a layer's new mask to the clients for whom it changed."""
    names = [name for name in net.shapes if nets.layer_of(name) == layer]
    changed, bits, by_unit = torch.zeros(len(clients), dtype=torch.bool, device=masks.device_of(new)), 0, True
    for name in names:
        rank = len(net.shapes[name])
        differs = masks.of_clients(new[name] != old[name], rank, clients)
        changed = changed | (differs.reshape(len(differs), -1).any(1) if differs.ndim > rank else differs.any())
        entry_shape = new[name].shape[-rank:] if new[name].ndim else ()
        bits += math.prod(entry_shape)
        by_unit &= math.prod(entry_shape[-(rank - 1) :] if rank > 1 else ()) == 1
    return int(changed.sum()) * math.ceil((nets.layers(net)[layer] if by_unit else bits) / 8)


def observers(layers: Sequence[str]) -> list[Observer]:
    """Return the observers of every run; the split of ``layers`` is stored."""
    sent, loss = Observer(on_round_end=_measure_bytes), Observer(on_round_end=_measure_train_loss)
    return [sent, loss, scores(), Observer(on_round_end=_measure_before, only_evaluated=True), split(layers)]


def scores() -> Observer:
    """Return the observer of the scores of all clients' models, see :func:`fedstat.fl.evaluate.evaluate`."""
    return Observer(on_round_end=lambda job, outcome: measure_scores(job, outcome.state), only_evaluated=True)


def split(layers: Sequence[str]) -> Observer:
    """Return the observer of the split of some layers."""
    return Observer(on_round_end=lambda job, outcome: of_sharing(job.net, outcome.state.mask, layers))


def of_sharing(net: Net, mask: SharedMask, layers: Sequence[str]) -> Values:
    """Return the split of some layers, and the statistics behind it."""
    values: Values = {}
    for layer in layers:
        group = f"split/{layer}"
        values[f"{group}/shared"] = masks.shared_units(net, mask.shared, layer).cpu().numpy()
        if (fit := mask.fits.get(layer)) is not None:
            for name in ("communality", "n_factors", "n_iter", "converged"):
                values[f"{group}/{name}"] = torch.as_tensor(getattr(fit, name)).cpu().numpy()
        for name, by_layer in (("icc", mask.icc), ("decided", mask.decided)):
            if layer in by_layer:
                values[f"{group}/{name}"] = by_layer[layer]
    return values


def measure_scores(job: Job, state: State) -> Values:
    """Return the scores of all clients' models, see :func:`fedstat.fl.evaluate.evaluate`."""
    metrics = evaluate(job, state)
    return {name if "/" in name else f"metrics/{name}": values for name, values in metrics.items()}


def _measure_bytes(job: Job, outcome: Outcome) -> Values:
    """Return bytes over all selected clients, see :func:`fedstat.fl.probes.measures.of_round`."""
    local = torch.tensor(of_round(job, outcome))
    up, down = outcome.cohort.sum({"bytes": local})["bytes"].numpy()
    return {"metrics/bytes_up": up, "metrics/bytes_down": down}


def _measure_train_loss(job: Job, outcome: Outcome) -> Values:
    """Return the mean over the batches of the round (client,); NaN for clients that were not selected."""
    loss = np.full(job.clients, np.nan, np.float32)
    loss[outcome.cohort.local] = outcome.trained.loss.cpu().numpy()
    return {"metrics/train_loss": loss}


def _measure_before(job: Job, outcome: Outcome) -> Values:
    """Return the test score (client,) of models after local training; NaN for clients that were not selected."""
    clients, params = outcome.cohort.local, outcome.trained.params
    job = replace(job, metrics=Metrics())
    metrics = measured(job, clients, lambda span: {name: p[span] for name, p in params.items()})
    require_finite(job, metrics, clients, outcome.state.round)
    return {f"metrics/{job.score.name}_before": metrics[job.score.name]}


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
    split_halves.require_halves(job, "probe='split-half'", split_halves.least_clients(job))
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
