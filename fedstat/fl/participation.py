"""Who takes part in a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedstat._utils import check, streams
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Participation, Sampling

_ONE_BY_ONE = 5000  # a draw of each client's own takes 20 microseconds


def drawn(job: Job, number: int) -> np.ndarray:
    """Numbers of all clients that take part in a round, ascending: a fixed number, those with the smallest draws.

    Their share is ``participation`` or, if that is a range, drawn from it uniformly in every round. With Poisson
    sampling each client takes part with that probability, whatever the others do: there may be none. Of
    more than 5000 clients they are drawn at once, which takes no time for the others.
    """
    everyone, share = job.everyone or job.clients, _share(job, number)
    poisson, k = job.sampling == "poisson", round(share * everyone)
    if share == 1 or (k == everyone and not poisson):
        return np.arange(everyone)
    if everyone > _ONE_BY_ONE:
        rng = streams.generator(job.seed, "participation", number, "at once")
        return np.sort(rng.choice(everyone, rng.binomial(everyone, share) if poisson else k, replace=False))
    draws = np.array([streams.generator(job.seed, "participation", number, c).random() for c in range(everyone)])
    return np.flatnonzero(draws < share) if poisson else np.sort(np.argsort(draws, kind="stable")[:k])


def expected(job: Job) -> float:
    """Mean number of clients that take part in a round, over all parts of a run."""
    ends = job.participation if isinstance(job.participation, tuple) else (job.participation,)
    return float(np.mean(ends)) * (job.everyone or job.clients)


def checked(given: Any) -> Participation:
    """The given share of the clients or range of shares; ValueError if it is neither."""
    several = isinstance(given, tuple | list)
    ends = tuple(given) if several and len(given) > 1 else (given[0] if several and given else given,)
    for end in ends:
        check.real("participation", end, low=0, open_low=True, high=1)
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
    return float(streams.generator(job.seed, "participation", number).uniform(*job.participation))


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by descending number of training samples, so that chunks hold clients of like sizes."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]
