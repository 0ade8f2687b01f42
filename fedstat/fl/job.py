"""What decides a run, what a run is between two rounds, and how its clients are cut into chunks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstat import _random
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import Algorithm, Phase, Sharing
from fedstat.fl.batches import Rows
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net, Params
from fedstat.fl.optim import Optimizer

Precision = Literal["float32", "tf32", "bfloat16"]
Probe = Literal["halves"]

# A chunk's parameters and one batch with its activations should stay in a core's cache between forward and backward.
_CHUNK_BYTES = 3.5e6
# On a GPU: parameters, gradients, optimiser state and activations of a chunk within this share of the free memory.
_GPU_SHARE = 0.5


@dataclass(frozen=True)
class Job:
    """Everything that decides a run; see :func:`fedstat.fl.train` for what the settings mean.

    ``track`` says whether the losses of batches and the accuracy before aggregation are measured too, ``probe`` whether
    active clients are trained on halves of their samples (:mod:`fedstat.fl.halves`) before every evaluation; ``limits``
    holds the chunk size that a CUDA device was found to have memory for.
    """

    train: Rows
    test: Rows
    net: Net
    algorithm: Algorithm
    loss: Loss
    optimizer: Optimizer
    participation: float = 1.0
    local_epochs: int = 1
    batch_size: int | None = None
    server_lr: float = 1.0
    optimizer_state: Literal["reset", "keep"] = "reset"
    seed: int = 0
    client_chunk: int | None = None
    threads: int = 1
    validation: Rows | None = None
    precision: Precision = "float32"
    track: bool = False
    probe: Probe | None = None
    limits: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def device(self) -> torch.device:
        """Where the data are, and so where everything is computed."""
        return self.train.x.device

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train.start) - 1

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Stretches of local training."""
        phases = self.algorithm.phases
        return phases(self.net) if callable(phases) else phases

    @property
    def splits(self) -> dict[str, Rows]:
        """The splits of the data by name."""
        found = {"train": self.train, "test": self.test}
        return found if self.validation is None else found | {"validation": self.validation}


class State(NamedTuple):
    """A run between two rounds.

    Attributes
    ----------
    round : int
        Rounds done.
    params : Params (client, kept unit, ...)
        Clients' own copies of what may be personal; entries that are shared now are behind until they download.
    kept : mapping from name to int64 Tensor (kept unit,) or None
        Which units ``params`` holds of a parameter; None: all. Parameters that are never personal are not in it.
    server : Params (...)
        The server's copy of every entry, shared or not.
    sharing : Sharing
    optimizer : Params (client, ...)
        Clients' optimiser state; empty unless it is kept between rounds.
    """

    round: int
    params: Params
    kept: dict[str, Tensor | None]
    server: Params
    sharing: Sharing
    optimizer: Params


def device_named(name: str) -> torch.device:
    """Device of that name, or ValueError if it is unknown or absent."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be such as 'cpu' or 'cuda:0', but got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be the CPU or a CUDA device, but got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but PyTorch sees no CUDA device. Use device='cpu'.")
    return device


def personal(job: Job, state: State, clients: np.ndarray | None = None, into: Params | None = None) -> Params:
    """Clients' models as they would predict with them now: parameters (client, ...).

    Parameters
    ----------
    job : Job
    state : State
    clients : int array, optional
        All by default.
    into : Params, optional
        Where to write them.
    """
    clients = np.arange(job.clients) if clients is None else clients
    if into is None:
        into = {name: p.new_empty(len(clients), *p.shape) for name, p in state.server.items()}
    for name, p in into.items():
        if name not in state.kept:
            p.copy_(state.server[name].expand_as(p))
            continue
        own, units = _take(state.params[name], clients), state.kept[name]
        if units is not None:
            p.copy_(state.server[name].expand_as(p))
            p[:, units] = own
        elif job.algorithm.mix:  # such a server sends every client its own mixture, which is in place already
            p.copy_(own)
        else:
            shared = masks.of_clients(state.sharing.shared[name], state.server[name].ndim, clients)
            torch.where(shared, state.server[name], own, out=p)
    return into


def _take(p: Tensor, clients: np.ndarray) -> Tensor:
    """Rows of some clients; a view where they follow one another."""
    if len(clients) == clients[-1] - clients[0] + 1 and (np.diff(clients) == 1).all():
        return p[clients[0] : clients[-1] + 1]
    return p[clients]


def active(job: Job, number: int) -> np.ndarray:
    """Clients that take part in round ``number``, rising: the participation·C with the smallest draws."""
    k = round(job.participation * job.clients)
    if k == job.clients:
        return np.arange(k)
    draws = [_random.generator(job.seed, "participation", number, c).random() for c in range(job.clients)]
    return np.sort(np.argsort(draws, kind="stable")[:k])


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by falling number of training samples, so that those still at work are always the first ones."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]


def each_chunk(job: Job, n: int, work: Callable[[slice], None]) -> None:
    """Do the work for every chunk of n clients, one chunk a thread on the CPU.

    Where a CUDA device has too little memory for a chunk, the chunk is halved until it fits, for the rest of the
    run, with one warning.
    """
    if job.device.type != "cpu":
        _within_memory(job, n, work)
        return
    spans = list(chunks(job, n))
    if job.threads == 1 or len(spans) == 1:
        for span in spans:
            work(span)
        return
    with ThreadPoolExecutor(job.threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(work, spans))


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
    if size is None:
        largest = job.train.sizes.max()
        batch = min(job.batch_size or largest, largest)
        each = job.train.x[0].numel() + (job.net.activations or sum(nets.layers(job.net).values()))
        weights = sum(math.prod(shape) for shape in job.net.shapes.values())
        if job.device.type == "cpu":
            cuts = math.ceil(n / max(1.0, _CHUNK_BYTES / (4 * (weights + batch * each))) / job.threads) * job.threads
            ends = [n * i // min(n, cuts) for i in range(min(n, cuts) + 1)]
            return (slice(low, high) for low, high in pairwise(ends))
        # Beside the parameters: gradient, two moments of Adam; activations once forward and once backward.
        free = torch.cuda.mem_get_info(job.device)[0]
        size = max(1, int(_GPU_SHARE * free / (4 * (4 * weights + 2 * batch * each))))
    return (slice(low, min(low + size, n)) for low in range(0, n, size))
