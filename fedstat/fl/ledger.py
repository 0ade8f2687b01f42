"""The ledger, which commits finished rounds of a run to its store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedstat.fl import record
from fedstat.fl.checkpoints import WeightsWriter
from fedstat.fl.job import Job
from fedstat.fl.ranks import Relay
from fedstat.fl.state import State
from fedstat.store import Target

_COMMIT_SECONDS = 1.0
_SAVE_SECONDS = 20.0
# Saving the state takes no more than this fraction of a run's time.
_SAVE_FRACTION = 0.02


class Buffer:
    """Finished rounds of one run that are not on disk yet.

    Parameters
    ----------
    writer : Target
    where : tuple of int
        Position of the run in a store of many runs, () in a store of its own.
    """

    def __init__(self, writer: Target, where: tuple[int, ...] = ()) -> None:
        self._writer, self._where = writer, where
        self._rows: dict[str, list[tuple[int, Any]]] = {}

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Add values by "group/variable" of a round, numbered from 1."""
        for name, value in values.items():
            self._rows.setdefault(name, []).append((number - 1, value))

    def flush(self) -> None:
        """Write the rounds added since the last flush."""
        for name, rows in self._rows.items():
            for first, values in _consecutive(rows):
                self._writer.write(name, (*self._where, slice(first, first + len(values))), np.stack(values))
        self._rows = {}


def _consecutive(rows: list[tuple[int, Any]]) -> list[tuple[int, list[Any]]]:
    """Divide rounds into blocks of consecutive rounds; return each block's first round and its values."""
    blocks: list[tuple[int, list[Any]]] = []
    for number, value in rows:
        if blocks and blocks[-1][0] + len(blocks[-1][1]) == number:
            blocks[-1][1].append(value)
        else:
            blocks.append((number, [value]))
    return blocks


class Ledger:
    """The store of one run: rounds are added to a buffer and committed to the store.

    Parameters
    ----------
    writer : Relay
    job : Job
    by_client : set of str
        Arrays of which each of several processes adds the part of its clients.
    weights : WeightsWriter
    """

    def __init__(self, writer: Relay, job: Job, by_client: frozenset[str], weights: WeightsWriter) -> None:
        self._writer, self._job, self._by_client, self._weights = writer, job, by_client, weights
        self._buffer = Buffer(writer)
        self._committed = self._saved = time.monotonic()
        self._patience = _SAVE_SECONDS

    def add(self, number: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the values of a round, and return them, of all clients."""
        group, values = self._job.process_group, dict(values)
        for name in sorted(self._by_client & values.keys()) if group.several else ():  # in equal order in all processes
            values[name] = group.of_all(values[name])
        if self._writer.first:
            self._buffer.add(number, values)
        return values

    def commit_if_due(self, state: State) -> None:
        """Commit about once a second; save the state now and then."""
        now = time.monotonic()
        saves = self._job.process_group.agreed(now - self._saved > self._patience)
        if now - self._committed > _COMMIT_SECONDS or saves:
            self._commit(state if saves else None)
            self._committed = time.monotonic()
            if saves:
                self._saved = self._committed
                self._patience = max(_SAVE_SECONDS, (self._committed - now) / _SAVE_FRACTION)

    def interrupt(self, state: State) -> None:
        """Commit the finished rounds, with the state and the weights of clients.

        One of several processes does not commit, as the other processes may be waiting elsewhere.
        """
        if state.round and not self._job.process_group.several:
            self._commit(state, self._weights.last_weights(self._job, state))

    def finish(self, state: State, values: Mapping[str, Any], *, early: bool = False) -> None:
        """Write arrays that have no dim of rounds, and the state, so that the run can be extended.

        ``early`` is True if the run ends before its last planned round, so that its last weights have no checkpoint.
        """
        if self._writer.first:
            self._buffer.flush()
            for name, value in values.items():
                self._writer.write(name, (), value)
        weights = self._weights.last_weights(self._job, state) if early else {}
        record.save_state(self._writer, self._job, state, weights)

    def _commit(self, state: State | None, weights: Mapping[str, Any] = {}) -> None:
        if self._writer.first:
            self._buffer.flush()
        if state is not None:
            record.save_state(self._writer, self._job, state, weights)
        self._writer.commit()
        for rows in state.rows if state is not None else ():
            rows.commit()
