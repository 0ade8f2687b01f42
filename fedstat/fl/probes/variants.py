"""Probes of other models: with units masked, and under other prediction rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from fedstat import store
from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import cohort, masks, nets
from fedstat.fl import evaluate as _evaluate
from fedstat.fl.algorithm import Algorithm
from fedstat.fl.chunks import each_chunk
from fedstat.fl.evaluate import evaluate
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.probes.base import Observer, Values
from fedstat.fl.scores import scores
from fedstat.fl.state import Download, State

PARTS = ("none", "shared", "personal", "shared, N(0, 1)", "personal, N(0, 1)")


def ablation_probe(job: Job, draws: int) -> Observer:
    """Group ``ablation``: accuracy (part, draw, client), see :func:`ablated_accuracy`."""
    coords = {"part": [*PARTS], "draw": draws, "client": job.clients}
    return Observer(
        {"ablation": store.group(coords, accuracy=("part draw client", "float32", "test accuracy"))},
        on_end=lambda job, state: {"ablation/accuracy": ablated_accuracy(job, state, draws=draws)},
    )


def ablated_accuracy(job: Job, state: State, *, draws: int) -> np.ndarray:
    """Test accuracy (part, draw, client) with random values in place of one part of the split layers.

    Parameters
    ----------
    job, state
        A run; its personal models are evaluated without further training.
    draws : int
        Number of draws of random values, separate for each client.

    Returns
    -------
    array (part, draw, client)
        By ``PARTS``: nothing replaced; the shared or the personal units' parameters replaced by normal values with the
        standard deviation of that client's parameter; the same with standard normal values, as in the published code.
        Without a split layer all parts are equal.
    """
    found = np.full((len(PARTS), draws, job.clients), np.nan, np.float32)
    split = [n for n, mask in state.mask.shared.items() if bool(mask.any()) and not bool(mask.all())]
    split = [name for name in split if name not in job.net.buffers]
    clients = cohort.of_local(job, np.arange(job.clients)).local

    def work(span: slice) -> None:
        chunk = clients[span]
        params = Download(job, state).models(chunk)
        found[0, :, chunk] = scores(job, params, job.test, chunk)[0][:, None]
        for draw in range(draws):
            noise = _noise(job, split, params, chunk, draw)
            for i, part in enumerate(PARTS[1:], 1):
                wanted = part.startswith("shared")
                own = 1.0 if part.endswith("N(0, 1)") else None
                changed = dict(params)
                for name in split:
                    p = params[name]
                    sd = own or p.flatten(1).std(1, correction=0).view(-1, *(1,) * (p.ndim - 1))
                    shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, chunk)
                    changed[name] = torch.where(shared == wanted, noise[name] * sd, p)
                found[i, draw, chunk] = scores(job, changed, job.test, chunk)[0]

    each_chunk(job, job.clients, work)
    return job.process_group.of_all(found.T).T


def _noise(job: Job, names: list[str], params: Params, clients: np.ndarray, draw: int) -> Params:
    """Standard normal values in the shape of some parameters, each client's from its own stream."""
    noise = {name: torch.empty_like(params[name]) for name in names}
    for i, c in enumerate(clients):
        rng = streams.generator(job.seed, "masking", draw, int(job.train.ids[c]))
        for name in names:
            noise[name][i] = torch.from_numpy(rng.standard_normal(job.net.shapes[name], dtype=np.float32))
    return noise


def jobs(job: Job, readouts: Mapping[str, Callable[[Algorithm], Algorithm]]) -> dict[str, Job]:
    """The job with the algorithm of each readout; ValueError if the data do not allow the choice of one."""
    found = {name: replace(job, algorithm=make(job.algorithm)) for name, make in readouts.items()}
    for one in found.values():
        _evaluate.require(one)
    return found


def readouts_probe(job: Job, readouts: Mapping[str, Job]) -> Observer:
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
            step = step[:, None] if _evaluate.dims(one).get("step") == ("client",) else step
            found["step"].append(np.broadcast_to(step, (one.clients, len(nets.layers(one.net)))))
            for name in ("accuracy", "loss"):
                found[name].append(scores[name])
        return {
            f"readouts/{name}": job.process_group.of_all(np.stack(values, 1)).swapaxes(0, 1)
            for name, values in found.items()
        }

    return Observer({"readouts": group}, on_end=last)
