"""How good the clients' models are, and a round with its evaluation."""

from __future__ import annotations

import time

import numpy as np

from fedstat.fl import choice, engine, halves, nets, traffic
from fedstat.fl.job import Job, State, by_size, personal
from fedstat.fl.local_training import train_chunk
from fedstat.fl.nets import Params
from fedstat.fl.scores import measured


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Accuracy and mean loss of every client's personal model, inactive clients caught up: (client,).

    On the test samples, and on the validation samples (``validation_accuracy``, ``validation_loss``), where there are
    any. Methods that fine-tune do so first; those that choose say what: ``choice/step``, ``choice/finetuning``, see
    :class:`fedstat.fl.choice.Chosen`.
    """
    if job.algorithm.choice is not None:
        found, chosen = choice.evaluate(job, state)
        return found | {f"choice/{name}": getattr(chosen, name) for name in choice.dims(job)}
    clients = by_size(job.train, np.arange(job.clients))

    def models(span: slice) -> Params:
        params = personal(job, state, clients[span])
        if job.algorithm.finetune:
            train_chunk(job, params, clients[span], job.algorithm.finetune, key=("finetune", state.round))
        return params

    return measured(job, clients, models)


def timed_step(job: Job, state: State, *, full: bool = True) -> tuple[State, dict[str, np.ndarray]]:
    """A round and what is measured of it.

    Parameters
    ----------
    job : Job
    state : State
    full : bool
        Whether the models are evaluated; otherwise only what costs nothing is measured.

    Returns
    -------
    state : State
    metrics : dict of array
        ``seconds``, wall time of the round without its evaluation; if ``full``, those of :func:`evaluate`; and if the
        job tracks them, ``bytes_up`` and ``bytes_down``, over the active clients (:func:`fedstat.fl.traffic.traffic`),
        and, NaN for inactive clients, ``train_loss`` (client,), mean over the batches of the round, and,
        if ``full``, ``accuracy_before`` (client,): test accuracy of the models as they leave local training. If
        ``full`` and the job asks for it, ``probe/between`` and ``probe/within`` (client, layer), NaN for clients that
        are not active or have one sample: sums of squares of models trained on halves, see
        :func:`fedstat.fl.halves.parts`.
    """
    probed = _probe(job, state) if full and job.probe else {}
    begun, before = time.perf_counter(), state.sharing
    state, done = engine.round_of(job, state)
    seconds = time.perf_counter() - begun
    metrics = {"seconds": np.asarray(seconds), **probed}
    if job.track:
        up, down = traffic.traffic(job.algorithm, job.net, state.sharing, before, done.clients)
        metrics |= {"bytes_up": np.asarray(up), "bytes_down": np.asarray(down)}
        metrics["train_loss"] = np.full(job.clients, np.nan, np.float32)
        metrics["train_loss"][done.clients] = done.loss.cpu().numpy()
    if full:
        metrics |= evaluate(job, state)
    if full and job.track:
        left = measured(job, done.clients, lambda span: {name: p[span] for name, p in done.after.items()})
        metrics["accuracy_before"] = left["accuracy"]
    return state, metrics


def _probe(job: Job, state: State) -> dict[str, np.ndarray]:
    """Sums of squares of the active clients' models trained on halves of their samples, before the round."""
    clients = np.sort(halves.divisible(job, state.round))
    parts = halves.parts(job, state, clients, job.phases)
    layers = list(nets.layers(job.net))
    found = {f"probe/{name}": np.full((job.clients, len(layers)), np.nan) for name in ("between", "within")}
    for layer, part in parts.items():
        found["probe/between"][clients, layers.index(layer)] = part.between[:, 0].cpu()
        found["probe/within"][clients, layers.index(layer)] = part.within[:, 0].cpu()
    return found
