"""How the server turns what clients send into its own entries: pure functions that can be chained.

An aggregator is a pair ``init``, ``apply``, like optax's gradient transformations: each takes what the one before it
returned. Clipping clients' updates, a mean, noise on it, a server's optimiser and a sum over machines all have this
form::

    chain(clip(1.0), weighted_mean(), noise(0.1))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstat.fl.algorithm import Mask
from fedstat.fl.nets import Params


class Sent(NamedTuple):
    """What the active clients have sent in a round, or an aggregator has made of it.

    Attributes
    ----------
    values : Params
        Parameters with shared entries: (active, ...) as sent, (...) once averaged. Entries that are not shared may
        hold anything; results for them are ignored.
    server : Params (...)
        The server's copy before the round, of the same parameters.
    shared : Mask
        Which of their entries are shared; broadcasts against (...).
    sizes : Tensor (active,)
        Numbers of training samples.
    weights : Tensor (active,) or None
        The algorithm's own weights; if their sum is below 1, the server's copy gets the rest.
    clients : int array (active,)
        Numbers that name the clients' random streams.
    round : int
        From 0.
    seed : int
    total : callable (Params) -> Params
        Sums over the processes of a run, each of which has sent its own clients' values.
    """

    values: Params
    server: Params
    shared: Mask
    sizes: Tensor
    weights: Tensor | None
    clients: np.ndarray
    round: int
    seed: int
    total: Callable[[Params], Params] = lambda values: values


class Aggregator(NamedTuple):
    """An aggregator.

    Attributes
    ----------
    init : callable (Params) -> state
        State before the first round, from the server's copy: tensors, in dicts or tuples, which are saved and resumed.
    apply : callable (Sent, state) -> (Sent, state)
        One round. After the last aggregator of a chain ``values`` have no client dimension.
    name : str
        For the record of a run.
    """

    init: Callable[[Params], Any]
    apply: Callable[[Sent, Any], tuple[Sent, Any]]
    name: str


def stateless(name: str, values: Callable[[Sent], Params]) -> Aggregator:
    """Aggregator without state, from the new values."""
    return Aggregator(lambda _: (), lambda sent, state: (sent._replace(values=values(sent)), state), name)


def weighted_mean() -> Aggregator:
    """Mean weighted by numbers of training samples, or by the algorithm's own weights (FedAvg; FedFac Alg. 1)."""

    def mean(sent: Sent) -> Params:
        weights = sent.weights
        if weights is None:
            weights = sent.sizes / sent.total({"n": sent.sizes.sum()})["n"]
        found = {name: torch.mv(p.flatten(1).T, weights).view(p.shape[1:]) for name, p in sent.values.items()}
        found = sent.total(found)
        stays = 0.0
        if sent.weights is not None:
            stays = max(0.0, 1 - float(sent.total({"w": weights.sum(dtype=torch.float64)})["w"]))
        return {name: p.add_(sent.server[name], alpha=stays) for name, p in found.items()} if stays > 1e-6 else found

    return stateless("weighted mean", mean)


def chain(*aggregators: Aggregator) -> Aggregator:
    """One aggregator after the other.

    Examples
    --------
    >>> halved = stateless("halved", lambda sent: {name: p / 2 for name, p in sent.values.items()})
    >>> chain(weighted_mean(), halved).name
    'weighted mean, halved'
    """

    def init(server: Params) -> tuple[Any, ...]:
        return tuple(one.init(server) for one in aggregators)

    def apply(sent: Sent, states: tuple[Any, ...]) -> tuple[Sent, tuple[Any, ...]]:
        after = []
        for one, state in zip(aggregators, states, strict=True):
            sent, state = one.apply(sent, state)
            after.append(state)
        return sent, tuple(after)

    return Aggregator(init, apply, ", ".join(one.name for one in aggregators))
