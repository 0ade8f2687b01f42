"""How personal layers are beyond noise: active clients also trained on each half of their samples."""

from __future__ import annotations

import numpy as np

from fedstat import store
from fedstat.fl import halves, nets
from fedstat.fl.cohort import Cohort
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values
from fedstat.fl.state import Download, State

_TEXTS = {
    "between": "sum of squares of the means of two models, trained on halves, about their fit over clients",
    "within": "sum of squares between the two models",
}


def probe(job: Job, rounds: int) -> Observer:
    """Group ``probe``: between, within (round, client, layer), see :func:`fedstat.fl.halves.parts`.

    NaN in rounds without evaluation, and for clients that are inactive or have one sample.

    Raises
    ------
    ValueError
        If a round may have too few active clients with two samples or more.
    """
    halves.require(job, "probe='halves'", halves.fewest(job))
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    sizes = {"n_train": ("client", job.train.sizes), "n_weights": ("layer", halves.n_weights(job.net))}
    group = store.group(
        coords | sizes, **{name: ("round client layer", "float64", text) for name, text in _TEXTS.items()}
    )
    return Observer({"probe": group}, on_round_start=_measure, only_evaluated=True)


def _measure(job: Job, state: State, cohort: Cohort) -> Values:
    some = cohort.at_least(2)
    clients = np.sort(some.ids)
    parts = halves.parts(job, Download(job, state), some, job.phases)
    layers = list(nets.layers(job.net))
    found = {f"probe/{name}": np.full((len(job.sizes), len(layers)), np.nan) for name in _TEXTS}
    for layer, part in parts.items():
        found["probe/between"][clients, layers.index(layer)] = part.between[:, 0].cpu()
        found["probe/within"][clients, layers.index(layer)] = part.within[:, 0].cpu()
    return found
