"""Observers of every run: scores, losses, bytes and the split."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Mask, SharedMask
from fedstat.fl.communication_round import Outcome
from fedstat.fl.evaluate import evaluate
from fedstat.fl.hooks import Hooks
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.probes import Observer, Values
from fedstat.fl.scores import measured, require_finite
from fedstat.fl.state import Download

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

    def sent() -> Params:
        return cohort.local_rows(upload.values) if upload.cohort is cohort else upload.values

    values = sent, lambda: Download(job, state).models(cohort.local)
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
    """Bytes that the active clients send and receive in a round, in total.

    Parameters
    ----------
    hooks : Hooks
    uploaded : Mask
        Entries that a client sends: those that the new mask shares (for any client, if masks differ between them),
        or what ``algorithm.uploads`` names (dynamic FedFac: all of the layers Λ, as its analysis reads every unit
        before deciding which to share).
    mask, previous : SharedMask
        After and before the round.
    clients : int array (active,)
    values : pair of callable () -> Params (active, ...), optional
        What is sent and received; needed if the algorithm sends ``sparse`` parameters.
    downloads : int array (active,), optional
        Number of models that each client downloads; one by default.

    Returns
    -------
    up : int
        The entries that the server needs from each client.
    down : int
        The round's result: the entries that the new mask shares for the client and, in whole bytes, the new mask
        of each layer where it changed for the client: one bit per unit, or per entry where masks are finer than units.

    Notes
    -----
    One download per participation. Not counted: what precedes round 1 (the common start, the same for every method,
    and static FedFac's one upload of the layers Λ), and what a transport adds or compresses. A sparse parameter counts
    its non-zero entries and, to say where they are, one bit per entry.

    Examples
    --------
    >>> import torch
    >>> from fedstat.fl import algorithms, nets
    >>> net, one = nets.mlp([3, 4, 2]), np.array([0])  # 16 + 10 entries
    >>> hooks = Hooks(algorithms.fedsplit({}), net, clients=1)
    >>> some, all_ = ({"fc1": torch.tensor([True, second, False, False])} for second in (False, True))
    >>> a, b = (SharedMask(masks.units(net, flags, torch.device("cpu"))) for flags in (some, all_))
    >>> in_bytes(hooks, b.shared, b, b, one), in_bytes(hooks, b.shared, b, a, one)
    ((72, 72), (72, 73))
    """
    net, changed = hooks.net, 0
    if mask.shared is not previous.shared:
        changed = sum(_changed(net, mask.shared, previous.shared, layer, clients) for layer in nets.layers(net))
    receivers = clients if downloads is None else np.repeat(clients, downloads)
    sent = _of_entries(hooks, uploaded, clients, 0, values)
    return sent, _of_entries(hooks, mask.shared, receivers, 1, values) + changed


def _of_entries(hooks: Hooks, mask: Mask, clients: np.ndarray, way: int, values: tuple[Models, Models] | None) -> int:
    """Bytes of the entries that a mask picks for some clients, in total."""
    net, sparse = hooks.net, hooks.sparse()
    total = _BYTES * entries(net, mask, clients, leave_out=sparse)
    if sparse:
        assert values is not None  # noqa: S101
        found = values[way]()
        for name in sparse:
            picked = masks.of_clients(mask[name], len(net.shapes[name]), clients).expand_as(found[name]).flatten(1)
            total += _BYTES * int(((found[name].flatten(1) != 0) & picked).sum())
            total += sum(math.ceil(n / 8) for n in picked.sum(1).tolist())
    return total


def entries(net: Net, mask: Mask, clients: np.ndarray, *, leave_out: Sequence[str] = ()) -> int:
    """Number of entries that a mask picks for some clients, in total."""
    total = 0
    for name, shape in net.shapes.items():
        if name in leave_out or not len(clients):
            continue
        own = masks.of_clients(mask[name], len(shape), clients)
        total += int(own.sum()) * (len(clients) * math.prod(shape) // own.numel())
    return total


def _changed(net: Net, new: Mask, old: Mask, layer: str, clients: np.ndarray) -> int:
    """Bytes that tell a layer's new mask to the clients for whom it changed."""
    names = [name for name in net.shapes if nets.layer_of(name) == layer]
    changed, bits, by_unit = torch.zeros(len(clients), dtype=torch.bool, device=masks.device_of(new)), 0, True
    for name in names:
        rank = len(net.shapes[name])
        differs = masks.of_clients(new[name] != old[name], rank, clients)
        changed = changed | (differs.reshape(len(differs), -1).any(1) if differs.ndim > rank else differs.any())
        one = new[name].shape[-rank:] if new[name].ndim else ()
        bits += math.prod(one)
        by_unit &= math.prod(one[-(rank - 1) :] if rank > 1 else ()) == 1
    return int(changed.sum()) * math.ceil((nets.layers(net)[layer] if by_unit else bits) / 8)


def observers(layers: Sequence[str]) -> list[Observer]:
    """Return the observers of every run; ``layers`` are those whose split is recorded."""
    sent, loss = Observer(on_round_end=_bytes), Observer(on_round_end=_train_loss)
    return [sent, loss, scores(), Observer(on_round_end=_accuracy_before, only_evaluated=True), split(layers)]


def scores() -> Observer:
    """Return the observer of the scores of all clients' models, see :func:`fedstat.fl.evaluate.evaluate`."""
    return Observer(on_round_end=_scores, only_evaluated=True)


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
        for name, of in (("icc", mask.icc), ("decided", mask.decided)):
            if layer in of:
                values[f"{group}/{name}"] = of[layer]
    return values


def _scores(job: Job, outcome: Outcome) -> Values:
    metrics = evaluate(job, outcome.state)
    return {name if "/" in name else f"metrics/{name}": values for name, values in metrics.items()}


def _bytes(job: Job, outcome: Outcome) -> Values:
    """Return bytes over all selected clients, see :func:`fedstat.fl.probes.metrics.of_round`."""
    local = torch.tensor(of_round(job, outcome))
    up, down = outcome.cohort.sum({"bytes": local})["bytes"].numpy()
    return {"metrics/bytes_up": up, "metrics/bytes_down": down}


def _train_loss(job: Job, outcome: Outcome) -> Values:
    """Return the mean over the batches of the round (client,); NaN for clients that were not selected."""
    loss = np.full(job.clients, np.nan, np.float32)
    loss[outcome.cohort.local] = outcome.trained.loss.cpu().numpy()
    return {"metrics/train_loss": loss}


def _accuracy_before(job: Job, outcome: Outcome) -> Values:
    """Return test accuracy (client,) of models as they leave local training; NaN for clients that were not selected."""
    clients, params = outcome.cohort.local, outcome.trained.params
    metrics = measured(job, clients, lambda span: {name: p[span] for name, p in params.items()})
    require_finite(job, metrics, clients, outcome.state.round)
    return {"metrics/accuracy_before": metrics["accuracy"]}
