"""How good the clients' models are, and a round with its evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from fedstat.fl import engine, traffic
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, State, by_size, each_chunk, personal
from fedstat.fl.local_training import train_chunk
from fedstat.fl.nets import Params

_BLOCK = 256  # samples of a client that are evaluated at a time


def evaluate(job: Job, state: State) -> dict[str, np.ndarray]:
    """Accuracy and mean loss of every client's personal model, inactive clients caught up: (client,).

    On the test samples, and accuracy on the validation samples (``validation_accuracy``), where there are any. Methods
    that fine-tune do so first.
    """
    clients = by_size(job.train, np.arange(job.clients))

    def models(span: slice) -> Params:
        chunk = clients[span]
        params = personal(job, state, chunk)
        if job.algorithm.finetune:
            train_chunk(job, params, chunk, job.algorithm.finetune, key=("finetune", state.round))
        return params

    return _scores(job, clients, models)


def _scores(job: Job, clients: np.ndarray, models: Callable[[slice], Params]) -> dict[str, np.ndarray]:
    """Scores of the models of some clients, who stand in the order given; NaN for all others."""
    found = {name: np.full(job.clients, np.nan, np.float32) for name in ("accuracy", "loss")}
    if job.validation is not None:
        found["validation_accuracy"] = found["accuracy"].copy()

    def work(span: slice) -> None:
        chunk, params = clients[span], models(span)
        found["accuracy"][chunk], found["loss"][chunk] = scores(job, params, job.test, chunk)
        if job.validation is not None:
            found["validation_accuracy"][chunk] = scores(job, params, job.validation, chunk)[0]

    each_chunk(job, len(clients), work)
    return found


def scores(job: Job, params: Params, data: Rows, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Accuracy and mean loss (client,) of stacked models on the samples of the clients of ``data``."""
    sizes = torch.from_numpy(data.sizes[clients])
    right, total = torch.zeros(len(clients)), torch.zeros(len(clients))
    first = torch.from_numpy(data.start[clients])
    for low in range(0, int(sizes.max()), _BLOCK):
        at = torch.arange(low, min(low + _BLOCK, int(sizes.max())))
        real = (at < sizes[:, None]).to(job.device)
        rows = (first[:, None] + torch.minimum(at, sizes[:, None] - 1)).to(job.device)
        with torch.no_grad(), torch.autocast(job.device.type, torch.bfloat16, enabled=job.precision == "bfloat16"):
            out = job.net.apply(params, data.x[rows]).float()
            y = data.y[rows]
            right += ((job.loss.predict(out) == y) & real).sum(1).cpu()
            total += (job.loss.value(out, y) * real).sum(1).cpu()
    return (right / sizes).numpy(), (total / sizes).numpy()


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
        if ``full``, ``accuracy_before`` (client,): test accuracy of the models as they leave local training.
    """
    begun, before = time.perf_counter(), state.split
    state, done = engine.round_of(job, state)
    seconds = time.perf_counter() - begun
    metrics = {"seconds": np.asarray(seconds)}
    if job.track:
        up, down = traffic.traffic(job.algorithm, job.net, state.split, before, done.clients)
        metrics |= {"bytes_up": np.asarray(up), "bytes_down": np.asarray(down)}
        metrics["train_loss"] = np.full(job.clients, np.nan, np.float32)
        metrics["train_loss"][done.clients] = done.loss.cpu().numpy()
    if full:
        metrics |= evaluate(job, state)
    if full and job.track:
        left = _scores(job, done.clients, lambda span: {name: p[span] for name, p in done.after.items()})
        metrics["accuracy_before"] = left["accuracy"]
    return state, metrics
