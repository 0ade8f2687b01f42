"""How far clients drift in local training from the server's aggregate."""

from __future__ import annotations

import numpy as np

from fedstat import store
from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values


def probe(job: Job, rounds: int) -> Observer:
    """Group ``drift``: distance (round, client, layer), ‖σ_i − σ̄‖ of the entries that are shared after the round.

    σ_i are a client's parameters as they leave local training, σ̄ the server's after aggregation (FedDecomp Fig. 5).
    NaN for inactive clients, 0 in a layer without shared entries.
    """
    coords = {"round": range(1, rounds + 1), "client": job.clients, "layer": [*nets.layers(job.net)]}
    text = "Euclidean distance of the shared entries from the server's, before aggregation"
    group = store.group(coords, distance=("round client layer", "float32", text))
    return Observer({"drift": group}, on_round_end=_measure)


def _measure(job: Job, outcome: Outcome) -> Values:
    layers, clients, state = list(nets.layers(job.net)), outcome.cohort.local, outcome.state
    square = torch.zeros(len(clients), len(layers), dtype=torch.float64, device=job.device)
    for name, p in outcome.trained.params.items():
        shared = masks.of_clients(state.mask.shared[name], p.ndim - 1, clients)
        if bool(shared.any()):
            away = (p - state.global_params[name]) * shared
            square[:, layers.index(nets.layer_of(name))] += away.flatten(1).square().sum(1, dtype=torch.float64)
    found = np.full((job.clients, len(layers)), np.nan, np.float32)
    found[clients] = square.sqrt().cpu().numpy()
    return {"drift/distance": found}
