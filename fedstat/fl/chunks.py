"""Chunks of clients, sums over them, and the memory and disk that a run takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from fedstat._utils import check
from fedstat._utils import memory as machine
from fedstat._utils.lazy import torch, xr
from fedstat.fl import batches, nets
from fedstat.fl.job import Job
from fedstat.fl.nets import Net, Params
from fedstat.fl.ranks import joined

Result = TypeVar("Result")
# A chunk's parameters and one batch with its activations should stay in a core's cache between forward and backward.
_CHUNK_BYTES = 3.5e6
# On a GPU a chunk's parameters, gradients, optimizer state and activations get this fraction of the free memory.
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
    """Map work over spans, one span per thread; return the results in the order of the spans."""
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
                half = max(1, size // 2)
                check.warn(f"{size} clients do not fit in GPU memory; retrying with {half}. Set client_chunk={half}.")
            job.limits["client_chunk"] = size = max(1, size // 2)
            continue
        low += size


def chunks(job: Job, n: int) -> Iterator[slice]:
    """Cut n clients into chunks: ``client_chunk`` if given, else what fits a core's cache (CPU) or memory (GPU)."""
    size = job.limits.get("client_chunk") or job.compute.client_chunk
    if not n:
        return iter(())
    if size is None:
        largest = job.train.sizes.max()
        batch = min(job.batch_size or largest, largest)
        sample_size = job.train.x[0].numel() + (job.net.activations or sum(nets.layers(job.net).values()))
        weights = sum(math.prod(shape) for shape in job.net.shapes.values())
        if job.device.type == "cpu":
            client_bytes = 4 * (weights + batch * sample_size)
            cuts = math.ceil(n / max(1.0, _CHUNK_BYTES / client_bytes) / job.threads) * job.threads
            ends = [n * i // min(n, cuts) for i in range(min(n, cuts) + 1)]
            return (slice(low, high) for low, high in pairwise(ends))
        # Besides the parameters: gradient, two moments of Adam; activations once forward and once backward.
        free = torch.cuda.mem_get_info(job.device)[0]
        size = max(1, int(_GPU_SHARE * free / (4 * (4 * weights + 2 * batch * sample_size))))
    return (slice(low, min(low + size, n)) for low in range(0, n, size))


# Sums over clients are made in 1, 2, 4, 8 ... parts of at least this many entries of models. The number of parts does
# not depend on the number of threads, so that sums do not either. Larger parts come first: threads end together.
_PART = 1_000_000


def over_clients(job: Job, before: Callable[[slice], Params], after: Params) -> Mapping[str, Any]:
    """Return the algorithm's ``moments`` over clients of this process; {} if it has no such hook.

    Parameters
    ----------
    job : Job
    before : callable (slice) -> Params (client, ...)
        Parameters of some of the clients as downloaded.
    after : Params (client, ...)
        As trained.
    """

    def moments(span: slice) -> Mapping[str, Any]:
        return job.hooks.moments(lambda: before(span), {name: p[span] for name, p in after.items()})

    n = len(next(iter(after.values())))
    entries = sum(p.numel() for p in after.values())
    parts = 1 << (entries // _PART).bit_length() - 1 if entries > _PART and job.device.type == "cpu" else 1
    cut = np.array_split(np.arange(n), parts)
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in cut if len(part)]
    return joined(map_parallel(job, spans, moments))


_MODELS = 4  # copies of the selected clients' models in a round: trained, sent, aggregated or mixed, and stored
_OF_CLIENT = 400  # bytes that a run holds of every client, selected or not: scores of rounds not yet written, numbers
_FIXED = 100_000_000  # bytes that do not grow with clients, rounds or models


def samples_stay(data: xr.Dataset, memory_budget: str | int | None) -> bool:
    """Return True if x is on disk and reading it would take more than half of the rest of the memory budget."""
    if memory_budget is None or "x" not in data or not batches.on_disk(data["x"]):
        return False
    return 4 * 4 * data["x"].size > check.in_bytes("memory_budget", memory_budget) - _held_bytes(torch.device("cpu"))


def remaining_bytes(job: Job, memory_budget: str | int) -> int:
    """Return the bytes of the memory budget that a round leaves.

    Raises
    ------
    ValueError
        If a round takes more than the budget.
    """
    budget, held = check.in_bytes("memory_budget", memory_budget), _held_bytes(job.device)
    k, model = max_selected(job), _model_bytes(job.net)
    matrices = 16 * job.clients**2 if job.algorithm.mixing_weights else 0
    x = job.train.x
    read = k * int(job.train.sizes.max()) * 4 * math.prod(x.shape[1:]) if isinstance(x, batches.Stored) else 0
    at_once = min(job.compute.client_chunk or 0, job.clients)
    needed = (_MODELS * k + 2 * at_once) * model + read + _OF_CLIENT * job.clients + matrices + _FIXED
    if held + needed > budget:
        what = f"a round of {k} selected clients takes about {format_bytes(needed)}"
        if matrices:
            what += f", {format_bytes(matrices)} of it for the mixing matrix of all clients"
        raise ValueError(
            f"memory_budget={memory_budget!r} is too small: the process already holds {format_bytes(held)}, including "
            f"the data, and {what}. Give at least {format_bytes(held + needed)}, or take fewer clients per round "
            "(participation) or at a time (client_chunk), smaller models, or data that stay on disk "
            "(xarray.open_zarr, fedstat.data.open_folder)."
        )
    return budget - held - needed


def blocks(job: Job) -> list[np.ndarray]:
    """Divide all clients into blocks whose trained models fit into the memory budget; one block without a budget."""
    step = job.clients if job.room is None else max(1, job.room // (2 * _model_bytes(job.net)))
    return [np.arange(low, min(low + step, job.clients)) for low in range(0, job.clients, step)]


def require_for_all(job: Job) -> None:
    """Raise ValueError if models of all clients together do not fit into the rest of the memory budget."""
    if job.room is not None and (needed := job.clients * _model_bytes(job.net)) > job.room:
        raise ValueError(
            f"method {job.algorithm.name!r} looks at models of all {job.clients} clients before the first round. They "
            f"take {format_bytes(needed)}, but memory_budget leaves {format_bytes(max(job.room, 0))}. Raise "
            "memory_budget, or take a method that needs only sums over clients, such as fedfac with another tau than "
            "'test'."
        )


def max_selected(job: Job) -> int:
    """Return the largest number of clients selected in a round, on average of Poisson sampling."""
    share = job.participation
    return max(1, math.ceil((share[1] if isinstance(share, tuple) else share) * job.clients))


def _model_bytes(net: Net) -> int:
    return 4 * sum(math.prod(shape) for shape in net.shapes.values())


def _held_bytes(device: torch.device) -> int:
    """Return the bytes that the process holds: resident, or on the GPU."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    return machine.held()


def format_bytes(size: float) -> str:
    """Return a number of bytes in MiB or GiB."""
    return f"{size / 2**30:.3g} GiB" if size > 1e8 else f"{size / 2**20:.3g} MiB"
