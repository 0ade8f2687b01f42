"""FedAvg, and FedAvg+ whose clients fine-tune its model."""

from __future__ import annotations

from collections.abc import Sequence

from fedstat.fl.algorithm import About, Algorithm
from fedstat.fl.wrappers.finetuned import finetuned

ABOUT = About("FedAvg", "McMahan et al. (2017), arXiv:1602.05629", "everything", "nothing", ("global",))


def fedavg() -> Algorithm:
    """Everything is shared.

    McMahan, Moore, Ramage, Hampson and Agüera y Arcas (2017), "Communication-efficient learning of deep networks from
    decentralized data", AISTATS, Algorithm 1. Shared, up and down: everything; private: nothing.
    """
    return Algorithm("fedavg", about=ABOUT)


def fedavg_plus(*, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """:func:`fedavg`, :func:`fedstat.fl.wrappers.finetuned.finetuned`."""
    return finetuned(fedavg(), epochs)
