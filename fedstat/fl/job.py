"""Records of a run: its settings of training and computation, and the job that combines them with data and network."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import Aggregator, weighted_mean
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.batches import Rows, part
from fedstat.fl.hooks import Hooks
from fedstat.fl.losses import SCORES, Loss, Score
from fedstat.fl.nets import Net
from fedstat.fl.optim import Optimizer, sgd
from fedstat.fl.ranks import ALONE, ProcessGroup

Precision = Literal["float32", "tf32", "bfloat16"]
Participation = float | tuple[float, float]
Sampling = Literal["fixed", "poisson"]
_SGD, _MEAN = sgd(0.1), weighted_mean()


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings that determine the results of a run; see :func:`fedstat.fl.train`."""

    optimizer: Optimizer = _SGD
    participation: Participation = 1.0
    sampling: Sampling = "fixed"
    local_epochs: int = 5
    batch_size: int | None = 32
    server_lr: float = 1.0
    aggregator: Aggregator = _MEAN
    optimizer_state: Literal["reset", "keep"] = "reset"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """Settings of the computation, which change results only by rounding; see :func:`fedstat.fl.train`.

    Raises
    ------
    ValueError
        If the device is unknown, absent or lacks the precision, or a number is not an integer >= 1.
    """

    device: str = "cpu"
    client_chunk: int | None = None
    threads: int | None = None
    precision: Precision = "float32"
    memory_budget: str | int | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu":  # checking the default would load torch
            device_named(self.device)
        for name in ("client_chunk", "threads"):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name))
        check.choice("precision", self.precision, ("float32", "tf32", "bfloat16"))
        if self.memory_budget is not None:
            check.in_bytes("memory_budget", self.memory_budget)
        if self.precision == "tf32" and device_named(self.device).type != "cuda":
            raise ValueError(f"precision='tf32' needs a CUDA device, but got device {self.device!r}. Use 'float32'.")

    def warn_if_slow(self) -> None:
        """Warn if the precision makes training slower on this CPU."""
        if self.precision == "bfloat16" and device_named(self.device).type == "cpu" and not _has_bfloat16():
            check.warn(
                "this CPU has no instructions for bfloat16 (AVX-512-BF16, AMX): training is slower and less exact than "
                "with precision='float32'. Use 'float32'."
            )


class Metrics(NamedTuple):
    """Metrics that evaluations measure, besides accuracy and loss.

    Attributes
    ----------
    names : tuple of str
        Names of :data:`fedstat.fl.metrics.METRICS` or ``ERRORS``.
    classes : array (class,)
        Classes of the data.
    labels : int array (client, class), optional
        Label of each class in the samples of each client, -1 without samples; None if clients number classes alike.
    """

    names: tuple[str, ...] = ()
    classes: np.ndarray = np.arange(0)
    labels: np.ndarray | None = None


_ONE_THREAD, _NO_METRICS = ComputeConfig(threads=1), Metrics()


