"""Whole rounds, and the models that clients download."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstat.fl.cohort import Cohort, of_round
from fedstat.fl.communication_round import round_context, run_round
from fedstat.fl.job import ComputeConfig
from fedstat.fl.loop import observed_round, start
from fedstat.fl.probes import measures
from fedstat.fl.state import Download

__all__ = ["active", "context", "in_chunks", "measured", "models", "run", "settings", "start", "step"]


def settings(**given):
    """Settings of a job, with one thread if none is given; those of ComputeConfig are put into one."""
    compute = {name: given.pop(name) for name in ComputeConfig.__dataclass_fields__ if name in given}
    return given | {"compute": ComputeConfig(**{"threads": 1} | compute)}


def in_chunks(job, client_chunk):
    """Return the job with so many clients at a time, in one thread."""
    return replace(job, compute=ComputeConfig(client_chunk=client_chunk, threads=1))


def active(job, number):
    """Return rows of the clients that take part in a round, in ascending order."""
    return np.sort(of_round(job, number).local)


def run(job, state):
    """Return the state after a round, and its outcome."""
    outcome = run_round(job, state, of_round(job, state.round))
    return outcome.state, outcome


def step(job, state):
    return run(job, state)[0]


def measured(job, state, *, evaluated=True):
    """Return the state after a round, and the metrics of every run by name."""
    new, values = observed_round(job, state, measures.observers([]), evaluated=evaluated)
    return new, {name.removeprefix("metrics/"): value for name, value in values.items()}


def context(job, state, clients):
    """Return the round context of clients that have not trained, in the order given."""
    download, cohort = Download(job, state), Cohort(job.ids(clients), job.train.sizes[clients], clients)
    return round_context(job, download, cohort, download.models(clients))


def models(job, state, clients=None):
    return Download(job, state).models(clients)
