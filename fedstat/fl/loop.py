"""The rounds of a run, and the observers that watch them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from fedstat.fl.cohort import of_round
from fedstat.fl.communication_round import run_round
from fedstat.fl.job import Job
from fedstat.fl.ledger import Ledger
from fedstat.fl.probes.base import Observer, Values
from fedstat.fl.state import State


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
