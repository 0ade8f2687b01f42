"""Split-half training: separate client effects from noise by training on two halves of each client's samples."""

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
from fedstat.stats.variance_components import SumsOfSquares


def halves(data: Rows, clients: np.ndarray, *, seed: int, number: int) -> tuple[Rows, Rows]:
    """Divide the samples of some clients into random halves; other clients have no samples in either half.

    Parameters
    ----------
    data : Rows
    clients : int array (k,)
        Clients with 2 samples or more. The first half of an odd number gets the additional sample.
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
    for pieces, n in zip(rows, sizes, strict=True):
        index = torch.from_numpy(np.concatenate([np.empty(0, int), *pieces])).to(data.x.device)
        start = np.concatenate([[0], np.cumsum(n)])
        parts.append(Rows(batches.select_samples(data.x, index), data.y[index], start, data.numbers))
    return parts[0], parts[1]


def least_clients(job: Job) -> int:
    """Return the least number of clients for a probe: two plus the parameters of its fit.

    The fit has a mean and, if numbers of samples differ, a slope.
    """
    return 4 if len(np.unique(job.train.sizes)) > 1 else 3


def require_halves(job: Job, purpose: str, least: int) -> None:
    """Raise ValueError unless every round selects ``least`` clients with two training samples or more."""
    single = int((job.train.sizes < 2).sum())
    k = fewest(job.participation, job.clients, job.sampling)
    if k - single < least:
        detail = f", and {single} of the {job.clients} clients have only one training sample" if single else ""
        raise ValueError(
            f"split-half training ({purpose}) needs at least {least} selected clients, but a round selects {k}"
            f"{detail}. Raise clients or participation."
        )


def trained(
    job: Job, download: Download, cohort: Cohort, phases: tuple[Phase, ...]
) -> tuple[Params, np.ndarray | None]:
    """Train clients twice from one download, once on each half of their samples.

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
        Numbers of samples, if they differ: clients with more samples take more steps, which is no client effect.
    """
    data = halves(job.train, cohort.local, seed=job.seed, number=download.state.round)
    both = [train_locally(replace(job, train=half), download, cohort.local, phases).params for half in data]
    ascending = torch.from_numpy(np.argsort(cohort.local)).to(job.device)
    names = [name for name in job.net.shapes if name not in job.net.buffers]
    models = {name: torch.stack([half[name][ascending] for half in both], 1) for name in names}
    return cohort.gather(models, np.sort(cohort.ids)), covariate(cohort.sizes[np.argsort(cohort.ids)])


def parts(job: Job, download: Download, cohort: Cohort, phases: tuple[Phase, ...]) -> dict[str, SumsOfSquares]:
    """Compare models of :func:`trained`, by layer: sums of squares over the entries that all clients download alike.

    Personal entries are omitted, and so are layers that have no other entries. Both halves of these start from what the
    client learned before, including noise, so that their agreement shows nothing.
    """
    if job.hooks.downloads_differ:  # every client downloads a separate model
        return {}
    models, x = trained(job, download, cohort, phases)
    by_layer: dict[str, SumsOfSquares] = {}
    for name, w in models.items():
        alike = masks.by_all(download.state.mask.shared[name], w.ndim - 2)
        if not bool(alike.any()):
            continue
        w *= alike
        part = variance_components.parts(w.view(*w.shape[:3], -1) if w.ndim > 2 else w[..., None, None], x).pooled()
        layer = nets.layer_of(name)
        by_layer[layer] = by_layer[layer] + part if layer in by_layer else part
    return by_layer


def bytes_sent(n_weights: int, n_layers: int, sizes: np.ndarray) -> tuple[int, int]:
    """Return the bytes that a probe uploads and downloads, summed over its clients, in addition to the usual download.

    Upload: the mean of a client's two models (n_weights float32), then its ``between`` and ``within`` (two float32 per
    layer). Download: the fit over clients that ``between`` needs, their mean and, if sizes differ, the slope. The
    server needs only sums over clients, of the means and of the means times sizes.
    """
    fits = 1 if covariate(sizes) is None else 2
    return 4 * len(sizes) * (n_weights + 2 * n_layers), 4 * len(sizes) * fits * n_weights


def covariate(sizes: np.ndarray) -> np.ndarray | None:
    """Return clients' numbers of samples; None if all, or all but one, are equal: it would fit one client exactly."""
    return sizes if np.unique(sizes, return_counts=True)[1].max() < len(sizes) - 1 else None


def n_weights(net: Net) -> list[int]:
    """Return the number of trained parameters of each layer."""
    trained = {name: shape for name, shape in net.shapes.items() if name not in net.buffers}
    return [sum(math.prod(s) for n, s in trained.items() if nets.layer_of(n) == layer) for layer in nets.layers(net)]
