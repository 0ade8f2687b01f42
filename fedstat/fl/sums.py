"""What a method may learn of clients' models as sums over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedstat.fl.chunks import map_parallel
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.ranks import joined

# Clients are summed in parts of at least so many entries of models, 1, 2, 4, 8 ..., whatever the number of threads, so
# that the same sums are joined; larger parts come first, so that threads end together.
_PART = 1_000_000


def over_clients(job: Job, before: Callable[[slice], Params], after: Params) -> Mapping[str, Any]:
    """Return the algorithm's ``moments`` over clients of this process; none if it asks for none.

    Parameters
    ----------
    job : Job
    before : callable (slice) -> Params (client, ...)
        Parameters of some of the clients as downloaded.
    after : Params (client, ...)
        As trained.
    """

    def some(span: slice) -> Mapping[str, Any]:
        return job.hooks.moments(lambda: before(span), {name: p[span] for name, p in after.items()})

    n = len(next(iter(after.values())))
    entries = sum(p.numel() for p in after.values())
    parts = 1 << (entries // _PART).bit_length() - 1 if entries > _PART and job.device.type == "cpu" else 1
    cut = np.array_split(np.arange(n), parts)
    spans = [slice(int(part[0]), int(part[-1]) + 1) for part in cut if len(part)]
    return joined(map_parallel(job, spans, some))
