"""Score, loss and metrics of the clients' models, and the fine-tuning that is selected before clients predict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import batches, cohort, nets, split_halves
from fedstat.fl.algorithm import Choice, Phase
from fedstat.fl.batches import Rows
from fedstat.fl.chunks import each_chunk
from fedstat.fl.job import Job, Metrics
from fedstat.fl.local_training import diverged, finetune
from fedstat.fl.losses import Loss
from fedstat.fl.metrics import ErrorTally, Tally, shape, tally_of
from fedstat.fl.nets import Params
from fedstat.fl.state import Download, State
from fedstat.stats import variance_components

_ADD_SAMPLES = "Set validation_fraction=0.1 (--validation-fraction 0.1), in Python train_test(..., validation=0.1)"


def measured(job: Job, clients: np.ndarray, models: Callable[[slice], Params]) -> dict[str, np.ndarray]:
    """Return scores (client, ...) of one model for each of some clients, in their order; NaN for the other clients.

    Scores are accuracy (in regression ``rmse``) and loss on the test samples, the job's metrics on them
    (:data:`fedstat.fl.metrics.METRICS`, ``ERRORS``) and, if there are validation samples, ``validation_accuracy``
    (``validation_rmse``) and ``validation_loss``.
    """
    return {name: values[:, 0] for name, values in table(job, clients, lambda span: (models(span),), 1).items()}


def table(job: Job, clients: np.ndarray, models: Callable[[slice], Iterable[Params]], n: int) -> dict[str, np.ndarray]:
    """Return scores (client, n, ...) of n models for each client, see :func:`measured`."""
    subsets = {"": job.test} | ({} if job.validation is None else {"validation_": job.validation})
    names = (job.score.name, "loss")
    shapes: dict[str, tuple[int, ...]] = {f"{of}{name}": () for of in subsets for name in names}
    shapes |= {name: shape(job, name) for name in job.metrics.names}
    columns = {name: np.full((job.clients, n, *sizes), np.nan, np.float32) for name, sizes in shapes.items()}

    def work(span: slice) -> None:
        for i, params in enumerate(models(span)):
            tally = tally_of(job, clients[span]) if job.metrics.names else None
            for of, rows in subsets.items():
                pair = scores(job, params, rows, clients[span], None if of else tally)
                for name, values in zip(names, pair, strict=True):
                    columns[of + name][clients[span], i] = values
            for name, values in tally.values().items() if tally else ():
                columns[name][clients[span], i] = values

    each_chunk(job, len(clients), work)
    return columns


def require_finite(job: Job, metrics: Mapping[str, np.ndarray], clients: np.ndarray, number: int) -> None:
    """Raise FloatingPointError, naming a client, if a mean loss is not finite."""
    for name, losses in metrics.items():
        if name.endswith("loss") and (bad := ~np.isfinite(losses[clients])).any():
            what = f"the {name.removesuffix('loss').replace('_', ' ') or 'test '}loss"
            raise diverged(job, what, bad, clients, number)


def scores(
    job: Job, params: Params, data: Rows, clients: np.ndarray, tally: Tally | ErrorTally | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return score and mean loss (client,) of stacked models on the clients' samples; ``tally`` adds them up."""
    data, clients = batches.load_clients(data, clients)
    sizes = torch.from_numpy(data.sizes[clients])
    quality, total = torch.zeros(len(clients), *data.y.shape[1:]), torch.zeros(len(clients))
    first, most = torch.from_numpy(data.start[clients]), int(sizes.max()) if len(clients) else 0
    for block in nets.sample_blocks(most):
        index = torch.arange(block.start, block.stop)
        real = (index < sizes[:, None]).to(job.device)
        rows = (first[:, None] + torch.minimum(index, sizes[:, None] - 1)).to(job.device)
        half = job.compute.precision == "bfloat16"
        with torch.no_grad(), torch.autocast(job.device.type, torch.bfloat16, enabled=half):
            out = job.net.apply(params, batches.take_rows(data.x, rows)).float()
            y = data.y[rows]
            quality += _sum_quality(job.loss, out, y, real).cpu()
            total += (job.loss.value(out, y) * real).sum(1).cpu()
            if tally is not None:
                tally.add(out, y, real)
    quality /= sizes.view(-1, *(1,) * (quality.ndim - 1))
    return score_of_means(job, quality).numpy(), (total / sizes).numpy()


