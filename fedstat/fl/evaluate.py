"""Evaluation of the clients' models, and a round with its evaluation."""

from __future__ import annotations

import time

import numpy as np

from fedstat.fl import choice, communication, engine
from fedstat.fl.job import Job
from fedstat.fl.local_training import finetune
from fedstat.fl.nets import Params
from fedstat.fl.participation import by_size
from fedstat.fl.scores import measured, require_finite
from fedstat.fl.state import State, personal


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Accuracy and mean loss (client,) of every client's personal model; inactive clients first download.

    On the test samples and, if there are any, the validation samples (``validation_accuracy``, ``validation_loss``).
    Methods that fine-tune do so first; methods that choose add ``choice/step`` and ``choice/finetuning``, see
    :class:`fedstat.fl.choice.Chosen`.

    Raises
    ------
    FloatingPointError
        If a client's loss is not finite.
    """
    everyone = np.arange(job.clients)
    if job.algorithm.choice is not None:
        found, chosen = choice.evaluate(job, state)
        require_finite(job, found, everyone, state.round)
        return found | {f"choice/{name}": getattr(chosen, name) for name in choice.dims(job)}
    clients = by_size(job.train, everyone)

    def models(span: slice) -> Params:
        params = personal(job, state, clients[span])
        finetune(job, state, params, clients[span], job.hooks.finetune)
        return params

    found = measured(job, clients, models)
    require_finite(job, found, everyone, state.round)
    return found


def timed_step(job: Job, state: State, *, full: bool = True) -> tuple[State, dict[str, np.ndarray], engine.Round]:
    """A round and its measurements.

    Parameters
    ----------
    job : Job
    state : State
    full : bool
        Whether to evaluate the models; otherwise only what costs nothing is measured.

    Returns
    -------
    state : State
    metrics : dict of array
        ``seconds``, wall time of the round without evaluation; if ``full``, those of :func:`evaluate`. If the job
        tracks them: ``bytes_up`` and ``bytes_down``, over the active clients
        (:func:`fedstat.fl.communication.of_round`); ``train_loss`` (client,), mean over the batches of the round; and,
        if ``full``, ``accuracy_before`` (client,), test accuracy of the models as they leave local training. The last
        two are NaN for inactive clients.
    done : Round
    """
    begun, before = time.perf_counter(), state.sharing
    state, done = engine.round_of(job, state)
    seconds = time.perf_counter() - begun
    metrics, clients = {"seconds": np.asarray(seconds)}, done.uploads.clients
    if job.track:
        sent = np.asarray(communication.of_round(job, done, state, before))
        metrics |= dict(zip(("bytes_up", "bytes_down"), job.ranks.sum_of(sent), strict=True))
        metrics["train_loss"] = np.full(job.clients, np.nan, np.float32)
        metrics["train_loss"][clients] = done.loss.cpu().numpy()
    if full:
        metrics |= evaluate(job, state)
    if full and job.track:
        left = measured(job, clients, lambda span: {name: p[span] for name, p in done.uploads.after.items()})
        require_finite(job, left, clients, state.round)
        metrics["accuracy_before"] = left["accuracy"]
    return state, metrics, done
