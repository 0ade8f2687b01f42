"""Processes that share a run by torch.distributed: each holds some clients, all hold the server's parameters."""

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
        This process's number.
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
        """Whether there are others."""
        return bool(self.bounds)

    @property
    def number(self) -> int:
        """Number of processes."""
        return max(1, len(self.bounds) - 1)

    def of(self, rank: int, clients: np.ndarray) -> np.ndarray:
        """Those of some clients, by number, that a process holds, in the order given."""
        return clients[(clients >= self.bounds[rank]) & (clients < self.bounds[rank + 1])]

    def holder(self, clients: np.ndarray) -> np.ndarray:
        """The process (client,) that holds each of some clients."""
        return np.searchsorted(self.bounds, clients, side="right") - 1

    def total(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums over processes."""
        if not self.several or not values:
            return values
        flat = torch.cat([p.reshape(-1) for p in values.values()])
        dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in values.values()])
        return {name: part.view(p.shape) for (name, p), part in zip(values.items(), parts, strict=True)}

    def sum_of(self, values: np.ndarray) -> np.ndarray:
        """The same of an array."""
        return self.total({"": torch.from_numpy(values)})[""].numpy() if self.several else values

    def joined(self, sums: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
        """Sums that ``+`` joins, over processes in order; {} from those that have none. Tensors come to the device."""
        if not self.several:
            return sums
        return _moved(joined(self.each(_moved(sums, torch.device("cpu")))), device)

    def each(self, value: Any) -> list[Any]:
        """What every process has, in order; small objects."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.number
        dist.all_gather_object(found, value)
        return found

    def rows(self, params: Params, counts: list[int]) -> dict[str, Tensor]:
        """Rows of all processes, one process after the other, from each one's own, of which there are ``counts``."""
        ends = np.concatenate([[0], np.cumsum(counts)])
        found = {}
        for name, p in params.items():
            found[name] = p.new_empty(int(ends[-1]), *p.shape[1:])
            for rank, (low, high) in enumerate(pairwise(ends)):
                if high > low:
                    part = found[name][low:high]
                    if rank == self.rank:
                        part.copy_(p)
                    dist.broadcast(part, src=rank)
        return found

    def clients(self, params: Params) -> dict[str, Tensor]:
        """Rows (client, ...) of all clients, from those of this process's."""
        return self.rows(params, np.diff(self.bounds).tolist()) if self.several else dict(params)

    def of_all(self, values: np.ndarray) -> np.ndarray:
        """The same of an array."""
        return (
            self.clients({"": torch.from_numpy(np.ascontiguousarray(values))})[""].numpy() if self.several else values
        )

    def agreed(self, answer: bool) -> bool:
        """The answer of process 0."""
        if not self.several:
            return answer
        found = torch.tensor([answer])
        dist.broadcast(found, src=0)
        return bool(found)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """ConnectionError where another process is gone."""
        try:
            yield
        except RuntimeError as error:
            if not self.several or not re.search(r"peer|gloo|nccl|timed out|broken pipe", str(error), re.IGNORECASE):
                raise
            raise ConnectionError("another process of this run has ended, and this one cannot go on alone") from error

    def first(self, work: Callable[[], T]) -> T | None:
        """Let process 0 work and give it the result; if it fails, all do."""
        if not self.several:
            return work()
        found, error = None, None
        if not self.rank:
            try:
                found = work()
            except Exception as raised:
                error = raised
        if (error := self.each(error)[0]) is not None:
            raise error
        return found


ALONE = ProcessGroup()


@contextmanager
def launched(device: str) -> Iterator[tuple[int, str, int | None]]:
    """The process group of a command that torchrun has started several times.

    Parameters
    ----------
    device : str
        "cpu" or "cuda".

    Yields
    ------
    rank : int
    device : str
        This process's: one GPU each.
    threads : int or None
        Its part of the machine's cores; None if the command runs alone.
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


def same(value: T) -> T:
    """The value of process 0."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def divide(sizes: np.ndarray, n: int) -> tuple[int, ...]:
    """Consecutive clients for each of n processes, with about as many samples each and at least one client.

    Examples
    --------
    >>> divide(np.array([10, 10, 10, 30]), 2), divide(np.array([60, 1, 1]), 3)
    ((0, 3, 4), (0, 1, 2, 3))
    """
    middle = np.cumsum(sizes) - sizes / 2
    wanted = np.searchsorted(middle, sizes.sum() * np.arange(n + 1) / n)
    for rank in range(1, n):
        wanted[rank] = min(max(wanted[rank], wanted[rank - 1] + 1), len(sizes) - (n - rank))
    return (*(int(bound) for bound in wanted[:-1]), len(sizes))


def begin(sizes: np.ndarray, active: int, device: torch.device, settings: Mapping[str, Any]) -> ProcessGroup:
    """The processes of this run, if torch.distributed has been initialised with several.

    Parameters
    ----------
    sizes : int array (client,)
        Training samples.
    active : int
        Least number of clients that are active in a round.
    device : torch.device
    settings : mapping
        Of the run, which must be the same everywhere.

    Raises
    ------
    ValueError
        If there are more processes than active clients, they differ in a setting, or the process group has no backend
        for the device.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ALONE
    n = dist.get_world_size()
    backends = dist.get_backend_config()
    if device.type not in str(backends):
        raise ValueError(
            f"the process group's backends, {backends}, do not serve the device {str(device)!r}. Initialise it with "
            f"'{'nccl' if device.type == 'cuda' else 'gloo'}', or start by torchrun -m fedstat.fl, which does."
        )
    if n > active:
        raise ValueError(
            f"{n} processes are more than the {active} clients that are active in a round. Start at most {active}, or "
            "let more clients take part."
        )
    found: list[Any] = [None] * n
    dist.all_gather_object(found, dict(settings))
    for rank, theirs in enumerate(found):
        differ = sorted(name for name in {*theirs, *found[0]} if theirs.get(name) != found[0].get(name))
        if differ:
            name = differ[0]
            raise ValueError(
                f"processes 0 and {rank} differ in {', '.join(differ)}: {name} is {found[0].get(name)!r} and "
                f"{theirs.get(name)!r}. Give all the same command and the same data."
            )
    return ProcessGroup(dist.get_rank(), divide(sizes, n), sizes)


def joined(sums: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums that ``+`` joins, in order; {} counts for nothing.

    Examples
    --------
    >>> joined([{"a": 1, "b": 2}, {}, {"a": 3, "b": 4}])
    {'a': 4, 'b': 6}
    """
    found = [one for one in sums if one]
    return {name: reduce(add, (one[name] for one in found)) for name in found[0]} if found else {}


def _moved(sums: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Nested records of arrays with their tensors on a device."""

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return type(value)(*map(moved, value)) if isinstance(value, tuple) else value

    return {name: moved(value) for name, value in sums.items()}


class Relay:
    """What a process writes to: the store itself in process 0, the way to it in the others.

    Parameters
    ----------
    group : ProcessGroup
    writer : Writer or None
        In process 0.
    """

    def __init__(self, group: ProcessGroup, writer: Writer | None) -> None:
        self._group, self._writer = group, writer

    def write(self, name: str, where: tuple[int | slice, ...], values: Any) -> None:
        """As :meth:`Writer.write`, within :meth:`turns`."""
        if self._writer is not None:
            self._writer.write(name, where, values)
        else:
            dist.send_object_list([(name, where, values)], dst=0)

    @contextmanager
    def turns(self) -> Iterator[None]:
        """Processes write one after the other, a region at a time."""
        yield
        if not self._group.several:
            return
        if self._writer is None:
            dist.send_object_list([None], dst=0)
            return
        for rank in range(1, self._group.number):
            while (given := _received(rank)) is not None:
                self._writer.write(*given)

    @contextmanager
    def write_state(self) -> Iterator[IO[bytes]]:
        """File for the state of this process's clients; those of all belong to the next commit."""
        others = range(1, self._group.number)
        drafts = self.told(lambda writer: [writer.journal.draft() for _ in others])
        if self._writer is None:
            with self._writer_of(drafts[self._group.rank - 1]) as file:
                yield file
            return
        with self._writer.write_state() as file:
            yield file
        entries = self._group.each(None)
        for rank in others:
            self._writer.adopt_state(rank, drafts[rank - 1], *entries[rank])

    @contextmanager
    def _writer_of(self, draft: Path) -> Iterator[IO[bytes]]:
        with journal.open_checked(draft) as file:
            yield file  # type: ignore[misc]
        self._group.each((file.size, file.crc))

    def told(self, ask: Callable[[Writer], Any]) -> Any:
        """What process 0 finds out from the store."""
        return self._group.each(ask(self._writer) if self._writer is not None else None)[0]

    def states(self) -> Sequence[Path]:
        """Files of the state that was committed last; none if the store is damaged."""
        return self.told(lambda writer: [] if writer.damaged else writer.states)

    @property
    def first(self) -> bool:
        """Whether this process writes to the store."""
        return self._writer is not None

    def finished(self) -> bool:
        """Whether the run is complete."""
        return bool(self.told(lambda writer: writer.finished))

    def commit(self) -> None:
        """Bring what was written to the disk."""
        if self._writer is not None:
            self._writer.commit()

    def finish(self) -> None:
        """Say that the run is complete; all processes wait for it."""
        self.told(lambda writer: writer.finish())


def _received(rank: int) -> Any:
    given: list[Any] = [None]
    dist.recv_object_list(given, src=rank)
    return given[0]
