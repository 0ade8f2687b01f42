"""The loop over rounds, and the ledger that commits them to the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedstat.fl import record
from fedstat.fl.cohort import of_round
from fedstat.fl.communication_round import run_round
from fedstat.fl.job import Job
from fedstat.fl.probes.base import Observer, Values
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
            for first, values in _stretches(rows):
                self._writer.write(name, (*self._where, slice(first, first + len(values))), np.stack(values))
        self._rows = {}


def _stretches(rows: list[tuple[int, Any]]) -> list[tuple[int, list[Any]]]:
    """Return stretches of consecutive rounds: the first round of each, and the values."""
    stretches: list[tuple[int, list[Any]]] = []
    for number, value in rows:
        if stretches and stretches[-1][0] + len(stretches[-1][1]) == number:
            stretches[-1][1].append(value)
        else:
            stretches.append((number, [value]))
    return stretches


class Ledger:
    """The store of one run, which rounds are added to and committed in.

    Parameters
    ----------
    writer : Relay
    job : Job
    by_client : set of str
        Arrays of which each of several processes adds its own clients' part.
    """

    def __init__(self, writer: Relay, job: Job, by_client: frozenset[str]) -> None:
        self._writer, self._job, self._by_client = writer, job, by_client
        self._buffer = Buffer(writer)
        self._committed = self._saved = time.monotonic()
        self._patience = _SAVE_SECONDS

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Add the values of a round."""
        group, values = self._job.process_group, dict(values)
        for name in sorted(self._by_client & values.keys()) if group.several else ():  # in one order everywhere
            values[name] = group.of_all(values[name])
        if self._writer.first:
            self._buffer.add(number, values)

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
        """Commit what is there, with the state; one of several processes does not, as the others may wait elsewhere."""
        if state.round and not self._job.process_group.several:
            self._commit(state)

    def finish(self, state: State, values: Mapping[str, Any]) -> None:
        """Write arrays that have no dim of rounds, and the state, so that the run can be made longer."""
        if self._writer.first:
            self._buffer.flush()
            for name, value in values.items():
                self._writer.write(name, (), value)
        record.save_state(self._writer, self._job, state)

    def _commit(self, state: State | None) -> None:
        if self._writer.first:
            self._buffer.flush()
        if state is not None:
            record.save_state(self._writer, self._job, state)
        self._writer.commit()
        for rows in state.rows if state is not None else ():
            rows.commit()


def run(
    job: Job,
    state: State,
    observers: Sequence[Observer],
    ledger: Ledger,
    *,
    rounds: int,
    evaluate_every: int,
    tick: Callable[[int], object],
) -> None:
    """Train to the last round, and record what observers return.

    Parameters
    ----------
    job : Job
    state : State
        To begin with; no caller should hold it, as it holds the rows of all clients.
    observers : sequence of Observer
    ledger : Ledger
    rounds : int
        Number of the last round.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    tick : callable (int)
        Called with the rounds done before, and with 1 after each round.
    """
    tick(state.round)
    try:
        while state.round < rounds:
            number = state.round + 1
            evaluated = number % evaluate_every == 0 or number == rounds
            new, values = observed_round(job, state, observers, evaluated=evaluated)
            ledger.add(number, values)
            state = new  # only now: a run that stops before this repeats the round
            del new
            tick(1)
            ledger.commit_if_due(state)
        last = [observer.on_end(job, state) for observer in observers if observer.on_end]
        ledger.finish(state, {name: value for values in last for name, value in values.items()})
    except BaseException:
        ledger.interrupt(state)
        raise


def observed_round(
    job: Job, state: State, observers: Sequence[Observer], *, evaluated: bool = True
) -> tuple[State, Values]:
    """Run a round with the clients drawn for it, and return what observers measure, and ``metrics/seconds``.

    The seconds are the wall time of the round itself.
    """
    if job.everyone is not None and not job.process_group.several:
        raise ValueError(
            f"a round needs the data of all {job.everyone} clients, but this job has {job.clients}. Take the whole job."
        )
    cohort, values = of_round(job, state.round), Values()
    watching = [one for one in observers if evaluated or not one.only_evaluated]
    for observer in watching:
        if observer.on_round_start:
            values |= observer.on_round_start(job, state, cohort)
    begun = time.perf_counter()
    outcome = run_round(job, state, cohort)
    values["metrics/seconds"] = np.asarray(time.perf_counter() - begun)
    for observer in watching:
        if observer.on_round_end:
            values |= observer.on_round_end(job, outcome)
    return outcome.state, values
