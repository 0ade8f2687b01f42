"""Optimisers of stacked parameters; each client's arithmetic is that of ``torch.optim`` on its own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fedstat import _check
from fedstat.fl.nets import Params


class Optimizer(NamedTuple):
    """An optimiser as pure functions, but for the in-place update.

    Attributes
    ----------
    init : callable (params) -> Params
        State of stacked tensors, all with the leading client dimension.
    step : callable (params, grads, state) -> None
        One step in place, for every name in ``grads``.
    plain_lr : float or None
        Learning rate if the step is just params −= lr·grads, which a network can do while it differentiates.
    """

    init: Callable[[Params], Params]
    step: Callable[[Params, Params, Params], None]
    plain_lr: float | None = None


def sgd(lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Stochastic gradient descent, as ``torch.optim.SGD``."""
    _check.real("lr", lr, low=0, open_low=True)
    _check.real("momentum", momentum, low=0, high=1, open_high=True)
    _check.real("weight_decay", weight_decay, low=0)

    def init(params: Params) -> Params:
        return {name: torch.zeros_like(p) for name, p in params.items()} if momentum else {}

    def step(params: Params, grads: Params, state: Params) -> None:
        for name, grad in grads.items():
            p = params[name]
            if weight_decay:
                grad.add_(p, alpha=weight_decay)
            if momentum:
                grad = state[name].mul_(momentum).add_(grad)
            p.sub_(grad, alpha=lr)

    return Optimizer(init, step, None if momentum or weight_decay else lr)


def adam(
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Adam, as ``torch.optim.Adam``; the bias correction counts each client's own steps."""
    _check.real("lr", lr, low=0, open_low=True)
    _check.real("eps", eps, low=0, open_low=True)
    _check.real("weight_decay", weight_decay, low=0)
    b1, b2 = (_check.real("betas", b, low=0, high=1, open_high=True) for b in betas)

    def init(params: Params) -> Params:
        state: Params = {}
        for name, p in params.items():
            state |= {f"{name}.mean": torch.zeros_like(p), f"{name}.square": torch.zeros_like(p)}
            state[f"{name}.steps"] = p.new_zeros(p.shape[0])
        return state

    def step(params: Params, grads: Params, state: Params) -> None:
        for name, grad in grads.items():
            p = params[name]
            if weight_decay:
                grad.add_(p, alpha=weight_decay)
            mean, square, steps = state[f"{name}.mean"], state[f"{name}.square"], state[f"{name}.steps"].add_(1)
            mean.lerp_(grad, 1 - b1)
            square.mul_(b2).addcmul_(grad, grad, value=1 - b2)
            # Powers in float64, as torch.optim's Python floats are.
            t = steps.double().view(-1, *(1,) * (p.ndim - 1))
            scale, root = (lr / (1 - b1**t)).to(p.dtype), (1 - b2**t).sqrt().to(p.dtype)
            p.sub_(mean.mul(scale).div_(square.sqrt().div_(root).add_(eps)))

    return Optimizer(init, step)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam}