@dataclass(frozen=True)
class Job(TrainConfig):
    """Data, network, algorithm and settings of a run.

    Attributes
    ----------
    train, test : Rows
        Training and test samples.
    net : Net
        The trained network; wrapped if the algorithm wraps it.
    algorithm : Algorithm
    loss : Loss
        Loss of ``net``.
    validation : Rows, optional
        Validation samples.
    everyone : int, optional
        Number of all clients, if the data hold only some of them (:func:`fedstat.fl.batches.part`).
    process_group : ProcessGroup
        Processes of the run; the data hold the clients of this process.
    own_labels : bool
        True if clients number their classes differently, so that no entry of an output layer may be shared.
    compute : ComputeConfig
        Settings of the computation; the data are already on its device.
    metrics : Metrics
        What evaluations measure besides accuracy and loss.
    client_labels : array (client,), optional
        Labels of all clients; None for the numbers from 0.
    track : bool
        If True, batch losses and the accuracy before aggregation are measured, too.
    rows_folder : Path, optional
        Folder for client rows that exceed the memory budget; without it they are in memory.
    common_rows : bool
        True if the state holds last common values of each client, see :func:`fedstat.fl.checkpoints.common_params`.
    room : int, optional
        Bytes that values of all clients may take at a time, from the memory budget.
    scaling : (array (target,), array (target,)), optional
        Mean and standard deviation by which real-valued targets were standardized; None if they were not.
    limits : dict
        Chunk size that fits the memory of a CUDA device, once a larger size did not.
    """

    train: Rows
    test: Rows
    net: Net
    algorithm: Algorithm
    loss: Loss
    validation: Rows | None = None
    everyone: int | None = None
    process_group: ProcessGroup = ALONE
    own_labels: bool = False
    compute: ComputeConfig = _ONE_THREAD
    metrics: Metrics = _NO_METRICS
    client_labels: np.ndarray | None = None
    track: bool = False
    rows_folder: Path | None = None
    common_rows: bool = False
    room: int | None = None
    scaling: tuple[np.ndarray, np.ndarray] | None = None
    limits: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def device(self) -> torch.device:
        """Device of the data and of the computation."""
        return self.train.x.device

    @property
    def threads(self) -> int:
        """Number of chunks trained in parallel on the CPU; by default the number of cores."""
        return self.compute.threads or os.cpu_count() or 1

    @property
    def clients(self) -> int:
        """Number of clients whose data this process holds."""
        return len(self.train.start) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Numbers of training samples (client,) of all clients in all processes."""
        return self.train.sizes if self.process_group.sizes is None else self.process_group.sizes

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of the algorithm that train or weight samples; their positions key random streams."""
        return self.hooks.phases

    @cached_property
    def hooks(self) -> Hooks:
        """Functions of the algorithm, with defaults and checks of the returned values."""
        private = self.aggregator.privacy is not None
        return Hooks(
            self.algorithm, self.net, len(self.sizes), self.device, self.local_epochs, self.process_group.several,
            self.own_labels, private,
        )  # fmt: skip

    @property
    def subsets(self) -> dict[str, Rows]:
        """Subsets of the data by name."""
        subsets = {"train": self.train, "test": self.test}
        return subsets if self.validation is None else subsets | {"validation": self.validation}

    @property
    def score(self) -> Score:
        """Score by which client models are judged."""
        return SCORES[self.loss.task]

    def target_scale(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation, float64 (target,), that standardized the targets; 0 and 1 if none did."""
        mean, sd = (np.zeros(1), np.ones(1)) if self.scaling is None else self.scaling
        return torch.from_numpy(mean).to(device), torch.from_numpy(sd).to(device)

    def ids(self, clients: np.ndarray) -> np.ndarray:
        """Return the numbers that key the random streams of clients."""
        return self.train.ids[clients]

    def labels(self, clients: np.ndarray) -> np.ndarray:
        """Return the labels of clients, by which messages and results name them."""
        ids = self.ids(clients)
        return ids if self.client_labels is None else self.client_labels[ids]


def of_rank(job: Job, group: ProcessGroup) -> Job:
    """Return the job of this rank's clients, with the random streams of the full job."""
    if not group.several:
        return job
    local_clients = np.arange(*group.bounds[group.rank : group.rank + 2])
    local = {name: part(rows, local_clients) for name, rows in job.subsets.items()}
    return replace(
        job,
        train=local["train"],
        test=local["test"],
        validation=local.get("validation"),
        everyone=job.clients,
        process_group=group,
    )


def device_named(name: str) -> torch.device:
    """Return a device by name; raise ValueError if it is unknown or absent."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be a name like 'cpu' or 'cuda:0', but got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be the CPU or a CUDA device, but got {name!r}. Use 'cpu' or 'cuda'.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but PyTorch sees no CUDA device. Use device='cpu'.")
    return device


def _has_bfloat16() -> bool:
    """Return True if the CPU has instructions for products of bfloat16, or if PyTorch cannot tell."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    is_supported = [getattr(torch.cpu, name)() for name in names if hasattr(torch.cpu, name)]
    return any(is_supported) or not is_supported


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid CUDA to round the factors of products and convolutions to TF32, within the context.

    PyTorch's defaults allow it for convolutions only.
    """
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = allowed
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value
