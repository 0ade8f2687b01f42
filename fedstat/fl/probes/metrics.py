"""Observers of every run: scores, losses, bytes and splits. The run's layout has their groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedstat._later import torch
from fedstat.fl import communication, masks
from fedstat.fl.algorithm import SharedMask
from fedstat.fl.communication_round import Outcome
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import Job
from fedstat.fl.nets import Net
from fedstat.fl.probes.base import Observer, Values
from fedstat.fl.scores import measured, require_finite


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
    """Return bytes over all selected clients, see :func:`fedstat.fl.communication.of_round`."""
    local = torch.tensor(communication.of_round(job, outcome))
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
