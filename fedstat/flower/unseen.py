"""What a server of separate parties does not see, and must not be able to compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from fedstat.fl import masks
from fedstat.fl.algorithm import SharedMask
from fedstat.fl.job import Job
from fedstat.stats.moments import Moments


def moments_alone(found: Mapping[str, Any], method: str) -> dict[str, Moments]:
    """The method's sums, if they are moments; else ValueError."""
    for layer, sums in found.items():
        if not isinstance(sums, Moments):
            raise ValueError(
                f"method {method!r}: between separate parties moments must be fedstat.stats.moments.Moments, but those "
                f"of {layer!r} are {type(sums).__name__}"
            )
    return dict(found)


def require_unsolvable(job: Job, mask: SharedMask, moments: Mapping[str, Moments]) -> None:
    """ValueError if open moments and shared entries of one party determine its personal weights.

    Products of a personal unit's n weights with n known vectors, the shared units' weights and ones, are a linear
    system that has one solution.
    """
    for layer in moments:
        flags = masks.shared_units(job.net, mask.shared, layer)
        known, n = int(flags.sum()) + 1, sum(_inputs(job, name) for name in masks.incoming(job.net, layer))
        if known >= n and not bool(flags.all()):
            raise ValueError(
                f"layer {layer!r}: from a party's moments and its {known - 1} shared units a server could compute the "
                f"personal ones, which have {n} weights each. Use secure sums (secure=True), or share fewer units."
            )


def _inputs(job: Job, name: str) -> int:
    shape = job.net.shapes[name]
    return int(np.prod(shape[1:], dtype=np.int64))


class Unseen(dict[str, torch.Tensor]):
    """Parameters that a server of separate parties does not see."""

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        super().__init__()
        self._refuse = refuse

    def __missing__(self, name: str) -> NoReturn:
        self._refuse(name)


def refusal(method: str) -> Callable[..., NoReturn]:
    """A function that raises ValueError, in place of one that shows single clients to the method."""

    def refuse(*_: Any) -> NoReturn:
        raise ValueError(
            f"method {method!r} asks for single clients' models, but a server of separate parties sees sums alone. "
            "Give the method moments, or use fedstat.fl.train."
        )

    return refuse
