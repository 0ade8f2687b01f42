"""Chunks of clients: each is one tensor program; chunks run in parallel, and sums over clients are joined."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.ranks import joined

Result = TypeVar("Result")
# A chunk's parameters and one batch with its activations should stay in a core's cache between forward and backward.
_CHUNK_BYTES = 3.5e6
# On a GPU a chunk's parameters, gradients, optimiser state and activations get this share of the free memory.
_GPU_SHARE = 0.5


def each_chunk(job: Job, n: int, work: Callable[[slice], None]) -> None:
    """Do the work for every chunk of n clients; on the CPU, one chunk per thread.

    If a CUDA device has too little memory, chunks are halved until they fit, for the rest of the run, with one
    warning. Without clients there is no work.
    """
    if n == 0:
        return
    if job.device.type != "cpu":
        _within_memory(job, n, work)
        return
    map_parallel(job, list(chunks(job, n)), work)


def map_parallel(job: Job, spans: Sequence[slice], work: Callable[[slice], Result]) -> list[Result]:
    """What the work gives for every span, in their order; one span per thread."""
    if job.threads == 1 or len(spans) <= 1:
        return [work(span) for span in spans]
    with ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, spans))


def _within_memory(job: Job, n: int, work: Callable[[slice], None]) -> None:
    low, size = 0, 0
    while low < n:
        size = size or next(chunks(job, n)).stop
        try:
            work(slice(low, min(low + size, n)))
        except torch.OutOfMemoryError:
            if size == 1:
                raise
            torch.cuda.empty_cache()
            if "client_chunk" not in job.limits:
                warnings.warn(f"the GPU's memory does not hold {size} clients at a time: taking fewer", stacklevel=2)
            job.limits["client_chunk"] = size = max(1, size // 2)
            continue
        low += size


def chunks(job: Job, n: int) -> Iterator[slice]:
    """Cut n clients into chunks: ``client_chunk`` if given, else what fits a core's cache (CPU) or memory (GPU)."""
    size = job.limits.get("client_chunk") or job.client_chunk
    if not n:
        return iter(())
    if size is None:
        largest = job.train.sizes.max()
        batch = min(job.batch_size or largest, largest)
        each = job.train.x[0].numel() + (job.net.activations or sum(nets.layers(job.net).values()))
        weights = sum(math.prod(shape) for shape in job.net.shapes.values())
        if job.device.type == "cpu":
            cuts = math.ceil(n / max(1.0, _CHUNK_BYTES / (4 * (weights + batch * each))) / job.threads) * job.threads
            ends = [n * i // min(n, cuts) for i in range(min(n, cuts) + 1)]
            return (slice(low, high) for low, high in pairwise(ends))
        # Besides the parameters: gradient, two moments of Adam; activations once forward and once backward.
        free = torch.cuda.mem_get_info(job.device)[0]
        size = max(1, int(_GPU_SHARE * free / (4 * (4 * weights + 2 * batch * each))))
    return (slice(low, min(low + size, n)) for low in range(0, n, size))


# Clients are summed in parts of at least so many entries of models, 1, 2, 4, 8 ..., whatever the number of threads, so
# that the same sums are joined; larger parts come first, so that threads end together.
_PART = 1_000_000


def over_clients(job: Job, before: Callable[[slice], Params], after: Params) -> Mapping[str, Any]:
    """Return the algorithm's ``moments`` over clients of this process; none if it asks for none.

    Parameters
    ----------
    job : Job
    before : callable (slice) -> Params (client, ...)
        Parameters of some of the clients as downloaded.
    after : Params (client, ...)
        As trained.
    """

    def some(span: slice) -> Mapping[str, Any]:
        return job.hooks.moments(lambda: before(span), {name: p[span] for name, p in after.items()})

    n = len(next(iter(after.values())))
    entries = sum(p.numel() for p in after.values())
    parts = 1 << (entries // _PART).bit_length() - 1 if entries > _PART and job.device.type == "cpu" else 1
    cut = np.array_split(np.arange(n), parts)
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in cut if len(part)]
    return joined(map_parallel(job, spans, some))
