"""FedCP: a policy sends each sample's features to a global head or to the client's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fedstat import _check
from fedstat._later import torch
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Measure, Phase, RoundContext, Samples, Variant
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.policy import Activation, Norm, Policy
from fedstat.fl.wrappers.separated import (
    CLIENT,
    CONTEXT,
    GLOBAL,
    SHARE,
    Context,
    Parts,
    client_vector,
    cut,
    separated,
    separated_loss,
)

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedCP",
    "Zhang et al. (2023), arXiv:2307.01217",
    "all but the last layer; the mean of the global and the last layer; the policy between these two",
    "the last layer",
    ("local_train",),
)

_LAM = 5.0
PERSONALISATION = Measure(
    lambda context: context.after[SHARE].mean(1), long_name="personalisation identification ratio"
)


def fedcp(
    *,
    lam: Annotated[float, "λ, weight of the distance from the global features"] = _LAM,
    context: Annotated[Context, "what the policy sees: both, sample, client or random"] = "both",
    policy: Annotated[bool, "whether a policy separates the features"] = True,
    align: Annotated[bool, "whether features are aligned with the global ones"] = True,
    global_head: Annotated[bool, "whether there is a global head"] = True,
    policy_layers: Annotated[int, "dense layers of the policy network"] = 1,
    policy_norm: Annotated[Norm, "its normalisation: layer, batch, group or none"] = "layer",
    policy_activation: Annotated[Activation, "its activation: relu, tanh or sigmoid"] = "relu",
    variant: Variant = "paper",
) -> Algorithm:
    """Every sample's features h are separated into r ⊙ h for a frozen global head and s ⊙ h for the client's own.

    Zhang, Hua, Wang, Song, Xue, Ma and Guan (2023), "FedCP: Separating feature information for personalized federated
    learning via conditional policy", KDD, arXiv:2307.01217, §3 and Algorithm 1. A policy network of the input
    (v / ‖v‖) ⊙ h, with v the column sums of the own head before local training, gives r and s = 1 − r, for every
    sample and feature (eqs. 3, 4). The outputs of the two heads are added. Local training adds λ MMD² between the
    batch's features and those of the extractor as downloaded, which are taken once, in evaluation: equation (7) as it
    is written would be lowered by features that move apart.

    Shared, up and down: the extractor, the policy network, and the global head, for which a client sends the mean of
    both heads (eq. 6). Private: the own head and its v.

    Parameters
    ----------
    lam : float >= 0
        λ; the paper's choice is 5 for the CNN, 1 for ResNet-18 and fastText. 0 equals ``align=False``.
    context : {"both", "sample", "client", "random"}
        Table 1: "sample" is h alone (w.o. cs), "client" v / ‖v‖ alone (w.o. ss), "random" one normal vector that stays
        (w.o. cs & ss).
    policy, align, global_head : bool
        Table 1: without the policy (CPN) all features go to every head; without alignment (GFM) there is no MMD;
        without the global head (GH), and so without the policy, the own head is the only one. Without all, FedPer.
    policy_layers, policy_norm, policy_activation
        Table 10; see :class:`fedstat.fl.wrappers.policy.Policy`. "group" normalises in two groups.
    variant : {"paper", "code"}
        "code": the policy is drawn by Gumbel-softmax (temperature 1) in training; the published code draws it in
        evaluation, too, where its mean is taken here. v is that of the own head at download, so that clients also
        predict with it; in the text they predict with the one they trained with.

    Raises
    ------
    ValueError
        If a setting is out of range or has no effect; before the first round, if the network has no features.

    Notes
    -----
    ``measures/personalisation`` is the paper's personalisation identification ratio (§8, Fig. 5): the mean of s over a
    client's training samples and all features, as downloaded, before local training. Its mean by feature is kept with
    the weights, as ``weights/client/share``, to compare clients by their policy.
    """
    _check.choice("variant", variant, ("paper", "code"))
    design = Policy(policy_layers, policy_norm, policy_activation)
    of_policy = {"context": context, **{f"policy_{name}": value for name, value in design._asdict().items()}}
    settings = {"lam": _check.real("lam", lam, low=0), "policy": policy, "align": align, "global_head": global_head}
    settings |= of_policy | {"variant": variant}
    _require(settings, of_policy)
    parts = Parts(global_head, design.require() if policy else None, context, variant == "code")
    aligned, renewed = align and lam > 0, policy and context in ("both", "client")

    def weigh(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
        if renewed:
            params[CONTEXT].copy_(client_vector(net, params))
        return _features(net, params, samples)

    def renew(net: Net, params: Params, samples: Samples, _: AlgorithmState) -> Tensor:
        params[CONTEXT].copy_(client_vector(net, params))
        return samples.y

    def own_layers(net: Net) -> list[str]:
        return [layer for layer in nets.layers(net) if layer in (CLIENT, nets.head_layers(net)[-1])]

    weights = weigh if policy or aligned else None
    phases = (Phase(is_trainable=lambda name: nets.layer_of(name) != GLOBAL, sample_weights=weights),)
    return Algorithm(
        "fedcp",
        masks.keep_layers(own_layers),
        phases=(*phases, Phase(0, sample_weights=renew)) if renewed and variant == "code" else phases,
        settings=settings,
        wrap=lambda net: separated(net, parts),
        loss=lambda inner, net: separated_loss(inner, net, lam if align else 0),
        encode=_mean_head if global_head else None,
        measures={"personalisation": PERSONALISATION} if policy else {},
        about=ABOUT,
    )


def _require(settings: dict[str, Any], of_policy: dict[str, Any]) -> None:
    """ValueError if a setting is unknown or has no effect."""
    _check.choice("context", settings["context"], ("both", "sample", "client", "random"))
    if not settings["align"] and settings["lam"] not in (0, _LAM):
        raise _check.NoEffectError("lam", f"with align=False, but got {settings['lam']:g}")
    if settings["policy"] and not settings["global_head"]:
        raise ValueError("a policy separates features for two heads, but got global_head=False. Add policy=False.")
    usual = dict(zip(of_policy, ("both", *Policy()), strict=True)) | {"variant": "paper"}
    for name, value in () if settings["policy"] else usual.items():
        _check.require_default(name, settings[name], value, "with policy=False")


def _features(net: Net, params: Params, samples: Samples) -> Tensor:
    """Features (client, sample, feature) of all training samples; ``client.share`` becomes the mean of s."""
    with torch.no_grad():
        found, total = [], torch.zeros(())
        for at in nets.sample_blocks(samples.live.shape[1]):
            out = cut(net, net.apply(params, samples.x[:, at]))
            found.append(out.features.clone())
            total = total + (out.share * samples.live[:, at, None]).sum(1)
        if SHARE in params:
            params[SHARE].copy_(total / samples.live.sum(1, keepdim=True))
        return torch.cat(found, 1)


def _mean_head(context: RoundContext) -> Params:
    """The mean of the global and the own head, in the global head's place (eq. 6)."""
    own = nets.head_layers(context.net)[-1]
    names = {name: own + name.removeprefix(GLOBAL) for name in context.after if nets.layer_of(name) == GLOBAL}
    return {name: (context.after[name] + context.after[mine]) / 2 for name, mine in names.items()}
