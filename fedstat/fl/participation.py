"""Who takes part in a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat import _check, _random
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Participation, Sampling


def active(job: Job, number: int) -> np.ndarray:
    """Clients that take part in round ``number``, ascending: a fixed number of them, those with the smallest draws.

    Their share is ``participation`` or, if that is a range, drawn from it uniformly in every round. With Poisson
    sampling each client takes part with that probability, whatever the others do: there may be none.
    """
    everyone, share = job.everyone or job.clients, _share(job, number)
    if job.sampling == "poisson":
        return np.flatnonzero([_draw(job, number, int(c)) < share for c in job.train.ids])
    k = round(share * everyone)
    if k == everyone:
        return np.arange(job.clients)
    draws = [_draw(job, number, c) for c in range(everyone)]
    return np.flatnonzero(np.isin(job.train.ids, np.argsort(draws, kind="stable")[:k]))


def expected(job: Job) -> float:
    """Mean number of clients that take part in a round, over all parts of a run."""
    ends = job.participation if isinstance(job.participation, tuple) else (job.participation,)
    return float(np.mean(ends)) * (job.everyone or job.clients)


def checked(given: Any) -> Participation:
    """The given share of the clients or range of shares; ValueError if it is neither."""
    several = isinstance(given, tuple | list)
    ends = tuple(given) if several and len(given) > 1 else (given[0] if several and given else given,)
    for end in ends:
        _check.real("participation", end, low=0, open_low=True, high=1)
    if len(ends) > 2 or ends[0] > ends[-1]:
        raise ValueError(f"participation must be a share of the clients or a range (low, high), but got {given!r}")
    return (ends[0], ends[1]) if len(ends) == 2 else ends[0]


def fewest(participation: Participation, clients: int, sampling: Sampling = "fixed") -> int:
    """Least number of clients that take part in a round."""
    if sampling == "poisson" and participation != 1:
        return 0
    return round((participation if isinstance(participation, float | int) else participation[0]) * clients)


def _share(job: Job, number: int) -> float:
    if not isinstance(job.participation, tuple):
        return job.participation
    return float(_random.generator(job.seed, "participation", number).uniform(*job.participation))


def _draw(job: Job, number: int, client: int) -> float:
    return float(_random.generator(job.seed, "participation", number, client).random())


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by descending number of training samples, so that those with batches left always come first."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]
