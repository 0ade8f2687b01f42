"""What shared and personal units contribute: accuracy without them (FedFac §5.5, Table 8 A)."""

from __future__ import annotations

import numpy as np

from fedstat import _random, store
from fedstat._later import torch
from fedstat.fl import cohort, masks
from fedstat.fl.chunks import each_chunk
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.probes.base import Observer
from fedstat.fl.scores import scores
from fedstat.fl.state import Download, State

PARTS = ("none", "shared", "personal", "shared, N(0, 1)", "personal, N(0, 1)")


def probe(job: Job, draws: int) -> Observer:
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
        rng = _random.generator(job.seed, "masking", draw, int(job.train.ids[c]))
        for name in names:
            noise[name][i] = torch.from_numpy(rng.standard_normal(job.net.shapes[name], dtype=np.float32))
    return noise
