"""Evaluation of the clients' models, and the fine-tuning that is selected before clients predict."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import cohort, nets, split_halves
from fedstat.fl.algorithm import Choice, Phase
from fedstat.fl.job import Job
from fedstat.fl.local_training import finetune
from fedstat.fl.nets import Params
from fedstat.fl.scores import measured, require_finite, table
from fedstat.fl.state import Download, State
from fedstat.stats import variance_components


class Chosen(NamedTuple):
    """What was chosen.

    Attributes
    ----------
    finetuning : int array (), or (client,) where every client chooses
        Position of the fine-tuning among the candidates.
    step : array (), (client,) where every client chooses, or (layer,) where B is chosen by layer
        B of W + B (W' − W).
    """

    finetuning: np.ndarray
    step: np.ndarray


def require(job: Job) -> None:
    """ValueError unless the data allow the choice that the job's algorithm asks for."""
    choice = job.algorithm.choice
    if choice is None:
        return
    if choice.held_out == "validation" and job.validation is None:
        raise ValueError(
            f"{job.algorithm.name} chooses on validation samples, but the data have none. Give some (validation=0.1), "
            "or choose on halves of the training samples (held_out='halves')."
        )
    if choice.by == "layer" and job.hooks.downloads_differ:
        raise ValueError(
            f"{job.algorithm.name} compares by layer what all clients download alike, but its server mixes, or its "
            "clients receive: each downloads a model of its own. Choose by='pooled' or by='client'."
        )
    if choice.by == "layer" or not _on_validation(job):
        split_halves.require(job, job.algorithm.name, split_halves.least_clients(job) if choice.by == "layer" else 1)
        if choice.by == "client" and (lone := np.flatnonzero(job.train.sizes < 2)).size:
            raise ValueError(
                f"{job.algorithm.name} divides each client's training samples, but client(s) {lone[:5].tolist()} have "
                "only one. Choose for all clients together (by='pooled'), or on validation samples."
            )


def dims(job: Job) -> dict[str, tuple[str, ...]]:
    """Fields of :class:`Chosen` that the job's algorithm chooses, with their dims."""
    if (choice := job.algorithm.choice) is None:
        return {}
    by = {"pooled": (), "client": ("client",), "layer": ("layer",)}[choice.by]
    among = {"finetuning": len(choice.finetunings), "step": 2 if choice.by == "layer" else len(choice.steps)}
    return {name: by for name, n in among.items() if n > 1}


def evaluate_choice(job: Job, download: Download) -> tuple[dict[str, np.ndarray], Chosen]:
    """Scores (client,) of every client's chosen model, see :func:`fedstat.fl.scores.measured`, and the choice.

    Clients that take part in the choice score every candidate. In a pooled choice these are the clients that were
    active in the previous round; the others train only the chosen candidate.
    """
    choice, everyone = _of(job), np.arange(job.clients)
    if choice.by == "layer":
        step = _steps_by_layer(job, download)
        chosen = Chosen(np.asarray(0), step)
        return _alone(job, download, everyone, 0, dict(zip(nets.layers(job.net), step.tolist(), strict=True))), chosen
    pooled = choice.by == "pooled"
    last = _last_cohort(job, download)
    voters = np.sort(last.local) if pooled else everyone
    found = _together(job, download, voters)
    held = _held(job, download, voters, found)
    losses = last.sum({"": torch.from_numpy(held[voters].sum(0))})[""].numpy() if pooled else held
    best = np.argmin(np.where(np.isnan(losses), np.inf, losses), axis=-1)  # the first if several are equal
    chosen = Chosen(best // len(choice.steps), np.asarray(choice.steps)[best % len(choice.steps)])
    at = np.broadcast_to(best, everyone.shape)
    scores = {name: values[everyone, at] for name, values in found.items()}
    if len(rest := np.setdiff1d(everyone, voters)):
        others = _alone(job, download, rest, int(chosen.finetuning), float(chosen.step))
        for name, values in others.items():
            scores[name][rest] = values[rest]
    return scores, chosen


def _of(job: Job) -> Choice:
    assert job.algorithm.choice is not None  # noqa: S101
    return job.algorithm.choice


def _on_validation(job: Job) -> bool:
    return job.validation is not None and _of(job).held_out != "halves"


def _last_cohort(job: Job, download: Download) -> cohort.Cohort:
    return cohort.of_round(job, max(download.state.round - 1, 0))


def _together(job: Job, download: Download, voters: np.ndarray) -> dict[str, np.ndarray]:
    """Scores (client, candidate) of every candidate for some clients."""
    clients, steps = cohort.of_local(job, voters).local, _of(job).steps

    def candidates(span: slice) -> Iterator[Params]:
        start = download.models(clients[span])
        for phases in job.hooks.finetunings:
            trained = _trained(job, download, clients[span], start, phases)
            for step in steps:
                yield _between(start, trained, step)

    return table(job, clients, candidates, len(job.hooks.finetunings) * len(steps))


def _alone(
    job: Job, download: Download, some: np.ndarray, finetuning: int, step: float | dict[str, float]
) -> dict[str, np.ndarray]:
    """Scores (client,) of one candidate for some clients."""
    clients, phases = cohort.of_local(job, some).local, job.hooks.finetunings[finetuning]

    def models(span: slice) -> Params:
        start = download.models(clients[span])
        return start if step == 0 else _between(start, _trained(job, download, clients[span], start, phases), step)

    return measured(job, clients, models)


def _trained(job: Job, download: Download, clients: np.ndarray, start: Params, phases: tuple[Phase, ...]) -> Params:
    trained = {name: p.clone() for name, p in start.items()}
    finetune(job, download, trained, clients, phases)
    return trained


def _between(start: Params, trained: Params, step: float | dict[str, float]) -> Params:
    """W + B (W' − W): exactly W at 0 and W' at 1."""
    steps = {name: step[nets.layer_of(name)] if isinstance(step, dict) else step for name in start}
    return {name: torch.lerp(p, trained[name], steps[name]) for name, p in start.items()}


def _held(job: Job, download: Download, voters: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
    """Losses (client, candidate) summed over samples that the models were not trained on."""
    if _on_validation(job):
        assert job.validation is not None  # noqa: S101
        return found["validation_loss"].astype(float) * job.validation.sizes[:, None]
    voters = voters[job.train.sizes[voters] >= 2]
    first, second = split_halves.halves(job.train, voters, seed=job.seed, number=download.state.round)
    held = np.zeros_like(found["loss"], float)
    for own, other in ((first, second), (second, first)):
        crossed = replace(job, train=own, test=other, validation=None)
        held[voters] += (_together(crossed, download, voters)["loss"] * other.sizes[:, None])[voters]
    return held


def _steps_by_layer(job: Job, download: Download) -> np.ndarray:
    """B (layer,): share of the differences between fine-tuned models that is the clients' own, clipped to [0, 1]."""
    clients = _last_cohort(job, download).at_least(2)
    parts = split_halves.parts(job, download, clients, job.hooks.finetune)
    share = {layer: float(variance_components.components(part).personal[0]) for layer, part in parts.items()}
    # B is 1 for a client's own layers, and for layers that no client changes, where it makes no difference.
    return np.nan_to_num(np.clip([share.get(layer, 1.0) for layer in nets.layers(job.net)], 0, 1), nan=1.0)


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Accuracy and mean loss (client,) of every client's personal model; inactive clients first download.

    On the test samples and, if there are any, the validation samples (``validation_accuracy``, ``validation_loss``).
    Methods that fine-tune do so first; methods that choose add ``choice/step`` and ``choice/finetuning``, see
    :class:`fedstat.fl.evaluate.Chosen`.

    Raises
    ------
    FloatingPointError
        If a client's loss is not finite.
    """
    everyone, download = np.arange(job.clients), Download(job, state)
    if job.algorithm.choice is not None:
        found, chosen = evaluate_choice(job, download)
        require_finite(job, found, everyone, state.round)
        return found | {f"choice/{name}": getattr(chosen, name) for name in dims(job)}
    clients = cohort.of_local(job, everyone).local

    def models(span: slice) -> Params:
        params = download.models(clients[span])
        finetune(job, download, params, clients[span], job.hooks.finetune)
        return params

    found = measured(job, clients, models)
    require_finite(job, found, everyone, state.round)
    return found
