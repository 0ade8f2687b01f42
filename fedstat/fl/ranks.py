"""Processes that share a run by torch.distributed: each holds some clients, all hold the global model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from fedstat._utils.lazy import dist, torch
from fedstat.store import Writer, journal

if TYPE_CHECKING:
    from torch import Tensor


Params = Mapping[str, "Tensor"]
T = TypeVar("T")


class ProcessGroup(NamedTuple):
    """The processes of a run; a single one holds all clients and sends nothing.

    Attributes
    ----------
    rank : int
        Number of this process.
    bounds : tuple of int
        Process r holds clients bounds[r] to bounds[r + 1]; empty for a single process.
    sizes : int array (client,), optional
        Training samples of all clients, of all processes.
    """

    rank: int = 0
    bounds: tuple[int, ...] = ()
    sizes: np.ndarray | None = None

    @property
    def several(self) -> bool:
        """True if there are several processes."""
        return bool(self.bounds)

    @property
    def number(self) -> int:
        """Number of processes."""
        return max(1, len(self.bounds) - 1)

    def holder(self, clients: np.ndarray) -> np.ndarray:
        """Return the process (client,) that holds each client."""
        return np.searchsorted(self.bounds, clients, side="right") - 1

    def total(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over processes."""
        if not self.several or not values:
            return values
        flat = torch.cat([p.reshape(-1) for p in values.values()])
        dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in values.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(values.items(), parts, strict=True)}

    def joined(self, sums: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
        """Join sums of all processes with ``+``, in order, on the device; processes without sums pass {}."""
        if not self.several:
            return sums
        return _move(joined(self.each(_move(sums, torch.device("cpu")))), device)

    def each(self, value: Any) -> list[Any]:
        """Gather a small object from every process, in order."""
        if not self.several:
            return [value]
        values: list[Any] = [None] * self.number
        dist.all_gather_object(values, value)
        return values

    def rows(self, params: Params, counts: list[int]) -> dict[str, Tensor]:
        """Gather rows of all processes, one process after the other; ``counts`` are their numbers of rows."""
        ends = np.concatenate([[0], np.cumsum(counts)])
        gathered = {}
        for name, p in params.items():
            gathered[name] = p.new_empty(int(ends[-1]), *p.shape[1:])
            for rank, (low, high) in enumerate(pairwise(ends)):
                if high > low:
                    part = gathered[name][low:high]
                    if rank == self.rank:
                        part.copy_(p)
                    dist.broadcast(part, src=rank)
        return gathered

    def clients(self, params: Params) -> dict[str, Tensor]:
        """Gather rows (client, ...) of all clients, from the rows of each process."""
        return self.rows(params, np.diff(self.bounds).tolist()) if self.several else dict(params)

    def of_all(self, values: np.ndarray) -> np.ndarray:
        """Gather an array (client, ...) of all clients, from the part of each process."""
        return (
            self.clients({"": torch.from_numpy(np.ascontiguousarray(values))})[""].numpy() if self.several else values
        )

    def agreed(self, answer: bool) -> bool:
        """Broadcast the answer of process 0."""
        if not self.several:
            return answer
        tensor = torch.tensor([answer])
        dist.broadcast(tensor, src=0)
        return bool(tensor)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Raise ConnectionError if another process has ended."""
        try:
            yield
        except RuntimeError as error:
            if not self.several or not re.search(r"peer|gloo|nccl|timed out|broken pipe", str(error), re.IGNORECASE):
                raise
            raise ConnectionError("a process of this run has ended, so that the others cannot continue") from error

    def first(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` in process 0 and return its result there; if it fails, all processes fail."""
        if not self.several:
            return work()
        result, error = None, None
        if not self.rank:
            try:
                result = work()
            except Exception as exception:
                error = exception
        if (error := self.each(error)[0]) is not None:
            raise error
        return result


ALONE = ProcessGroup()


@contextmanager
def launched(device: str) -> Iterator[tuple[int, str, int | None]]:
    """Start the process group of a command that torchrun has started several times.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".

    Yields
    ------
    rank : int
    device : str
        Device of this process: one GPU each.
    threads : int or None
        Number of the machine's cores for this process; None if the command runs alone.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield 0, device, None
        return
    local, beside = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda":
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield dist.get_rank(), device, max(1, (os.cpu_count() or 1) // beside)
    finally:
        dist.destroy_process_group()


def are_started() -> bool:
    """Return True if torch.distributed has been initialized in this process."""
    return dist.is_available() and dist.is_initialized()


def same(value: T) -> T:
    """Broadcast the value of process 0."""
    if not are_started():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def divide(sizes: np.ndarray, n: int) -> tuple[int, ...]:
    """Divide clients into n consecutive groups with about equal numbers of samples, and at least one client each.

    Examples
    --------
    >>> divide(np.array([10, 10, 10, 30]), 2), divide(np.array([60, 1, 1]), 3)
    ((0, 3, 4), (0, 1, 2, 3))
    """
    middle = np.cumsum(sizes) - sizes / 2
    bounds = np.searchsorted(middle, sizes.sum() * np.arange(n + 1) / n)
    for rank in range(1, n):
        bounds[rank] = min(max(bounds[rank], bounds[rank - 1] + 1), len(sizes) - (n - rank))
    return (*(int(bound) for bound in bounds[:-1]), len(sizes))


def begin(sizes: np.ndarray, n_selected: int, device: torch.device, settings: Mapping[str, Any]) -> ProcessGroup:
    """Return the processes of this run, if torch.distributed has been initialized with several.

    Parameters
    ----------
    sizes : int array (client,)
        Training samples.
    n_selected : int
        Least number of clients selected in a round.
    device : torch.device
    settings : mapping
        Settings of the run, which must be equal in all processes.

    Raises
    ------
    ValueError
        If there are more processes than selected clients, processes differ in a setting, or the process group has no
        backend for the device.
    """
    if not are_started() or dist.get_world_size() == 1:
        return ALONE
    n = dist.get_world_size()
    backends = dist.get_backend_config()
    if device.type not in str(backends):
        raise ValueError(
            f"the process group's backends, {backends}, do not serve the device {str(device)!r}. Initialize it with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}', or start by torchrun -m fedstat.fl, which does."
        )
    if n > n_selected:
        raise ValueError(
            f"{n} processes need at least {n} clients per round, but a round selects {n_selected}. Start at most "
            f"{n_selected} processes, or raise participation."
        )
    configs: list[Any] = [None] * n
    dist.all_gather_object(configs, dict(settings))
    for rank, config in enumerate(configs):
        differ = sorted(name for name in {*config, *configs[0]} if config.get(name) != configs[0].get(name))
        if differ:
            name = differ[0]
            raise ValueError(
                f"processes 0 and {rank} differ in {', '.join(differ)}: {name} is {configs[0].get(name)!r} and "
                f"{config.get(name)!r}. Start all with one command and one data set."
            )
    return ProcessGroup(dist.get_rank(), divide(sizes, n), sizes)


def joined(sums: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Join sums with ``+``, in order; skip {}.

    Examples
    --------
    >>> joined([{"a": 1, "b": 2}, {}, {"a": 3, "b": 4}])
    {'a': 4, 'b': 6}
    """
    non_empty = [part for part in sums if part]
    return {name: reduce(add, (part[name] for part in non_empty)) for name in non_empty[0]} if non_empty else {}


def _move(sums: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors in nested records of arrays to a device."""

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return type(value)(*map(move, value)) if isinstance(value, tuple) else value

    return {name: move(value) for name, value in sums.items()}


class Relay:
    """Writer of a process: process 0 writes to the store, the other processes send it their values.

    Parameters
    ----------
    group : ProcessGroup
    writer : Writer or None
        The store, in process 0; None in other processes.
    """

    def __init__(self, group: ProcessGroup, writer: Writer | None) -> None:
        self._group, self._writer = group, writer

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """Write a region as :meth:`Writer.write` does, within :meth:`turns`."""
        if self._writer is not None:
            self._writer.write(name, where, values)
        else:
            dist.send_object_list([(name, where, values)], dst=0)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Let processes write one after the other, a region at a time."""
        yield
        if not self._group.several:
            return
        if self._writer is None:
            dist.send_object_list([None], dst=0)
            return
        for rank in range(1, self._group.number):
            while (region := _receive(rank)) is not None:
                self._writer.write(*region)

    @contextmanager
    def write_state(self) -> Iterator[IO[bytes]]:
        """Open a file for the state of this process's clients; files of all processes join the next commit."""
        other_ranks = range(1, self._group.number)
        drafts = self.ask_first(lambda writer: [writer.journal.draft() for _ in other_ranks])
        if self._writer is None:
            with self._writer_of(drafts[self._group.rank - 1]) as file:
                yield file
            return
        with self._writer.write_state() as file:
            yield file
        entries = self._group.each(None)
        for rank in other_ranks:
            self._writer.adopt_state(rank, drafts[rank - 1], *entries[rank])

    @contextmanager
    def _writer_of(self, draft: Path) -> Iterator[IO[bytes]]:
        with journal.open_checked(draft) as file:
            yield file  # type: ignore[misc]
        self._group.each((file.size, file.crc))

    def ask_first(self, ask: Callable[[Writer], Any]) -> Any:
        """Return the answer that process 0 gets from the store."""
        return self._group.each(ask(self._writer) if self._writer is not None else None)[0]

    def states(self) -> Sequence[Path]:
        """Return the files of the state that was committed last; none if the store is damaged."""
        return self.ask_first(lambda writer: [] if writer.damaged else writer.states)

    @property
    def first(self) -> bool:
        """True if this process writes to the store."""
        return self._writer is not None

    def finished(self) -> bool:
        """Return True if the run is complete."""
        return bool(self.ask_first(lambda writer: writer.finished))

    def commit(self) -> None:
        """Bring what was written to the disk."""
        if self._writer is not None:
            self._writer.commit()

    def finish(self) -> None:
        """Mark the run as complete; all processes wait for this."""
        self.ask_first(lambda writer: writer.finish())


def _receive(rank: int) -> Any:
    values: list[Any] = [None]
    dist.recv_object_list(values, src=rank)
    return values[0]