def _sum_quality(loss: Loss, out: torch.Tensor, y: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return numbers of right predictions (client,); in regression sums of squared errors (client, target)."""
    predicted = loss.predict(out)
    if loss.task == "classification":
        return ((predicted == y) & real).sum(1)
    return ((predicted - y).square() * real.unsqueeze(-1)).sum(1)


def score_of_means(job: Job, quality: torch.Tensor) -> torch.Tensor:
    """Return scores (client,) of proportions of right predictions (client,) or mean squared errors (client, target)."""
    if job.loss.task == "classification":
        return quality
    return (quality.sqrt() * job.target_scale("cpu")[1].float()).mean(1)


def losses_of(
    job: Job,
    models: Params,
    clients: np.ndarray,
    which: np.ndarray | None = None,
    lacking: Params | None = None,
) -> torch.Tensor:
    """Return the mean loss (client, model) of models (model, ...) on the validation samples of some clients.

    Every pass evaluates one model per client, for all clients in a chunk together.

    Parameters
    ----------
    job : Job
    models : Params (model, ...)
    clients : int array (client,)
    which : int array (client, k), optional
        The models that each client evaluates; all by default.
    lacking : Params (client, ...), optional
        The clients' parameters that the models lack.
    """
    validation = job.validation
    if validation is None:
        raise ValueError(
            f"{job.algorithm.name} evaluates models on validation samples, but the data have none. {_ADD_SAMPLES}."
        )
    number = len(next(iter(models.values()))) if which is None else which.shape[1]
    losses = torch.empty(len(clients), number, device=job.device)

    def model_of(span: slice, i: int) -> Params:
        if which is None:
            return {name: p[i : i + 1].expand(len(clients[span]), *p.shape[1:]) for name, p in models.items()}
        return {name: p[which[span, i]] for name, p in models.items()}

    def work(span: slice) -> None:
        local = {name: p[span] for name, p in (lacking or {}).items()}
        for i in range(number):
            params = model_of(span, i) | local
            losses[span, i] = torch.from_numpy(scores(job, params, validation, clients[span])[1]).to(losses)

    each_chunk(job, len(clients), work)
    return losses


class Chosen(NamedTuple):
    """The fine-tuning that was selected.

    Attributes
    ----------
    finetuning : int array (), or (client,) if every client selects
        Position of the fine-tuning among the candidates.
    step : array (), (client,) if every client selects, or (layer,) if B is selected by layer
        B of W + B (W' − W).
    """

    finetuning: np.ndarray
    step: np.ndarray


def require_choice(job: Job) -> None:
    """Raise ValueError unless the data allow the choice of the job's algorithm."""
    choice = job.algorithm.choice
    if choice is None:
        return
    if choice.held_out == "validation" and job.validation is None:
        raise ValueError(
            f"{job.algorithm.name} selects on validation samples, but the data have none. {_ADD_SAMPLES}, or select on "
            "halves of the training samples (held_out='halves')."
        )
    if choice.by == "layer" and job.hooks.downloads_differ:
        raise ValueError(
            f"{job.algorithm.name} compares entries that all clients download alike, but its server mixes, or its "
            "on_download changes models: downloads differ between clients. Use by='pooled' or by='client'."
        )
    if choice.by == "layer" or not _selects_on_validation(job):
        split_halves.require_halves(
            job, job.algorithm.name, split_halves.least_clients(job) if choice.by == "layer" else 1
        )
        if choice.by == "client" and (lone := np.flatnonzero(job.train.sizes < 2)).size:
            single = job.labels(lone[:5]).tolist()
            raise ValueError(
                f"{job.algorithm.name} divides each client's training samples, but client(s) {single} have only one. "
                "Select for all clients together (by='pooled'), or on validation samples."
            )


def dims(job: Job) -> dict[str, tuple[str, ...]]:
    """Return the fields of :class:`Chosen` that the job's algorithm selects, with their dims."""
    if (choice := job.algorithm.choice) is None:
        return {}
    by = {"pooled": (), "client": ("client",), "layer": ("layer",)}[choice.by]
    among = {"finetuning": len(choice.finetunings), "step": 2 if choice.by == "layer" else len(choice.steps)}
    return {name: by for name, n in among.items() if n > 1}


def evaluate_choice(job: Job, download: Download) -> tuple[dict[str, np.ndarray], Chosen]:
    """Select a fine-tuning; return scores (client,) of every client's selected model, and the selection.

    For the scores see :func:`fedstat.fl.evaluate.measured`. Clients that take part in the selection score every
    candidate. In a pooled selection these are the clients of the previous round; the other clients train only the
    selected candidate.
    """
    choice, everyone = _choice_of(job), np.arange(job.clients)
    if choice.by == "layer":
        step = _steps_by_layer(job, download)
        chosen = Chosen(np.asarray(0), step)
        by_layer = dict(zip(nets.layers(job.net), step.tolist(), strict=True))
        return _score_candidate(job, download, everyone, 0, by_layer), chosen
    pooled = choice.by == "pooled"
    last = _last_cohort(job, download)
    voters = np.sort(last.local) if pooled else everyone
    all_scores = _score_candidates(job, download, voters)
    held_out = _held_out_losses(job, download, voters, all_scores)
    losses = last.sum({"": torch.from_numpy(held_out[voters].sum(0))})[""].numpy() if pooled else held_out
    best = np.argmin(np.where(np.isnan(losses), np.inf, losses), axis=-1)  # the first if several are equal
    chosen = Chosen(best // len(choice.steps), np.asarray(choice.steps)[best % len(choice.steps)])
    position = np.broadcast_to(best, everyone.shape)
    scores = {name: values[everyone, position] for name, values in all_scores.items()}
    if len(rest := np.setdiff1d(everyone, voters)):
        rest_scores = _score_candidate(job, download, rest, int(chosen.finetuning), float(chosen.step))
        for name, values in rest_scores.items():
            scores[name][rest] = values[rest]
    return scores, chosen


def _choice_of(job: Job) -> Choice:
    assert job.algorithm.choice is not None  # noqa: S101
    return job.algorithm.choice


def _selects_on_validation(job: Job) -> bool:
    return job.validation is not None and _choice_of(job).held_out != "halves"


def _last_cohort(job: Job, download: Download) -> cohort.Cohort:
    return cohort.of_round(job, max(download.state.round - 1, 0))


def _score_candidates(job: Job, download: Download, voters: np.ndarray) -> dict[str, np.ndarray]:
    """Return scores (client, candidate) of every candidate for some clients."""
    clients, steps = cohort.of_local(job, voters).local, _choice_of(job).steps

    def candidates(span: slice) -> Iterator[Params]:
        start = download.models(clients[span])
        for phases in job.hooks.finetunings:
            trained = _tune(job, download, clients[span], start, phases)
            for step in steps:
                yield _interpolate(start, trained, step)

    return table(job, clients, candidates, len(job.hooks.finetunings) * len(steps))


def _score_candidate(
    job: Job, download: Download, rows: np.ndarray, finetuning: int, step: float | dict[str, float]
) -> dict[str, np.ndarray]:
    """Return scores (client,) of one candidate for some clients."""
    clients, phases = cohort.of_local(job, rows).local, job.hooks.finetunings[finetuning]

    def models(span: slice) -> Params:
        start = download.models(clients[span])
        if step == 0:
            return start
        return _interpolate(start, _tune(job, download, clients[span], start, phases), step)

    return measured(job, clients, models)


def _tune(job: Job, download: Download, clients: np.ndarray, start: Params, phases: tuple[Phase, ...]) -> Params:
    """Return a fine-tuned copy of clients' models."""
    trained = {name: p.clone() for name, p in start.items()}
    finetune(job, download, trained, clients, phases)
    return trained


def _interpolate(start: Params, trained: Params, step: float | dict[str, float]) -> Params:
    """Return W + B (W' − W): exactly W at B = 0 and W' at B = 1."""
    steps = {name: step[nets.layer_of(name)] if isinstance(step, dict) else step for name in start}
    return {name: torch.lerp(p, trained[name], steps[name]) for name, p in start.items()}


def _held_out_losses(job: Job, download: Download, voters: np.ndarray, all_scores: dict[str, np.ndarray]) -> np.ndarray:
    """Return losses (client, candidate), summed over samples that the models were not trained on."""
    if _selects_on_validation(job):
        assert job.validation is not None  # noqa: S101
        return all_scores["validation_loss"].astype(float) * job.validation.sizes[:, None]
    voters = voters[job.train.sizes[voters] >= 2]
    first, second = split_halves.halves(job.train, voters, seed=job.seed, number=download.state.round)
    losses = np.zeros_like(all_scores["loss"], float)
    for half, other in ((first, second), (second, first)):
        crossed = replace(job, train=half, test=other, validation=None, metrics=Metrics())
        losses[voters] += (_score_candidates(crossed, download, voters)["loss"] * other.sizes[:, None])[voters]
    return losses


def _steps_by_layer(job: Job, download: Download) -> np.ndarray:
    """Return B (layer,): reliability of the differences between fine-tuned models, clipped to [0, 1]."""
    clients = _last_cohort(job, download).at_least(2)
    parts = split_halves.parts(job, download, clients, job.hooks.finetune)
    reliability = {layer: float(variance_components.components(part).reliability[0]) for layer, part in parts.items()}
    # B is 1 for personal layers, and for layers that no client changes, where B makes no difference.
    return np.nan_to_num(np.clip([reliability.get(layer, 1.0) for layer in nets.layers(job.net)], 0, 1), nan=1.0)


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Return the scores (client, ...) of every client's model; clients that were not selected download first.

    For the scores see :func:`fedstat.fl.evaluate.measured`. Methods that fine-tune do so first. Methods that select a
    fine-tuning add ``choice/step`` and ``choice/finetuning``, see :class:`fedstat.fl.evaluate.Chosen`.

    Raises
    ------
    FloatingPointError
        If a client's loss is not finite.
    """
    everyone, download = np.arange(job.clients), Download(job, state)
    if job.algorithm.choice is not None:
        metrics, chosen = evaluate_choice(job, download)
        require_finite(job, metrics, everyone, state.round)
        return metrics | {f"choice/{name}": getattr(chosen, name) for name in dims(job)}
    clients = cohort.of_local(job, everyone).local

    def models(span: slice) -> Params:
        params = download.models(clients[span])
        finetune(job, download, params, clients[span], job.hooks.finetune)
        return params

    metrics = measured(job, clients, models)
    require_finite(job, metrics, everyone, state.round)
    return metrics
