"""What a probe is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedstat.fl.engine import Round
from fedstat.fl.job import Job
from fedstat.fl.state import State
from fedstat.store import Group

Values = dict[str, Any]
"""Arrays by "group/variable"."""


class Probe(NamedTuple):
    """Something measured beside training.

    Attributes
    ----------
    groups : mapping from str to Group
        Groups of the store.
    before : callable (Job, State) -> Values, optional
        Before every evaluated round: that round's rows of arrays with the dim ``round``.
    after : callable (Job, Round, State) -> Values, optional
        After every round: rows likewise.
    last : callable (Job, State) -> Values, optional
        After the last round: whole arrays.
    """

    groups: Mapping[str, Group]
    before: Callable[[Job, State], Values] | None = None
    after: Callable[[Job, Round, State], Values] | None = None
    last: Callable[[Job, State], Values] | None = None
