"""A network with two heads, between which a policy separates the features, and its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from fedstat._later import functional, torch
from fedstat.fl import nets
from fedstat.fl.kernels import mmd_gradient
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.policy import Policy, mean_share

if TYPE_CHECKING:
    from torch import Tensor

GLOBAL, CLIENT = "global", "client"
CONTEXT, SHARE = f"{CLIENT}.context", f"{CLIENT}.share"
NOISE = "policy"
Context = Literal["both", "sample", "client", "random"]


class Parts(NamedTuple):
    """What a network in two heads consists of; see :func:`fedstat.fl.algorithms.fedcp`.

    Attributes
    ----------
    global_head : bool
        Whether there is a global head beside the client's own.
    policy : Policy, optional
        None: all features go to every head.
    context : {"both", "sample", "client", "random"}
        The policy's input: features h times the client's vector, h, the vector, or one random vector for all.
    sampled : bool
        Whether the policy is drawn in training, by Gumbel-softmax of temperature 1, and its mean taken in evaluation.
    """

    global_head: bool = True
    policy: Policy | None = Policy()
    context: Context = "both"
    sampled: bool = False


class Outputs(NamedTuple):
    """The outputs (client, sample, ...) of a separated network, cut into their parts.

    Attributes
    ----------
    logits : Tensor (client, sample, output)
    features : Tensor (client, sample, feature)
    share : Tensor (client, sample, feature)
        s, the share of each feature that goes to the client's own head; no feature without a policy.
    """

    logits: Tensor
    features: Tensor
    share: Tensor


def separated(net: Net, parts: Parts) -> Net:
    """Network whose features h go to a global head as r ⊙ h and to the client's own as s ⊙ h, r + s = 1.

    Parameters
    ----------
    net : Net
        With features and one dense output layer, which becomes the client's own head.
    parts : Parts

    Returns
    -------
    Net
        Further layers: ``policy1``, …; ``client``, which no gradient reaches: ``client.context``, the policy's vector,
        and ``client.share``, the mean of s, both as the method sets them; and ``global``, the global head, which starts
        as the client's own. Its outputs are the parts of :class:`Outputs` in a row.

    Raises
    ------
    ValueError
        If the network has no features, or is composed of factors.
    """
    features = nets.n_features(net)
    nets.require_uncomposed(net)
    made = _Separated(net, parts, features, nets.head_layers(net)[-1])
    policy, sampled = parts.policy, parts.policy is not None and parts.sampled
    return Net(
        made.shapes(),
        made.init,
        made.apply,
        buffers=(*net.buffers, *made.client(), *(policy.buffers if policy else ())),
        unshared=net.unshared,
        heads=(GLOBAL, made.own) if parts.global_head else (made.own,),
        noise={**net.noise, **({NOISE: (features,)} if sampled else {})},
        undivided=net.undivided,
    )


class _Separated(NamedTuple):
    """A network, the parts that it is cut into, its number of features and its output layer."""

    net: Net
    parts: Parts
    features: int
    own: str

    def heads(self) -> dict[str, str]:
        """The own head's parameters, and those of the global head in their place."""
        names = [name for name in self.net.shapes if nets.layer_of(name) == self.own]
        return {name: GLOBAL + name.removeprefix(self.own) if self.parts.global_head else name for name in names}

    def client(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what the method sets."""
        names = (CONTEXT, SHARE) if self.parts.context != "sample" else (SHARE,)
        return dict.fromkeys(names if self.parts.policy else (), (self.features,))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters, those of the own head last."""
        of_policy = self.parts.policy.shapes(self.features) if self.parts.policy else {}
        heads, shapes = self.heads(), self.net.shapes
        body = {name: shape for name, shape in shapes.items() if name not in heads}
        at_global = {new: shapes[name] for name, new in heads.items()}
        return body | of_policy | self.client() | at_global | {name: shapes[name] for name in heads}

    def init(self, rng: np.random.Generator) -> Params:
        """One client's start: that of the network, then the policy's."""
        start = dict(self.net.init(rng))
        start |= {new: start[name].clone() for name, new in self.heads().items()}
        if self.parts.policy:
            start |= self.parts.policy.start(rng, self.features)
            start[SHARE] = torch.full((self.features,), 0.5)
            start[CONTEXT] = _direction(start[f"{self.own}.weight"].unsqueeze(0))[0]
        if self.parts.policy and self.parts.context == "random":
            start[CONTEXT] = torch.from_numpy(rng.standard_normal(self.features)).float()
        return {name: start[name] for name in self.shapes()}

    def apply(
        self, params: Params, x: Tensor, *, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Logits, features and shares in a row."""
        base = {name: params[name] for name in self.net.shapes}
        at_global = {name: params[new] for name, new in self.heads().items()}
        h = self.net.features(base, x, **nets.apply_arguments(self.net, live, noise))  # type: ignore[misc]
        if self.parts.policy is None:
            out = self._head(base, h)
            return torch.cat([out + self._head(at_global, h) if self.parts.global_head else out, h], -1)
        d = self.parts.policy.difference(params, self._context(params, h), live)
        if not self.parts.sampled:
            r = d.sigmoid()
        else:
            r = mean_share(d) if noise is None else (d + noise[NOISE].logit()).sigmoid()
        to_global = r * h
        out = self._head(at_global, to_global) + self._head(base, h - to_global)
        return torch.cat([out, h, (1 - r).detach()], -1)

    def _head(self, params: Params, h: Tensor) -> Tensor:
        return self.net.head(params, h)  # type: ignore[misc]

    def _context(self, params: Params, h: Tensor) -> Tensor:
        """Input of the policy."""
        if self.parts.context == "sample":
            return h
        vector = params[CONTEXT].unsqueeze(1)
        return vector * h if self.parts.context == "both" else vector.expand_as(h)


def cut(net: Net, out: Tensor) -> Outputs:
    """Parts of the outputs of a separated network."""
    n, k = nets.n_outputs(net), math.prod(net.shapes[f"{nets.head_layers(net)[-1]}.weight"][1:])
    return Outputs(out[..., :n], out[..., n : n + k], out[..., n + k :])


def separated_loss(inner: Loss, net: Net, lam: float, *, of_loss: float = 1.0) -> Loss:
    """The loss of the logits; in training, given fixed features, plus λ MMD² between them and the batch's features.

    ``of_loss`` is the weight of the loss beside the MMD².
    """

    def gradient(out: Tensor, y: Tensor, weight: Tensor, fixed: Tensor | None = None) -> Tensor:
        seen, total = cut(net, out), torch.zeros_like(out)
        at = cut(net, total)
        at.logits.copy_(inner.gradient(seen.logits.clone(), y, weight))
        if lam and fixed is not None:
            at.features.copy_(mmd_gradient(seen.features, fixed, weight)).mul_(lam)
            at.logits.mul_(of_loss)
        return total

    return loss_of_part(inner, lambda out: cut(net, out).logits, gradient)


def client_vector(net: Net, params: Params) -> Tensor:
    """Column sums (client, feature) of each client's own head, over their norm; 0 where all are 0."""
    return _direction(params[f"{nets.head_layers(net)[-1]}.weight"])


def _direction(weight: Tensor) -> Tensor:
    return functional.normalize(weight.flatten(2).sum(1), dim=-1)
