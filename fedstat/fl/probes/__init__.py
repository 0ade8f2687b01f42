"""Observers of a run: measurements beside training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedstat.fl.cohort import Cohort
from fedstat.fl.communication_round import Outcome
from fedstat.fl.job import Job
from fedstat.fl.state import State
from fedstat.store import Group

Values = dict[str, Any]
"""Arrays by "group/variable"."""


class Observer(NamedTuple):
    """A measurement that does not change training. An observer that adds groups to the store is a probe.

    Attributes
    ----------
    groups : mapping from str to Group
        Groups of the store.
    on_round_start : callable (Job, State, Cohort) -> Values, optional
        Called before a round; returns the round's rows of arrays with the dim ``round``.
    on_round_end : callable (Job, Outcome) -> Values, optional
        Called after a round; returns further rows of this round.
    on_end : callable (Job, State) -> Values, optional
        Called after the last round; returns complete arrays.
    only_evaluated : bool
        True if the first two are called in evaluated rounds only.
    """

    groups: Mapping[str, Group] = {}
    on_round_start: Callable[[Job, State, Cohort], Values] | None = None
    on_round_end: Callable[[Job, Outcome], Values] | None = None
    on_end: Callable[[Job, State], Values] | None = None
    only_evaluated: bool = False
