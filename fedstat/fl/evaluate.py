"""Evaluation of the clients' models."""

from __future__ import annotations

import numpy as np

from fedstat.fl import choice, cohort
from fedstat.fl.job import Job
from fedstat.fl.local_training import finetune
from fedstat.fl.nets import Params
from fedstat.fl.scores import measured, require_finite
from fedstat.fl.state import Download, State


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
    everyone, download = np.arange(job.clients), Download(job, state)
    if job.algorithm.choice is not None:
        found, chosen = choice.evaluate(job, download)
        require_finite(job, found, everyone, state.round)
        return found | {f"choice/{name}": getattr(chosen, name) for name in choice.dims(job)}
    clients = cohort.of_local(job, everyone).local

    def models(span: slice) -> Params:
        params = download.models(clients[span])
        finetune(job, download, params, clients[span], job.hooks.finetune)
        return params

    found = measured(job, clients, models)
    require_finite(job, found, everyone, state.round)
    return found
