"""FedAvg+ and FedProx+: the global model, fine-tuned by every client."""

from __future__ import annotations

from fedstat import _check
from fedstat.fl.algorithm import Algorithm, Phase
from fedstat.fl.algorithms.fedavg import fedavg
from fedstat.fl.algorithms.fedprox import fedprox


def finetuned(algorithm: Algorithm, epochs: int | None = None) -> Algorithm:
    """Let every client train its downloaded model once more, on its own loss alone, before it predicts.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data",
    §5.2 (FedAvg+, FedProx+); Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage (2019), "Federated evaluation of
    on-device personalization", arXiv:1910.10252. Shared, private, up and down: as in ``algorithm``; the fine-tuned
    model never leaves its client and is forgotten. ``epochs`` None: the run's local epochs; 0: no fine-tuning.
    """
    if epochs is not None:
        _check.integer("epochs", epochs, low=0)
    settings = {**algorithm.settings, "finetune_epochs": epochs}
    phases = () if epochs == 0 else (Phase(epochs),)
    return algorithm._replace(name=f"{algorithm.name}+", finetune=phases, settings=settings)


def fedavg_plus(*, epochs: int | None = None) -> Algorithm:
    """:func:`fedavg`, :func:`finetuned`."""
    return finetuned(fedavg(), epochs)


def fedprox_plus(*, mu: float = 0.01, epochs: int | None = None) -> Algorithm:
    """:func:`fedprox`, :func:`finetuned`; the penalty holds in the rounds only."""
    return finetuned(fedprox(mu=mu), epochs)
