"""The conditional policy network: for every sample and feature, the share that is a client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedstat import _check
from fedstat._later import functional, torch
from fedstat.fl.nets import Params, conv, dense

if TYPE_CHECKING:
    from torch import Tensor

Norm = Literal["layer", "batch", "group", "none"]
Activation = Literal["relu", "tanh", "sigmoid"]
_ACTIVATIONS = ("relu", "tanh", "sigmoid")
_NORMS = ("layer", "batch", "group", "none")
_GROUPS = {"layer": 1, "group": 2}


class Policy(NamedTuple):
    """A conditional policy network (Zhang et al. 2023, "FedCP", §3.2.1 and Table 10).

    Dense layers ``policy1``, ``policy2``, …, all from K to K features but the last, from K to 2K; normalisation of the
    2K values a_1, a_2 with a scale and a shift each; activation, also after each layer before the last.

    Attributes
    ----------
    layers : int
    norm : {"layer", "batch", "group", "none"}
        Over all 2K values of a sample; over the samples of a batch; over a_1 and over a_2.
    activation : {"relu", "tanh", "sigmoid"}
    """

    layers: int = 1
    norm: Norm = "layer"
    activation: Activation = "relu"

    def require(self) -> Policy:
        """Return it, or raise ValueError."""
        _check.integer("policy_layers", self.layers)
        _check.choice("policy_norm", self.norm, _NORMS)
        _check.choice("policy_activation", self.activation, _ACTIVATIONS)
        return self

    @property
    def last(self) -> str:
        """Name of the last layer."""
        return f"policy{self.layers}"

    @property
    def buffers(self) -> tuple[str, ...]:
        """Running statistics of batch normalisation."""
        return (f"{self.last}.running_mean", f"{self.last}.running_var") if self.norm == "batch" else ()

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """Shapes of one client's parameters for K features; with K = 512 they hold 527,360 numbers."""
        found: dict[str, tuple[int, ...]] = {}
        for i in range(1, self.layers):
            found |= dense.shapes(f"policy{i}", features, features)
        found |= dense.shapes(self.last, features, 2 * features)
        normed = () if self.norm == "none" else (f"{self.last}.scale", f"{self.last}.shift", *self.buffers)
        return found | dict.fromkeys(normed, (2 * features,))

    def start(self, rng: np.random.Generator, features: int) -> Params:
        """Starting values as in torch.nn."""
        return dense.draw_parameters(self.shapes(features), rng)

    def difference(self, params: Params, c: Tensor, live: Tensor | None = None) -> Tensor:
        """a_1 − a_2 (client, sample, K) of inputs c (client, sample, K); ``live`` as in :class:`fedstat.fl.nets.Net`.

        The shares of the global and of a client's own information are the softmax of (a_1, a_2), that is
        sigmoid(±(a_1 − a_2)).
        """
        act = getattr(torch, self.activation)
        for i in range(1, self.layers):
            c = act(dense.linear_autograd(params, f"policy{i}", c))
        a = act(self._normed(params, dense.linear_autograd(params, self.last, c), live))
        first, second = a.chunk(2, -1)
        return first - second

    def _normed(self, params: Params, a: Tensor, live: Tensor | None) -> Tensor:
        if self.norm == "none":
            return a
        if self.norm == "batch":
            k, n, values = a.shape
            rows = a.transpose(0, 1).reshape(n, k * values, 1, 1)
            real = None if live is None or bool(live.all()) else live
            return conv.batch_norm(params, self.last, rows, live is not None, real).view(n, k, values).transpose(0, 1)
        groups = a.unflatten(-1, (_GROUPS[self.norm], -1))
        scale, shift = (params[f"{self.last}.{kind}"].unsqueeze(1) for kind in ("scale", "shift"))
        return torch.addcmul(shift, functional.layer_norm(groups, groups.shape[-1:], eps=conv.EPS).flatten(2), scale)


def mean_share(difference: Tensor) -> Tensor:
    """Mean of sigmoid(d + L) over logistic L: the share under Gumbel-softmax of temperature 1.

    P(L' − L ≤ d) for two logistic variables, that is (1 − (1 + d) q) / (1 − q)² with q = exp(−d).

    Examples
    --------
    >>> mean_share(torch.tensor([0.0, 2.0, -2.0]))
    tensor([0.5000, 0.7945, 0.2055])
    """
    d = difference.abs().double()
    q = torch.exp(-d)
    away = (1 - (1 + d) * q) / (1 - q).square()
    share = torch.where(d < 1e-3, 0.5 + d / 6, away)
    return torch.where(difference < 0, 1 - share, share).to(difference)
