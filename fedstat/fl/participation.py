"""Who takes part in a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat import _check, _random
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Participation

_ONE_BY_ONE = 5000  # a draw of each client's own takes 20 microseconds


def active(job: Job, number: int) -> np.ndarray:
    """Clients of the job that take part in round ``number``, ascending."""
    found = drawn(job, number)
    return found if job.train.numbers is None else np.flatnonzero(np.isin(job.train.ids, found))


def drawn(job: Job, number: int) -> np.ndarray:
    """Numbers of all clients that take part in a round, ascending: those with the smallest draws.

    Their share is ``participation`` or, if that is a range, drawn from it uniformly in every round. Of more than 5000
    clients they are drawn at once, which takes no time for the others.
    """
    everyone = job.everyone or job.clients
    k = _number(job, number, everyone)
    if k == everyone:
        return np.arange(everyone)
    if everyone > _ONE_BY_ONE:
        return np.sort(_random.generator(job.seed, "participation", number).choice(everyone, k, replace=False))
    draws = [_random.generator(job.seed, "participation", number, c).random() for c in range(everyone)]
    return np.sort(np.argsort(draws, kind="stable")[:k])


def everyone_active(job: Job, number: int) -> np.ndarray:
    """The same by descending number of training samples, of all processes of the run."""
    every = drawn(job, number)
    return every[np.argsort(-job.sizes[every], kind="stable")]


def checked(given: Any) -> Participation:
    """The given share of the clients or range of shares; ValueError if it is neither."""
    several = isinstance(given, tuple | list)
    ends = tuple(given) if several and len(given) > 1 else (given[0] if several and given else given,)
    for end in ends:
        _check.real("participation", end, low=0, open_low=True, high=1)
    if len(ends) > 2 or ends[0] > ends[-1]:
        raise ValueError(f"participation must be a share of the clients or a range (low, high), but got {given!r}")
    return (ends[0], ends[1]) if len(ends) == 2 else ends[0]


def fewest(participation: Participation, clients: int) -> int:
    """Least number of clients that take part in a round."""
    return round((participation if isinstance(participation, float | int) else participation[0]) * clients)


def _number(job: Job, number: int, clients: int) -> int:
    if not isinstance(job.participation, tuple):
        return round(job.participation * clients)
    share = _random.generator(job.seed, "participation", number).uniform(*job.participation)
    return round(share * clients)


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by descending number of training samples, so that those with batches left always come first."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]
