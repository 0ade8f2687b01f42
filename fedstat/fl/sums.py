"""What a method may learn of clients' models as sums over clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fedstat.fl.chunks import side_by_side
from fedstat.fl.job import Job
from fedstat.fl.nets import Params
from fedstat.fl.ranks import joined

# Clients are summed in parts of so many entries of models, whatever the number of threads: the same sums are joined.
_PART = 1_000_000


def over_clients(job: Job, before: Callable[[slice], Params], after: Params) -> Mapping[str, Any]:
    """The algorithm's ``moments`` over clients, of all processes; none if it asks for none.

    Parameters
    ----------
    job : Job
    before : callable (slice) -> Params (client, ...)
        Parameters of some of the clients as downloaded.
    after : Params (client, ...)
        As trained.
    """
    of = job.algorithm.moments
    if of is None:
        return {}

    def some(span: slice) -> Mapping[str, Any]:
        return of(job.net, lambda: before(span), {name: p[span] for name, p in after.items()})

    n = len(next(iter(after.values())))
    entries = sum(p.numel() for p in after.values())
    parts = min(n, max(1, entries // _PART) if job.device.type == "cpu" else 1)
    spans = [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
    return job.ranks.joined(joined(side_by_side(job, spans, some)), job.device)
