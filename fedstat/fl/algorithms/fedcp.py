"""FedCP: a policy divides each sample's features between a global and a personal head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from fedstat._utils import check
from fedstat._utils.lazy import functional, torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Measure, Phase, RoundContext, Samples, Variant
from fedstat.fl.losses import Loss, loss_of_part
from fedstat.fl.nets import Net, Params, conv, dense

if TYPE_CHECKING:
    from torch import Tensor


ABOUT = About(
    "FedCP",
    ("zhang2023",),
    "all but the last layer; the mean of the global and the last layer; the policy between these two",
    "the last layer",
    ("local_train",),
)

_OF_POLICY, _OF_ALIGNMENT = (check.EffectIf(other, bool) for other in ("policy", "align"))


@check.effective
def fedcp(
    *,
    lam: Annotated[float, "λ, weight of the distance from the global features", _OF_ALIGNMENT] = 5.0,
    context: Annotated[Context, "input of the policy: both, sample, client or random", _OF_POLICY] = "both",
    policy: Annotated[bool, "separate the features by a policy"] = True,
    align: Annotated[bool, "align features with the global ones"] = True,
    global_head: Annotated[bool, "use a global head"] = True,
    policy_layers: Annotated[int, "dense layers of the policy network", _OF_POLICY] = 1,
    policy_norm: Annotated[
        Norm, "normalization of the policy network: layer, batch, group or none", _OF_POLICY
    ] = "layer",
    policy_activation: Annotated[
        Activation, "activation of the policy network: relu, tanh or sigmoid", _OF_POLICY
    ] = "relu",
    variant: Annotated[Variant, _OF_POLICY] = "paper",
) -> Algorithm:
    """Separate each sample's features h into r ⊙ h for a frozen global head and s ⊙ h for a personal head.

    Zhang, Hua, Wang, Song, Xue, Ma and Guan (2023), "FedCP: Separating feature information for personalized federated
    learning via conditional policy", KDD, arXiv:2307.01217, §3 and Algorithm 1. Let v be the column sums of the
    personal head before local training. From the input (v / ‖v‖) ⊙ h, a policy network computes r and s = 1 − r for
    every sample and feature (eqs. 3, 4). The outputs of the two heads are added. Local training adds λ MMD² between the
    batch's features and the features of the downloaded extractor, computed once, in evaluation. Equation (7) as written
    would decrease if the features moved apart.

    Shared (upload and download): the extractor, the policy network, and the global head, for which a client uploads the
    mean of both heads (eq. 6). Personal: the personal head and its v.

    Parameters
    ----------
    lam : float >= 0
        λ; the paper uses 5 for the CNN, 1 for ResNet-18 and fastText. 0 equals ``align=False``.
    context : {"both", "sample", "client", "random"}
        Table 1: "sample" is h alone (w.o. cs), "client" v / ‖v‖ alone (w.o. ss), "random" one fixed normal vector
        (w.o. cs & ss).
    policy, align, global_head : bool
        Table 1. Without the policy (CPN), all features go to every head. Without alignment (GFM), there is no MMD.
        Without the global head (GH), and hence without the policy, only the personal head remains. Without all three,
        this is FedPer.
    policy_layers, policy_norm, policy_activation
        Table 10; see :class:`fedstat.fl.algorithms.fedcp.Policy`. "group" normalizes in two groups.
    variant : {"paper", "code"}
        "code": the policy is drawn by Gumbel-softmax (temperature 1) in training. The published code draws it in
        evaluation, too; here evaluation uses its mean. v is of the personal head at download, and clients also predict
        with it; in the text they predict with the v with which they trained.

    Raises
    ------
    ValueError
        If a setting is out of range or has no effect; before the first round, if the network has no features.

    Notes
    -----
    ``measures/personalisation`` is the paper's personalization identification ratio (§8, Fig. 5): the mean of s over a
    client's training samples and all features, for the downloaded model. The mean of s by feature is stored with the
    weights, as ``weights/client/share``, to compare clients by their policy.
    """
    check.choice("variant", variant, ("paper", "code"))
    design = Policy(policy_layers, policy_norm, policy_activation)
    check.choice("context", context, ("both", "sample", "client", "random"))
    settings: dict[str, Any] = {
        "lam": check.real("lam", lam, low=0), "policy": policy, "align": align, "global_head": global_head,
        "context": context, **{f"policy_{name}": value for name, value in design._asdict().items()}, "variant": variant,
    }  # fmt: skip
    if policy and not global_head:
        raise ValueError("policy=True needs a global head, but got global_head=False. Set policy=False.")
    parts = Parts(global_head, design.require() if policy else None, context, variant == "code")
    uses_features, uses_vector = align and lam > 0, policy and context in ("both", "client")

    def set_vector(net: Net, params: Params, _: Samples, __: AlgorithmState) -> None:
        params[CONTEXT].copy_(client_vector(net, params))

    def personal_layers(net: Net) -> list[str]:
        return [layer for layer in nets.layers(net) if layer in (CLIENT, nets.output_layer(net))]

    phase = Phase(
        is_trainable=lambda name: nets.layer_of(name) != GLOBAL,
        on_phase_start=set_vector if uses_vector else None,
        sample_weights=_features if policy or uses_features else None,
    )
    return Algorithm(
        "fedcp",
        masks.keep_layers(personal_layers),
        phases=(phase, Phase(0, on_phase_start=set_vector)) if uses_vector and variant == "code" else (phase,),
        settings=settings,
        wrap=lambda net: separated(net, parts),
        loss=lambda inner, net: separated_loss(inner, net, lam if align else 0),
        encode=_mean_head if global_head else None,
        measures={"personalisation": PERSONALISATION} if policy else {},
        about=ABOUT,
    )


def _features(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
    """Return the features (client, sample, feature) of all training samples; set ``client.share`` to the mean of s."""
    with torch.no_grad():
        features, total = [], torch.zeros(())
        for block in nets.sample_blocks(samples.live.shape[1]):
            out = cut(net, net.apply(params, samples.x[:, block]))
            features.append(out.features.clone())
            total = total + (out.share * samples.live[:, block, None]).sum(1)
        if SHARE in params:
            params[SHARE].copy_(total / samples.live.sum(1, keepdim=True))
        return torch.cat(features, 1)


def _mean_head(context: RoundContext) -> Params:
    """Return the mean of the global and the personal head, which is uploaded as the global head (eq. 6)."""
    head = nets.output_layer(context.net)
    names = {name: head + name.removeprefix(GLOBAL) for name in context.after if nets.layer_of(name) == GLOBAL}
    return {name: (context.after[name] + context.after[personal]) / 2 for name, personal in names.items()}


Norm = Literal["layer", "batch", "group", "none"]
Activation = Literal["relu", "tanh", "sigmoid"]
_ACTIVATIONS = ("relu", "tanh", "sigmoid")
_NORMS = ("layer", "batch", "group", "none")
_GROUPS = {"layer": 1, "group": 2}


class Policy(NamedTuple):
    """A conditional policy network (Zhang et al. 2023, "FedCP", §3.2.1 and Table 10).

    Dense layers ``policy1``, ``policy2``, … map K to K features; the last one maps K to 2K. Its outputs a_1 and a_2
    are normalized, with a scale and a shift for each of the 2K values. An activation follows every layer; in the last
    layer it follows the normalization.

    Attributes
    ----------
    layers : int
    norm : {"layer", "batch", "group", "none"}
        "layer": over all 2K values of a sample; "batch": over the samples of a batch; "group": over a_1 and over a_2.
    activation : {"relu", "tanh", "sigmoid"}
    """

    layers: int = 1
    norm: Norm = "layer"
    activation: Activation = "relu"

    def require(self) -> Policy:
        """Return the policy, or raise ValueError if an attribute is not valid."""
        check.integer("policy_layers", self.layers)
        check.choice("policy_norm", self.norm, _NORMS)
        check.choice("policy_activation", self.activation, _ACTIVATIONS)
        return self

    @property
    def last(self) -> str:
        """Name of the last layer."""
        return f"policy{self.layers}"

    @property
    def buffers(self) -> tuple[str, ...]:
        """Running statistics of batch normalization."""
        return (f"{self.last}.running_mean", f"{self.last}.running_var") if self.norm == "batch" else ()

    def shapes(self, features: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one client's parameters for K features; with K = 512 they hold 527,360 numbers."""
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(1, self.layers):
            shapes |= dense.shapes(f"policy{i}", features, features)
        shapes |= dense.shapes(self.last, features, 2 * features)
        of_norm = () if self.norm == "none" else (f"{self.last}.scale", f"{self.last}.shift", *self.buffers)
        return shapes | dict.fromkeys(of_norm, (2 * features,))

    def start(self, rng: np.random.Generator, features: int) -> Params:
        """Draw initial parameters as in torch.nn."""
        return dense.draw_parameters(self.shapes(features), rng)

    def difference(self, params: Params, c: Tensor, live: Tensor | None = None) -> Tensor:
        """Return a_1 − a_2 (client, sample, K) of inputs c (client, sample, K).

        The proportions of global and of personal information are the softmax of (a_1, a_2), that is
        sigmoid(±(a_1 − a_2)). ``live`` is as in :class:`fedstat.fl.nets.Net`.
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
    """Return the mean of sigmoid(d + L) over logistic L: the proportion under Gumbel-softmax of temperature 1.

    It equals P(L' − L ≤ d) for two logistic variables, that is (1 − (1 + d) q) / (1 − q)² with q = exp(−d).
    ``difference`` d has any shape, and so has the mean.

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


GLOBAL, CLIENT = "global", "client"
CONTEXT, SHARE = f"{CLIENT}.context", f"{CLIENT}.share"
PERSONALISATION = Measure(
    lambda context: context.after[SHARE].mean(1), long_name="personalization identification ratio"
)
NOISE = "policy"
Context = Literal["both", "sample", "client", "random"]


class Parts(NamedTuple):
    """Parts of a network with two heads; see :func:`fedstat.fl.algorithms.fedcp`.

    Attributes
    ----------
    global_head : bool
        True: a global and a personal head; False: a personal head alone.
    policy : Policy, optional
        None: all features go to every head.
    context : {"both", "sample", "client", "random"}
        The policy's input: features h times the client's vector, h, the vector, or one random vector for all clients.
    sampled : bool
        True: training draws the policy by Gumbel-softmax of temperature 1, and evaluation uses its mean.
    """

    global_head: bool = True
    policy: Policy | None = Policy()
    context: Context = "both"
    sampled: bool = False


class Outputs(NamedTuple):
    """Outputs (client, sample, ...) of a separated network, by part.

    Attributes
    ----------
    logits : Tensor (client, sample, output)
    features : Tensor (client, sample, feature)
    share : Tensor (client, sample, feature)
        s, the proportion of each feature that goes to the personal head; empty without a policy.
    """

    logits: Tensor
    features: Tensor
    share: Tensor


def separated(net: Net, parts: Parts) -> Net:
    """Separate a network's features h into r ⊙ h for a global head and s ⊙ h for a personal head, r + s = 1.

    Parameters
    ----------
    net : Net
        Has features and one dense output layer, which becomes the personal head.
    parts : Parts

    Returns
    -------
    Net
        Further layers are ``policy1``, …; ``client`` with ``client.context``, the policy's vector, and
        ``client.share``, the mean of s; and ``global``, the global head, which starts equal to the personal head. No
        gradient reaches ``client``; the algorithm sets it. The outputs are the parts of :class:`Outputs` in a row.

    Raises
    ------
    ValueError
        If the network has no features, or is composed of factors.
    """
    features = nets.n_features(net)
    nets.require_uncomposed(net)
    functions = _Separated(net, parts, features, nets.output_layer(net))
    policy = parts.policy
    return nets.derive(
        net,
        shapes=functions.shapes(),
        init=functions.init,
        apply=functions.apply,
        buffers=(*net.buffers, *functions.client(), *(policy.buffers if policy else ())),
        heads=(GLOBAL, functions.output) if parts.global_head else (functions.output,),
        noise={**net.noise, **({NOISE: (features,)} if policy and parts.sampled else {})},
    )


class _Separated(NamedTuple):
    """A network, the parts of its separation, its number of features and its output layer."""

    net: Net
    parts: Parts
    features: int
    output: str

    def heads(self) -> dict[str, str]:
        """Map the personal head's parameters to the global head's, or to themselves without a global head."""
        names = [name for name in self.net.shapes if nets.layer_of(name) == self.output]
        return {name: GLOBAL + name.removeprefix(self.output) if self.parts.global_head else name for name in names}

    def client(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that the algorithm sets."""
        names = (CONTEXT, SHARE) if self.parts.context != "sample" else (SHARE,)
        return dict.fromkeys(names if self.parts.policy else (), (self.features,))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters, the personal head last."""
        of_policy = self.parts.policy.shapes(self.features) if self.parts.policy else {}
        heads, shapes = self.heads(), self.net.shapes
        body = {name: shape for name, shape in shapes.items() if name not in heads}
        of_global = {new: shapes[name] for name, new in heads.items()}
        return body | of_policy | self.client() | of_global | {name: shapes[name] for name in heads}

    def init(self, rng: np.random.Generator) -> Params:
        """Draw one client's initial parameters: of the network, then of the policy."""
        start = dict(self.net.init(rng))
        start |= {new: start[name].clone() for name, new in self.heads().items()}
        if self.parts.policy:
            start |= self.parts.policy.start(rng, self.features)
            start[SHARE] = torch.full((self.features,), 0.5)
            start[CONTEXT] = _direction(start[f"{self.output}.weight"].unsqueeze(0))[0]
        if self.parts.policy and self.parts.context == "random":
            start[CONTEXT] = torch.from_numpy(rng.standard_normal(self.features)).float()
        return {name: start[name] for name in self.shapes()}

    def apply(
        self, params: Params, x: Tensor, *, live: Tensor | None = None, noise: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return logits, features and proportions s in a row."""
        base = {name: params[name] for name in self.net.shapes}
        of_global = {name: params[new] for name, new in self.heads().items()}
        h = self.net.features(base, x, **nets.apply_arguments(self.net, live, noise))  # type: ignore[misc]
        if self.parts.policy is None:
            out = self._head(base, h)
            return torch.cat([out + self._head(of_global, h) if self.parts.global_head else out, h], -1)
        d = self.parts.policy.difference(params, self._context(params, h), live)
        if not self.parts.sampled:
            r = d.sigmoid()
        else:
            r = mean_share(d) if noise is None else (d + noise[NOISE].logit()).sigmoid()
        to_global = r * h
        out = self._head(of_global, to_global) + self._head(base, h - to_global)
        return torch.cat([out, h, (1 - r).detach()], -1)

    def _head(self, params: Params, h: Tensor) -> Tensor:
        return self.net.head(params, h)  # type: ignore[misc]

    def _context(self, params: Params, h: Tensor) -> Tensor:
        """Return the policy's input (client, sample, feature)."""
        if self.parts.context == "sample":
            return h
        vector = params[CONTEXT].unsqueeze(1)
        return vector * h if self.parts.context == "both" else vector.expand_as(h)


def cut(net: Net, out: Tensor) -> Outputs:
    """Cut the outputs (client, sample, ...) of a separated network into their parts."""
    n, k = nets.n_outputs(net), math.prod(net.shapes[f"{nets.output_layer(net)}.weight"][1:])
    return Outputs(out[..., :n], out[..., n : n + k], out[..., n + k :])


def separated_loss(inner: Loss, net: Net, lam: float, *, of_loss: float = 1.0) -> Loss:
    """Return the loss of the logits; in training, λ MMD² between the batch's and fixed features is added.

    ``of_loss`` multiplies the loss of the logits if the MMD² is added. Without fixed features it is not added.
    """

    def gradient(out: Tensor, y: Tensor, weight: Tensor, fixed: Tensor | None = None) -> Tensor:
        outputs, total = cut(net, out), torch.zeros_like(out)
        derivatives = cut(net, total)
        derivatives.logits.copy_(inner.gradient(outputs.logits.clone(), y, weight))
        if lam and fixed is not None:
            derivatives.features.copy_(mmd_gradient(outputs.features, fixed, weight)).mul_(lam)
            derivatives.logits.mul_(of_loss)
        return total

    return loss_of_part(inner, lambda out: cut(net, out).logits, gradient)


def client_vector(net: Net, params: Params) -> Tensor:
    """Return the column sums (client, feature) of each client's personal head over their norm; 0 if all are 0."""
    return _direction(params[f"{nets.output_layer(net)}.weight"])


def _direction(weight: Tensor) -> Tensor:
    return functional.normalize(weight.flatten(2).sum(1), dim=-1)


WIDTHS = (10.0, 15.0, 20.0, 50.0)


def mmd_gradient(h: Tensor, fixed: Tensor, weight: Tensor) -> Tensor:
    """Return the derivative at h of the squared maximum mean discrepancy between two samples of features.

    MMD² = Σ_ij w_i w_j [k(h_i, h_j) + k(g_i, g_j) − 2 k(h_i, g_j)], with w that sums to 1 the biased V-statistic of
    Gretton, Borgwardt, Rasch, Schölkopf and Smola (2012), "A kernel two-sample test", JMLR 13, eq. (5), and
    k(a, b) = Σ_σ exp(−‖a − b‖² / 2σ), σ = 10, 15, 20, 50.

    Parameters
    ----------
    h, fixed : Tensor (client, sample, feature)
    weight : Tensor (client, sample)
        w; 0 for padding.

    Returns
    -------
    Tensor (client, sample, feature)

    Examples
    --------
    >>> h, g, w = torch.tensor([[[1.0], [2.0]]]), torch.zeros(1, 2, 1), torch.full((1, 2), 0.5)
    >>> mmd_gradient(h, g, w).flatten()  # towards g: a descent step lowers h
    tensor([0.3423, 0.2953])
    >>> mmd_gradient(g, g, w).abs().max()
    tensor(0.)
    """
    both = torch.cat([h, fixed], 1)
    norms = both.square().sum(-1)
    square = torch.baddbmm(norms.unsqueeze(1), h, both.mT, alpha=-2).add_(norms[:, : h.shape[1], None]).clamp_(min=0)
    pull = sum((square * (-0.5 / width)).exp_().mul_(1 / width) for width in WIDTHS)
    pull = pull * torch.cat([weight, -weight], 1).unsqueeze(1)  # of sample j on sample i, away from where it is
    towards = torch.baddbmm(h * pull.sum(-1, keepdim=True), pull, both, beta=-1)
    return towards.mul_(2 * weight.unsqueeze(-1))
