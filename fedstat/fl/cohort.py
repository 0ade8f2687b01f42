"""The clients of a round, over all processes: their selection, and the exchange of their rows and sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstat._utils import check, streams
from fedstat._utils.lazy import torch
from fedstat.fl.batches import Rows
from fedstat.fl.job import Job, Participation, Sampling
from fedstat.fl.nets import Params
from fedstat.fl.ranks import ProcessGroup

if TYPE_CHECKING:
    from torch import Tensor


_INDIVIDUAL_DRAWS = 5000  # clients up to which each has a random stream, which takes 20 microseconds
_FAR = 0.2


def selected_clients(job: Job, number: int) -> np.ndarray:
    """Return the ascending numbers of all clients selected in a round.

    The participation rate is ``participation`` or, if that is a range, is drawn from it uniformly in every round. With
    fixed sampling a fixed number is selected: the clients with the smallest draws. With Poisson sampling each client is
    selected with that probability, independently of the others: a round may have no client. More than 5000 clients
    share one random stream, so that clients that are not selected take no time.
    """
    everyone, rate = job.everyone or job.clients, _participation_rate(job, number)
    poisson, k = job.sampling == "poisson", _number_selected(rate, everyone)
    if rate == 1 or (k == everyone and not poisson):
        return np.arange(everyone)
    if everyone > _INDIVIDUAL_DRAWS:
        rng = streams.generator(job.seed, "participation", number, "at once")
        return np.sort(rng.choice(everyone, rng.binomial(everyone, rate) if poisson else k, replace=False))
    draws = np.array([streams.generator(job.seed, "participation", number, c).random() for c in range(everyone)])
    return np.flatnonzero(draws < rate) if poisson else np.sort(np.argsort(draws, kind="stable")[:k])


def expected(job: Job) -> float:
    """Return the mean number of clients selected in a round, over all processes."""
    return float(np.mean(_ends(job.participation))) * (job.everyone or job.clients)


def checked(participation: Any) -> Participation:
    """Return a participation rate or a range of rates; ValueError if it is neither."""
    is_range = isinstance(participation, tuple | list) and participation
    ends = tuple(participation) if is_range else (participation,)
    for end in ends:
        check.real("participation", end, low=0, open_low=True, high=1)
    if len(ends) > 2 or ends[0] > ends[-1]:
        raise ValueError(f"participation must be a rate or a range of rates (low, high), but got {participation!r}")
    return (ends[0], ends[1]) if len(ends) == 2 else ends[0]


def fewest(participation: Participation, clients: int, sampling: Sampling = "fixed") -> int:
    """Return the least number of clients selected in a round."""
    if sampling == "poisson" and participation != 1:
        return 0
    return _number_selected(_ends(participation)[0], clients)


def far_from_rate(participation: Participation, clients: int) -> dict[float, int]:
    """Return the ends of the participation rate that rounding to whole clients changes by more than a fifth.

    Returns
    -------
    dict from float to int
        Number of clients that fixed sampling selects, by rate.

    Examples
    --------
    >>> far_from_rate(0.2, 3), far_from_rate(0.25, 18), far_from_rate((0.1, 0.5), 8)
    ({0.2: 1}, {}, {0.1: 1})
    """
    numbers = {rate: _number_selected(rate, clients) for rate in _ends(participation)}
    return {rate: k for rate, k in numbers.items() if abs(k - rate * clients) > _FAR * rate * clients}


def _number_selected(rate: float, clients: int) -> int:
    return round(rate * clients)


def _ends(participation: Participation) -> tuple[float, ...]:
    return participation if isinstance(participation, tuple) else (participation,)


def _participation_rate(job: Job, number: int) -> float:
    if not isinstance(job.participation, tuple):
        return job.participation
    return float(streams.generator(job.seed, "participation", number).uniform(*job.participation))


def by_size(data: Rows, clients: np.ndarray) -> np.ndarray:
    """Order clients by descending number of training samples, so that chunks hold clients of like sizes."""
    return clients[np.argsort(-data.sizes[clients], kind="stable")]


@dataclass(frozen=True)
class Cohort:
    """Clients, by descending number of training samples, so that chunks hold clients of like sizes.

    This class is for the clients of one process, which communicates with no other. :class:`_Distributed` overrides the
    methods by which several processes communicate.

    Attributes
    ----------
    ids : int array (client,)
        Numbers of the clients of all processes.
    sizes : int array (client,)
        Their training samples.
    local : int array (local,)
        Rows, in the job's data, of the clients that this process holds; in the same order.
    """

    ids: np.ndarray
    sizes: np.ndarray
    local: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def local_ids(self) -> np.ndarray:
        """Numbers of the clients that this process holds."""
        return self.ids

    def of_this_process(self) -> Cohort:
        """Return the clients that this process holds, as a cohort that communicates with no other process."""
        return self

    def at_least(self, n: int) -> Cohort:
        """Return the clients with n training samples or more."""
        enough = self.sizes >= n
        return Cohort(self.ids[enough], self.sizes[enough], self.local[enough])

    # --- communication between processes; the identity for one process

    def gather(self, rows: Mapping[str, Tensor], ids: np.ndarray | None = None) -> Params:  # noqa: ARG002
        """Return rows of the clients of all processes (or of ``ids``), from the rows of this process's clients."""
        return dict(rows)

    def held(self, ids: np.ndarray) -> np.ndarray:
        """Return the positions of the clients, by number, that this process holds."""
        return np.arange(len(ids))

    def local_rows(self, rows: Mapping[str, Tensor]) -> Params:
        """Return rows of this process's clients, from rows of the clients of all processes."""
        return dict(rows)

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over processes."""
        return values

    def join(self, sums: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:  # noqa: ARG002
        """Return sums over processes in order, of values that ``+`` joins."""
        return sums


@dataclass(frozen=True)
class _Distributed(Cohort):
    """Clients that several processes hold, each some of them."""

    group: ProcessGroup

    @property
    def local_ids(self) -> np.ndarray:
        return self.ids[self.held(self.ids)]

    def of_this_process(self) -> Cohort:
        held = self.held(self.ids)
        return Cohort(self.ids[held], self.sizes[held], self.local)

    def at_least(self, n: int) -> Cohort:
        enough = self.sizes >= n
        return _Distributed(self.ids[enough], self.sizes[enough], self.local[enough[self.held(self.ids)]], self.group)

    def gather(self, rows: Mapping[str, Tensor], ids: np.ndarray | None = None) -> Params:
        holder = self.group.holder(self.ids if ids is None else ids)
        counts = np.bincount(holder, minlength=self.group.number).tolist()
        gathered = self.group.rows(rows, counts)  # one process after the other
        if (np.diff(holder) >= 0).all():
            return gathered
        order = np.argsort(np.argsort(holder, kind="stable"))
        return {name: p[order] for name, p in gathered.items()}

    def held(self, ids: np.ndarray) -> np.ndarray:
        return np.flatnonzero(self.group.holder(ids) == self.group.rank)

    def local_rows(self, rows: Mapping[str, Tensor]) -> Params:
        held = self.held(self.ids)
        return {name: p[held] for name, p in rows.items()}

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.group.total(values)

    def join(self, sums: Mapping[str, Any], device: torch.device) -> Mapping[str, Any]:
        return self.group.joined(sums, device)


def of_round(job: Job, number: int) -> Cohort:
    """Return the clients selected in round ``number``."""
    return _of(job, selected_clients(job, number))


def of_all(job: Job) -> Cohort:
    """Return all clients."""
    return _of(job, np.arange(len(job.sizes)) if job.process_group.several else job.train.ids)


def of_local(job: Job, rows: np.ndarray) -> Cohort:
    """Return clients of this process, from their rows in the job's data."""
    local = by_size(job.train, rows)
    return Cohort(job.ids(local), job.train.sizes[local], local)


def _of(job: Job, ids: np.ndarray) -> Cohort:
    """Return the clients with these ascending numbers."""
    local = of_local(job, ids if job.train.numbers is None else np.flatnonzero(np.isin(job.train.ids, ids)))
    if not job.process_group.several:
        return local
    order = np.argsort(-job.sizes[ids], kind="stable")
    return _Distributed(ids[order], job.sizes[ids][order], local.local, job.process_group)
