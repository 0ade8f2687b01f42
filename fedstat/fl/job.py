"""Everything that determines a run, in records that name each setting once."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import Aggregator, weighted_mean
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.batches import Rows, part
from fedstat.fl.hooks import Hooks
from fedstat.fl.losses import Loss
from fedstat.fl.nets import Net
from fedstat.fl.optim import Optimizer, sgd
from fedstat.fl.ranks import ALONE, ProcessGroup

Precision = Literal["float32", "tf32", "bfloat16"]
Participation = float | tuple[float, float]
Sampling = Literal["fixed", "poisson"]
_SGD, _MEAN = sgd(0.1), weighted_mean()


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings that determine the numbers of a run; see :func:`fedstat.fl.train`."""

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
    """Settings of how a run is computed, which change results only by rounding; see :func:`fedstat.fl.train`.

    Raises
    ------
    ValueError
        If the device is unknown, absent or lacks the precision, or a number is not an integer >= 1.
    """

    device: str = "cpu"
    client_chunk: int | None = None
    threads: int | None = None
    precision: Precision = "float32"
    memory: str | int | None = None

    def __post_init__(self) -> None:
        if self.device != "cpu":  # the CPU is there, and asking would load torch for every default
            device_named(self.device)
        for name in ("client_chunk", "threads"):
            if getattr(self, name) is not None:
                check.integer(name, getattr(self, name))
        check.choice("precision", self.precision, ("float32", "tf32", "bfloat16"))
        if self.memory is not None:
            check.in_bytes("memory", self.memory)
        if self.precision == "tf32" and device_named(self.device).type != "cuda":
            raise ValueError(f"precision='tf32' needs a CUDA device, but got device {self.device!r}. Use 'float32'.")

    def warn_if_slow(self) -> None:
        """Warn if the precision makes training slower on this CPU."""
        if self.precision == "bfloat16" and device_named(self.device).type == "cpu" and not _multiplies_bfloat16():
            check.warn(
                "this CPU has no instructions for bfloat16 (AVX-512-BF16, AMX): training is slower than with "
                "precision='float32', and less exact"
            )


_ONE_THREAD = ComputeConfig(threads=1)


@dataclass(frozen=True)
class Job(TrainConfig):
    """A run: its data, network and algorithm, and its settings.

    Attributes
    ----------
    train, test : Rows
    net : Net
        The network as trained: wrapped, if the algorithm wraps it.
    algorithm : Algorithm
    loss : Loss
        Of that network.
    validation : Rows, optional
    everyone : int, optional
        Number of all clients, if the data are those of some (:func:`fedstat.fl.batches.part`).
    process_group : ProcessGroup
        The processes of the run; the data are those of this process's clients.
    own_labels : bool
        Whether clients number their classes differently, so that no entry of an output layer may be shared.
    compute : ComputeConfig
        How it is computed; the data are on its device already.
    track : bool
        Whether batch losses and the accuracy before aggregation are measured too.
    rows_folder : Path, optional
        Folder for client rows that do not fit into the memory budget; without it they are in memory.
    room : int, optional
        Bytes that the run may take for what it holds of all clients at a time.
    limits : dict
        The chunk size found to fit a CUDA device's memory.
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
    track: bool = False
    rows_folder: Path | None = None
    room: int | None = None
    limits: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def device(self) -> torch.device:
        """Device of the data, on which everything is computed."""
        return self.train.x.device

    @property
    def threads(self) -> int:
        """Chunks trained in parallel on the CPU; by default the number of cores."""
        return self.compute.threads or os.cpu_count() or 1

    @property
    def clients(self) -> int:
        """Number of clients."""
        return len(self.train.start) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Training samples of all clients, of all processes."""
        return self.train.sizes if self.process_group.sizes is None else self.process_group.sizes

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The algorithm's phases that do something; their positions name random streams."""
        return self.hooks.phases

    @cached_property
    def hooks(self) -> Hooks:
        """The algorithm's functions, with defaults and checks of what they return."""
        private = self.aggregator.privacy is not None
        return Hooks(
            self.algorithm, self.net, len(self.sizes), self.device, self.local_epochs, self.process_group.several,
            self.own_labels, private,
        )  # fmt: skip

    @property
    def subsets(self) -> dict[str, Rows]:
        """The data's subsets by name."""
        found = {"train": self.train, "test": self.test}
        return found if self.validation is None else found | {"validation": self.validation}

    def ids(self, clients: np.ndarray) -> np.ndarray:
        """Numbers that name some clients' random streams."""
        return self.train.ids[clients]


def of_rank(job: Job, group: ProcessGroup) -> Job:
    """The part of a job that this process computes: its clients, with the numbers they have in the whole."""
    if not group.several:
        return job
    mine = np.arange(*group.bounds[group.rank : group.rank + 2])
    local = {name: part(rows, mine) for name, rows in job.subsets.items()}
    return replace(
        job,
        train=local["train"],
        test=local["test"],
        validation=local.get("validation"),
        everyone=job.clients,
        process_group=group,
    )


def device_named(name: str) -> torch.device:
    """Device of that name; ValueError if it is unknown or absent."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be a name like 'cpu' or 'cuda:0', but got {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be the CPU or a CUDA device, but got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} was asked for, but PyTorch sees no CUDA device. Use device='cpu'.")
    return device


def _multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions for products of bfloat16; taken for granted where PyTorch cannot tell."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    asked = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    answers = [ask() for ask in asked if ask is not None]
    return any(answers) or not answers


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether CUDA may round the factors of products and convolutions (the latter PyTorch's default) to TF32."""
    settings: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in settings]
    try:
        for one in settings:
            one.allow_tf32 = allowed
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            one.allow_tf32 = value
