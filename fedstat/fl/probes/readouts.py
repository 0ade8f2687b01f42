"""Other ways to predict from the models after the last round: the scores that runs of those methods would have had."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedstat import store
from fedstat.fl import choice, nets
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values
from fedstat.fl.state import State


def jobs(job: Job, readouts: Mapping[str, Callable[[Algorithm], Algorithm]]) -> dict[str, Job]:
    """The job with the algorithm of each readout; ValueError if the data do not allow the choice of one."""
    found = {name: replace(job, algorithm=make(job.algorithm)) for name, make in readouts.items()}
    for one in found.values():
        choice.require(one)
    return found


def probe(job: Job, readouts: Mapping[str, Job]) -> Observer:
    """Group ``readouts``: accuracy, loss (readout, client), step (readout, client, layer)."""
    group = store.group(
        {"readout": [*readouts], "client": job.clients, "layer": [*nets.layers(job.net)]},
        accuracy=("readout client", "float32", "test accuracy"),
        loss=("readout client", "float32", "mean test loss"),
        step=("readout client layer", "float32", "B of W + B (W' − W)"),
    )

    def last(job: Job, state: State) -> Values:
        found: dict[str, list[np.ndarray]] = {name: [] for name in group.variables}
        for other in readouts.values():
            one = replace(job, algorithm=other.algorithm)
            scores = evaluate(one, state)
            step = np.asarray(scores.get("choice/step", 1.0 if one.algorithm.finetune else 0.0))
            step = step[:, None] if choice.dims(one).get("step") == ("client",) else step
            found["step"].append(np.broadcast_to(step, (one.clients, len(nets.layers(one.net)))))
            for name in ("accuracy", "loss"):
                found[name].append(scores[name])
        return {
            f"readouts/{name}": job.process_group.of_all(np.stack(values, 1)).swapaxes(0, 1)
            for name, values in found.items()
        }

    return Observer({"readouts": group}, on_end=last)
