"""Who takes part in a round."""

from __future__ import annotations

import numpy as np

from fedstat import _random
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Participation


def active(job: Job, number: int) -> np.ndarray:
    """Clients that take part in round ``number``, ascending: those with the smallest draws.

    Their share is ``participation``; or, where that is a range, drawn from it uniformly for every round.
    """
    everyone = job.everyone or job.clients
    k = _number(job, number, everyone)
    if k == everyone:
        return np.arange(job.clients)
    draws = [_random.generator(job.seed, "participation", number, c).random() for c in range(everyone)]
    return np.flatnonzero(np.isin(job.train.ids, np.argsort(draws, kind="stable")[:k]))


def fewest(participation: Participation, clients: int) -> int:
    """Least number of clients that take part in a round."""
    return round((participation if isinstance(participation, float | int) else participation[0]) * clients)


def _number(job: Job, number: int, clients: int) -> int:
    if not isinstance(job.participation, tuple):
        return round(job.participation * clients)
    share = _random.generator(job.seed, "participation", number).uniform(*job.participation)
    return round(share * clients)


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by descending number of training samples: those still at work are always the first ones."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]
