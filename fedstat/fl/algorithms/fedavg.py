"""Local training and FedAvg, between which personalized algorithms lie."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm, SharedMask
from fedstat.fl.wrappers.finetuned import finetuned

LOCAL = About("Local", shared="nothing", personal="everything", new_clients=("ensemble",))


def local() -> Algorithm:
    """Nothing is shared, and nothing goes up or down: every client trains alone from the common start."""
    return Algorithm("local", lambda context: SharedMask(masks.share_none(context.net, context.device)), about=LOCAL)


ABOUT = About("FedAvg", ("mcmahan2017",), "everything", "nothing", ("global",))


def fedavg() -> Algorithm:
    """Everything is shared.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas (2017), "Communication-efficient learning of deep networks from
    decentralized data", AISTATS, Algorithm 1. Shared, up and down: everything; private: nothing.
    """
    return Algorithm("fedavg", about=ABOUT)


def fedavg_plus(*, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """:func:`fedavg`, :func:`fedstat.fl.wrappers.finetuned.finetuned`."""
    return finetuned(fedavg(), epochs)
