"""Two disjoint halves of clients' training samples: what clients learn twice is their own, the rest is noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fedstat import _random
from fedstat.fl import nets
from fedstat.fl.algorithm import Phase
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, State, active, by_size, personal
from fedstat.fl.local_training import local_training
from fedstat.fl.nets import Net
from fedstat.stats import components
from fedstat.stats.components import Parts


def halves(data: Rows, clients: np.ndarray, *, seed: int, number: int) -> tuple[Rows, Rows]:
    """Divide the samples of some clients at random; all others have none in either half.

    Parameters
    ----------
    data : Rows
    clients : int array (k,)
        With 2 samples or more each; of an odd number the first half gets one more.
    seed, number : int
        Name the stream of the division, with the client's number: the run's seed and its round.
    """
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sizes = np.zeros((2, len(data.sizes)), int)
    for c in np.sort(clients):
        shuffled = _random.generator(seed, "halves", number, int(c)).permutation(data.sizes[c]) + data.start[c]
        for i, half in enumerate(np.split(shuffled, [-(-len(shuffled) // 2)])):
            rows[i].append(half)
            sizes[i, c] = len(half)
    parts = []
    for taken, n in zip(rows, sizes, strict=True):
        at = torch.from_numpy(np.concatenate(taken)).to(data.x.device)
        parts.append(Rows(data.x[at], data.y[at], np.concatenate([[0], np.cumsum(n)])))
    return parts[0], parts[1]


def divisible(job: Job, number: int) -> np.ndarray:
    """Clients active in round ``number`` that have samples for two halves, by falling number of samples."""
    clients = by_size(job.train, active(job, number))
    return clients[job.train.sizes[clients] >= 2]


def fewest(job: Job) -> int:
    """How many clients a probe needs: one more than the straight line on their sizes takes, and a degree of freedom."""
    return 4 if len(np.unique(job.train.sizes)) > 1 else 3


def require(job: Job, what: str, least: int) -> None:
    """ValueError unless every round has as many active clients whose samples can be divided."""
    single = int((job.train.sizes < 2).sum())
    k = round(job.participation * job.clients)
    if k - single < least:
        lone = f", of which {single} of the {job.clients} clients have one training sample" if single else ""
        raise ValueError(
            f"{what} compares halves of at least {least} active clients' training samples, but {k} clients are active "
            f"in a round{lone}. Raise participation."
        )


def parts(
    job: Job, state: State, clients: np.ndarray, phases: tuple[Phase, ...], *, changes: bool = False
) -> dict[str, Parts]:
    """Train clients twice from what they download, on either half of their samples, and compare, by layer.

    Parameters
    ----------
    job : Job
    state : State
        Before the training.
    clients : int array (k,)
        See :func:`divisible`.
    phases : tuple of Phase
        The training.
    changes : bool
        Compare the changes from what each client downloaded, which differs where entries are its own, not the weights.

    Returns
    -------
    mapping from layer to Parts
        Of all trained parameters of a layer, the clients by rising number. Their numbers of samples are the covariate
        where they differ: who has more samples makes more steps, which is no knowledge.
    """
    clients = np.sort(clients)
    data = halves(job.train, clients, seed=job.seed, number=state.round)
    order = by_size(data[0], clients)
    trained = [local_training(replace(job, train=half), state, order, phases)[0] for half in data]
    rising = torch.from_numpy(np.argsort(order)).to(job.device)
    start = personal(job, state, clients) if changes else {}
    x = covariate(job.train.sizes[clients])
    found: dict[str, Parts] = {}
    for name, shape in job.net.shapes.items():
        if name in job.net.buffers:
            continue
        w = torch.stack([half[name][rising] for half in trained], 1)
        if changes:
            w -= start[name][:, None]
        part = components.parts(w.view(len(clients), 2, shape[0] if shape else 1, -1), x).pooled()
        layer = nets.layer_of(name)
        found[layer] = found[layer] + part if layer in found else part
    return found


def covariate(sizes: np.ndarray) -> np.ndarray | None:
    """Clients' numbers of samples, unless they are equal, or of all clients but one, who would be fitted by itself."""
    return sizes if np.unique(sizes, return_counts=True)[1].max() < len(sizes) - 1 else None


def n_weights(net: Net) -> list[int]:
    """Trained parameters of every layer."""
    trained = {name: shape for name, shape in net.shapes.items() if name not in net.buffers}
    return [sum(math.prod(s) for n, s in trained.items() if nets.layer_of(n) == layer) for layer in nets.layers(net)]
