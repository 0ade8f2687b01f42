"""Training on two disjoint halves of clients' samples: what a client learns from both is its own, the rest noise."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from fedstat._utils import streams
from fedstat._utils.lazy import torch
from fedstat.fl import batches, masks, nets
from fedstat.fl.algorithm import Phase
from fedstat.fl.batches import Rows
from fedstat.fl.cohort import Cohort, fewest
from fedstat.fl.job import Job
from fedstat.fl.local_training import train_locally
from fedstat.fl.nets import Net, Params
from fedstat.fl.state import Download
from fedstat.stats import variance_components
from fedstat.stats.variance_components import Parts


def halves(data: Rows, clients: np.ndarray, *, seed: int, number: int) -> tuple[Rows, Rows]:
    """Divide the samples of some clients into random halves; the other clients have none in either.

    Parameters
    ----------
    data : Rows
    clients : int array (k,)
        Clients with 2 samples or more. The first half of an odd number gets one more.
    seed, number : int
        Seed and round of the run; with the client's number they name the random stream of the division.
    """
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    sizes = np.zeros((2, len(data.sizes)), int)
    for c in np.sort(clients):
        shuffled = (
            streams.generator(seed, "halves", number, int(data.ids[c])).permutation(data.sizes[c]) + data.start[c]
        )
        for i, half in enumerate(np.split(shuffled, [-(-len(shuffled) // 2)])):
            rows[i].append(half)
            sizes[i, c] = len(half)
    parts = []
    for taken, n in zip(rows, sizes, strict=True):
        at = torch.from_numpy(np.concatenate([np.empty(0, int), *taken])).to(data.x.device)
        parts.append(
            Rows(batches.some_samples(data.x, at), data.y[at], np.concatenate([[0], np.cumsum(n)]), data.numbers)
        )
    return parts[0], parts[1]


def least_clients(job: Job) -> int:
    """Least number of clients for a probe: two more than the parameters of its fit (mean; slope if sizes differ)."""
    return 4 if len(np.unique(job.train.sizes)) > 1 else 3


def require(job: Job, what: str, least: int) -> None:
    """ValueError unless every round has ``least`` active clients with two training samples or more."""
    single = int((job.train.sizes < 2).sum())
    k = fewest(job.participation, job.clients, job.sampling)
    if k - single < least:
        lone = f", and {single} of the {job.clients} clients have only one training sample" if single else ""
        raise ValueError(
            f"{what} compares halves of at least {least} active clients' training samples, but {k} clients are active "
            f"in a round{lone}. Take more clients, a higher participation, or more samples."
        )


def trained(
    job: Job, download: Download, cohort: Cohort, phases: tuple[Phase, ...]
) -> tuple[Params, np.ndarray | None]:
    """Train clients twice from the same download, once on each half of their samples.

    Parameters
    ----------
    job : Job
    download : Download
    cohort : Cohort
        Clients with 2 samples or more.
    phases : tuple of Phase

    Returns
    -------
    models : Params (client, 2, ...)
        By ascending client number, of all processes; without buffers.
    covariate : array (client,) or None
        Numbers of samples, if they differ: clients with more take more steps, which is not knowledge.
    """
    data = halves(job.train, cohort.local, seed=job.seed, number=download.state.round)
    both = [train_locally(replace(job, train=half), download, cohort.local, phases).params for half in data]
    ascending = torch.from_numpy(np.argsort(cohort.local)).to(job.device)
    names = [name for name in job.net.shapes if name not in job.net.buffers]
    models = {name: torch.stack([half[name][ascending] for half in both], 1) for name in names}
    return cohort.gather(models, np.sort(cohort.ids)), covariate(cohort.sizes[np.argsort(cohort.ids)])


def parts(job: Job, download: Download, cohort: Cohort, phases: tuple[Phase, ...]) -> dict[str, Parts]:
    """Compare models of :func:`trained`, by layer: sums of squares over the entries that all clients download alike.

    A client's own entries are left out, and so are layers that have no others: both halves start from what the client
    learnt before, noise included, so agreement between them shows nothing.
    """
    if job.hooks.downloads_differ:  # every client downloads a model of its own
        return {}
    models, x = trained(job, download, cohort, phases)
    found: dict[str, Parts] = {}
    for name, w in models.items():
        alike = masks.by_all(download.state.mask.shared[name], w.ndim - 2)
        if not bool(alike.any()):
            continue
        w *= alike
        part = variance_components.parts(w.view(*w.shape[:3], -1) if w.ndim > 2 else w[..., None, None], x).pooled()
        layer = nets.layer_of(name)
        found[layer] = found[layer] + part if layer in found else part
    return found


def bytes_sent(n_weights: int, n_layers: int, sizes: np.ndarray) -> tuple[int, int]:
    """Bytes that a probe sends up and down, summed over its clients, beyond the usual download.

    Up: the mean of a client's two models (n_weights float32), then its ``between`` and ``within`` (two float32 a
    layer). Down: the fit over clients that ``between`` needs, their mean and, if sizes differ, the slope. The server
    needs only sums over clients, of the means and of the means times sizes.
    """
    fits = 1 if covariate(sizes) is None else 2
    return 4 * len(sizes) * (n_weights + 2 * n_layers), 4 * len(sizes) * fits * n_weights


def covariate(sizes: np.ndarray) -> np.ndarray | None:
    """Clients' numbers of samples; None if all or all but one are equal, as a lone client would be fitted exactly."""
    return sizes if np.unique(sizes, return_counts=True)[1].max() < len(sizes) - 1 else None


def n_weights(net: Net) -> list[int]:
    """Number of trained parameters of each layer."""
    trained = {name: shape for name, shape in net.shapes.items() if name not in net.buffers}
    return [sum(math.prod(s) for n, s in trained.items() if nets.layer_of(n) == layer) for layer in nets.layers(net)]
