"""Parallel gradient descent of network (4) (FedFac §3.2), all clients in one tensor program.

NumPy or torch (CPU or CUDA), float64. Static FedSplit, FedAvg and dynamic FedFac differ in the mask of shared units
and in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
from array_api_compat import array_namespace

from fedstat._random import generator
from fedstat.stats import factor, split
from fedstat.stats.moments import correlation, moments
from fedstat.stats.ntk import Steps

Array = Any
Method = Literal["fedsplit", "fedavg", "fedavg-matched", "dynamic"]
METHODS: tuple[Method, ...] = ("fedsplit", "fedavg", "fedavg-matched", "dynamic")
DIVERGED = 1e4
"""A run has diverged once its loss is this many times what it was before training."""

# Given the clients' weights (client, unit, feature) after local steps, which units are shared (unit,).
Rule = Callable[[Array], Array]


class Network(NamedTuple):
    """Network (4) of all clients: h_c(x) = Σ_r output_r · relu(w_{c,r}ᵀx).

    Attributes
    ----------
    weights : array (client, unit, feature)
        Personal units first. Shared ones are equal for all clients.
    output : array (unit,)
        a_r/√m1 for personal and a_r/√m2 for shared units, a_r = ±1 common to the clients.
    shared : bool array (unit,)
        Units that are averaged.
    """

    weights: Array
    output: Array
    shared: Array


class Round(NamedTuple):
    """What one communication round does.

    Attributes
    ----------
    residual : array (client, sample)
        y − h(t).
    active : bool array (client, sample, unit)
        Activation patterns at t.
    start, local : array (client, unit, feature)
        Weights at t, and at its last local step but one update: those of H(t, G−1).
    shared : bool array (unit,)
    """

    residual: Array
    active: Array
    start: Array
    local: Array
    shared: Array


def network(
    method: Method, *, clients: int, features: int, width: int, seed: int, replicate: int = 0, scale: float = 1.0
) -> Network:
    """Draw network (4) with m1 = m2 = ``width`` as Theorem 1 has it: w ~ N(0, scale²I), signs ±1 with equal chance.

    Parameters
    ----------
    method : {"fedsplit", "fedavg", "fedavg-matched", "dynamic"}
        ``"fedsplit"``: personal units drawn for each client, shared units once. ``"fedavg"``: 2·width shared units
        scaled by 1/√(2·width), the network of the paper's comparison, kernel H^s. ``"fedavg-matched"``: all units of
        network (4) shared with their scales kept, kernel 2H^s, whose trace equals that of H^s + H^p: what the split
        alone changes. ``"dynamic"``: as fedavg-matched at the start.
    clients, features, width, seed, replicate : int
    scale : float
        Standard deviation of the weights (α of Theorem 2).

    Returns
    -------
    Network
        NumPy arrays. The methods share draws: FedAvg's units are the first client's.
    """
    rng = generator(seed, "ntk", replicate, width, features)
    signs = rng.choice([-1.0, 1.0], size=2 * width)
    common = scale * rng.normal(size=(2 * width, features))
    weights = np.repeat(common[None], clients, axis=0)
    shared = np.ones(2 * width, dtype=bool)
    if method == "fedsplit":
        shared[:width] = False
        for c in range(1, clients):
            own = generator(seed, "ntk", replicate, width, features, "client", c)
            weights[c, :width] = scale * own.normal(size=(width, features))
    return Network(weights, signs / math.sqrt(2 * width if method == "fedavg" else width), shared)


def diverged(loss: float, first: float) -> bool:
    """Whether descent has diverged by the time its loss, ‖y − h‖², went from ``first`` to ``loss``; NaN has."""
    return not loss <= DIVERGED * first


def predict(x: Array, weights: Array, output: Array) -> Array:
    """Evaluate network (4): x (client, sample, feature) to (client, sample)."""
    return _forward(array_namespace(x), x, weights, output)[0]


def descent(
    x: Array, y: Array, net: Network, steps: Steps, *, rounds: int, rule: Rule | None = None, divisors: Array = None
) -> Iterator[Round]:
    """Run the parallel gradient descent, round by round.

    Local: W_{c,g+1} = W_{c,g} − η_l ∂l_c. Global: W^s(t+1) = W^s(t) + η_g · mean over clients of ΔW_c^s;
    W_c^p(t+1) = W_c^p(t) + ΔW_c^p.

    Parameters
    ----------
    x, y : array (client, sample, feature), (client, sample)
    net : Network
    steps : Steps
    rounds : int
        T: rounds 0 … T are yielded, the last without its local steps.
    rule : callable, optional
        Decides after the local steps of every round which units are shared (dynamic FedFac). A unit that turns
        shared adopts the clients' mean; one that turns personal keeps each client's value.
    divisors : array (client,), optional
        Each client's own divisor, if they differ.

    Yields
    ------
    Round
    """
    xp = array_namespace(x, y, net.weights)
    weights, output, shared = net
    rate = steps.lr / (steps.divisor if divisors is None else divisors[:, None, None])
    for t in range(rounds + 1):
        start = local = before = weights
        for g in range(steps.local_steps if t < rounds else 1):
            value, slope = _forward(xp, x, local, output)
            if g == 0:
                residual, active = y - value, slope != 0
            if t == rounds:
                break
            before = local
            local = local + rate * (xp.matrix_transpose(slope) @ ((y - value)[..., None] * x))
        yield Round(residual, active, start, before, shared)
        if t < rounds:
            now = shared if rule is None else rule(local)
            weights = _aggregate(xp, start, local, shared, now, steps.server_lr)
            shared = now


def _forward(xp: Any, x: Array, weights: Array, output: Array) -> tuple[Array, Array]:
    """Value (client, sample) of the network and its slope in every unit's input (client, sample, unit)."""
    z = x @ xp.matrix_transpose(weights)
    slope = xp.where(z >= 0, output, xp.zeros_like(output))
    return xp.vecdot(z, slope), slope


def _aggregate(xp: Any, start: Array, local: Array, was: Array, now: Array, server_lr: float) -> Array:
    mean = xp.mean(local, axis=0)
    server = xp.where(was[:, None], start[0, ...] + server_lr * (mean - start[0, ...]), mean)
    return xp.where(now[:, None], server, local)


def factor_rule(*, kappa: float, tau: float, method: factor.Method = "pa") -> Rule:
    """Dynamic FedFac (Algorithm 2): factor analysis of the clients' updated weights in every round.

    Parameters
    ----------
    kappa, tau, method
        As in :func:`fedstat.stats.factor.fit` and :func:`fedstat.stats.split.shared`.
    """

    def rule(local: Array) -> Array:
        xp = array_namespace(local)
        z = xp.reshape(xp.permute_dims(local, (0, 2, 1)), (-1, local.shape[1]))
        r = correlation(moments(z))
        return split.shared(factor.fit(r, kappa=kappa, method=method).communality, tau=tau)

    return rule
