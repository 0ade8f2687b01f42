"""FedAvg+ and FedProx+: the global model, fine-tuned by every client."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, Literal

from fedstat import _check
from fedstat.fl.algorithm import Algorithm, Choice, HeldOut, Phase
from fedstat.fl.algorithms.fedavg import fedavg
from fedstat.fl.algorithms.fedprox import fedprox


def finetuned(
    algorithm: Algorithm,
    epochs: int | Sequence[int] | None = None,
    *,
    rate: float | Sequence[float] = 1.0,
    by: Literal["pooled", "client"] = "pooled",
    held_out: HeldOut | None = None,
) -> Algorithm:
    """Let every client train its downloaded model once more, on its own loss alone, before it predicts.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data",
    §5.2 (FedAvg+, FedProx+); Wang, Mathews, Kiddon, Eichner, Beaufays and Ramage (2019), "Federated evaluation of
    on-device personalization", arXiv:1910.10252. Shared, private, up and down: as in ``algorithm``; the fine-tuned
    model never leaves its client and is forgotten.

    Parameters
    ----------
    algorithm : Algorithm
        Without fine-tuning of its own.
    epochs : int or sequence of int, optional
        None: the run's local epochs; 0: no fine-tuning. Of several one is chosen: early stopping.
    rate : float or sequence of float
        Factor of the run's learning rate. Of several one is chosen.
    by, held_out
        How, among several: see :class:`fedstat.fl.algorithm.Choice`.

    Raises
    ------
    ValueError
        If an argument is out of range, or ``algorithm`` fine-tunes already.

    Examples
    --------
    >>> len(finetuned(fedavg(), [1, 2, 5]).choice.finetunings)
    3
    """
    require_plain(algorithm)
    lengths, factors = _several(epochs), _several(rate)
    for n in lengths:
        if n is not None or len(lengths) > 1:
            _check.integer("epochs", n, low=0)
    for factor in factors:
        _check.real("rate", factor, low=0, open_low=True)
    if lengths == [0] and factors != [1]:
        raise ValueError(f"rate has no effect with epochs=0, no fine-tuning, but got rate={rate!r}")
    settings: dict[str, Any] = {**algorithm.settings, "finetune_epochs": epochs, "rate": rate}
    ways = tuple(dict.fromkeys(() if n == 0 else (Phase(n, lr=f),) for n, f in product(lengths, factors)))
    if len(ways) == 1:
        if held_out is not None or by != "pooled":
            raise ValueError("by and held_out say how to choose among epochs or rates, but there is one of each")
        return algorithm._replace(name=f"{algorithm.name}+", finetune=ways[0], settings=settings)
    _check.choice("by", by, ("pooled", "client"))
    return algorithm._replace(
        name=f"{algorithm.name}+",
        finetune=ways[-1],
        choice=Choice(finetunings=ways, by=by, held_out=checked(held_out)),
        settings=settings | {"by": by, "held_out": held_out},
    )


def fedavg_plus(*, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """:func:`fedavg`, :func:`finetuned`."""
    return finetuned(fedavg(), epochs)


def fedprox_plus(*, mu: float = 0.01, epochs: int | Sequence[int] | None = None) -> Algorithm:
    """:func:`fedprox`, :func:`finetuned`; the penalty holds in the rounds only."""
    return finetuned(fedprox(mu=mu), epochs)


def require_plain(algorithm: Algorithm) -> None:
    """ValueError if a method fine-tunes already."""
    if algorithm.finetune or algorithm.choice:
        raise ValueError(f"{algorithm.name} fine-tunes already. Give the method without that.")


def checked(held_out: HeldOut | None) -> HeldOut | None:
    """Samples that a choice is made on, if they can be."""
    return None if held_out is None else _check.choice("held_out", held_out, ("validation", "halves"))


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, Sequence) else [given]
