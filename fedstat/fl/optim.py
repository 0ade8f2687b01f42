"""Optimizers of stacked parameters; each client's arithmetic is that of ``torch.optim`` on its parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.nets import Params

__all__ = ["OPTIMIZERS", "Optimizer", "adam", "sgd"]


def __dir__() -> list[str]:
    return __all__


class Optimizer(NamedTuple):
    """An optimizer as pure functions, except that ``step`` updates in place.

    Attributes
    ----------
    init : callable (params) -> Params
        Initial state: stacked tensors, all with the leading client dimension.
    step : callable (params, grads, state) -> None
        One step in place, for every name in ``grads``.
    plain_lr : float or None
        Learning rate if the step is only params −= lr·grads, which a network can do while it differentiates.
    name : str
        Name with settings, which a run stores.
    scaled : callable (factor) -> Optimizer, optional
        This optimizer with its learning rate multiplied by the factor.
    lr : float, optional
        Learning rate.
    """

    init: Callable[[Params], Params]
    step: Callable[[Params, Params, Params], None]
    plain_lr: float | None = None
    name: str = "given"
    scaled: Callable[[float], Optimizer] | None = None
    lr: float | None = None


@check.named_options()
def sgd(lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Make stochastic gradient descent, as ``torch.optim.SGD``.

    Robbins and Monro (1951), "A stochastic approximation method", Ann. Math. Statist. 22, 400-407.

    Parameters
    ----------
    lr : float > 0
        Learning rate.
    momentum : float in [0, 1)
        Fraction of a step that is added to the next step.
    weight_decay : float >= 0
        The gradient gets this multiple of the parameters.
    """
    check.real("lr", lr, low=0, open_low=True)
    check.real("momentum", momentum, low=0, high=1, open_high=True)
    check.real("weight_decay", weight_decay, low=0)

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

    name = f"sgd(lr={lr}, momentum={momentum}, weight_decay={weight_decay})"

    def scaled(factor: float) -> Optimizer:
        return sgd(factor * lr, momentum=momentum, weight_decay=weight_decay)

    return Optimizer(init, step, None if momentum or weight_decay else lr, name, scaled, lr)


@check.named_options()
def adam(
    lr: float = 1e-3, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> Optimizer:
    """Make Adam, as ``torch.optim.Adam``; the bias correction counts the steps of each client.

    Kingma and Ba (2015), "Adam: a method for stochastic optimization", ICLR, arXiv:1412.6980, Algorithm 1.

    Parameters
    ----------
    lr : float > 0
        Learning rate.
    betas : pair of float in [0, 1)
        Decay of the moving averages of gradients and of their squares.
    eps : float > 0
        Added to the root of the squares.
    weight_decay : float >= 0
        The gradient gets this multiple of the parameters.
    """
    from torch.optim.adam import adam as fused_adam

    check.real("lr", lr, low=0, open_low=True)
    check.real("eps", eps, low=0, open_low=True)
    check.real("weight_decay", weight_decay, low=0)
    b1, b2 = (check.real("betas", b, low=0, high=1, open_high=True) for b in betas)

    def init(params: Params) -> Params:
        state: Params = {}
        for name, p in params.items():
            state |= {f"{name}.mean": torch.zeros_like(p), f"{name}.square": torch.zeros_like(p)}
            state[f"{name}.steps"] = p.new_zeros(p.shape[0])
        return state

    def step(params: Params, grads: Params, state: Params) -> None:
        # torch's fused kernel, with every client's parameter as a tensor: one pass over the memory.
        parts: list[list[torch.Tensor]] = [[], [], [], [], []]
        for name, grad in grads.items():
            tensors = (params[name], grad, state[f"{name}.mean"], state[f"{name}.square"], state[f"{name}.steps"])
            for part, stacked in zip(parts, tensors, strict=True):
                part += stacked.unbind()
        values, gradients, means, squares, steps = parts
        fused_adam(
            values, gradients, means, squares, [], steps, fused=True, amsgrad=False, beta1=b1, beta2=b2, lr=lr,
            weight_decay=weight_decay, eps=eps, maximize=False,
        )  # fmt: skip

    def scaled(factor: float) -> Optimizer:
        return adam(factor * lr, betas=betas, eps=eps, weight_decay=weight_decay)

    name = f"adam(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay})"
    return Optimizer(init, step, name=name, scaled=scaled, lr=lr)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": sgd, "adam": adam}
"""Local optimizers by name."""
