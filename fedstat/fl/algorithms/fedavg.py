"""Local training and FedAvg, the two extremes of personalization."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm, SharedMask
from fedstat.fl.wrappers.finetuned import finetuned

LOCAL = About("Local", shared="nothing", personal="everything", unseen_clients=("ensemble",))


def local() -> Algorithm:
    """Train every client alone from the common initial parameters: nothing is shared, uploaded or downloaded."""
    return Algorithm("local", lambda context: SharedMask(masks.share_none(context.net, context.device)), about=LOCAL)


ABOUT = About("FedAvg", ("mcmahan2017",), "everything", "nothing", ("global",))


def fedavg() -> Algorithm:
    """Share all parameters.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas (2017), "Communication-efficient learning of deep networks from
    decentralized data", AISTATS, Algorithm 1. Shared (upload and download): all parameters. Personal: none.
    """
    return Algorithm("fedavg", about=ABOUT)


def fedavg_plus(*, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """Wrap :func:`fedavg` in :func:`fedstat.fl.wrappers.finetuned.finetuned`."""
    return finetuned(fedavg(), epochs)
