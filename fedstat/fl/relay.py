"""The store of a run that several processes share: the first one writes, the others hand it what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedstat._later import dist
from fedstat.fl.ranks import ProcessGroup
from fedstat.store import Writer, journal


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
        with journal.checked(draft) as file:
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
