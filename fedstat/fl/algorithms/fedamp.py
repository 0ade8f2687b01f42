"""FedAMP: every client is drawn towards a mean of its own, in which similar clients weigh more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, InitContext, Measure, Phase, RoundContext
from fedstat.fl.nets import Params
from fedstat.fl.similarity import cosines, shared_part, squared_distances

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedAMP",
    ("huang2021",),
    "everything; clients stay near a mean of similar clients' models",
    "a model",
    ("finetuned", "ensemble"),
)

_SELF = 0.1
_KNOWN = "has cloud model"


def fedamp(
    *,
    lam: Annotated[float, "λ, strength of the penalty on distance from the cloud model"] = 1.0,
    alpha: Annotated[float, "α, step towards other clients' models; the penalty is λ/2α"] = 1.0,
    sigma: Annotated[float, "σ, scale of attention: of squared distances, or times the cosine"] = 1.0,
    attention: Annotated[
        Literal["distance", "cosine"], "similarity of models: distance (FedAMP) or cosine (HeurFedAMP)"
    ] = "distance",
    self_weight: Annotated[float, "ξ_ii, a client's weight in its own cloud model, with cosine"] = _SELF,
) -> Algorithm:
    """Attentive message passing: λ/2α ‖w − u_i‖² is added to a client's loss, u_i a mean of similar clients' models.

    Huang, Chu, Zhou, Wang, Liu, Pei and Zhang (2021), "Personalized cross-silo federated learning on non-IID data",
    AAAI, arXiv:2007.03797, Algorithm 1. After each round the server makes every client's cloud model
    u_i = Σ_j ξ_ij w_j, with ξ_ij = α exp(−‖w_i − w_j‖²/σ) / σ for j ≠ i and ξ_ii = 1 − Σ_j ξ_ij. HeurFedAMP
    (``attention="cosine"``), which the paper proposes for deep networks, sets ξ_ii and divides the rest as
    exp(σ cos(w_i, w_j)).

    Up: the model. Down: the cloud model. Private: the model w_i, with which a client predicts and from which it trains;
    where the search for the minimum starts is left open. Entries that are not shared stay near what they were.

    Parameters
    ----------
    lam, alpha, sigma : float
        The paper lets α fall with the rounds, and has no value for all problems. Defaults are those of PFLlib, whose
        penalty is not squared. Distances grow with the network: see ``measures/attention`` before choosing σ.
        Where Σ_j ξ_ij over others exceeds 1, α is too large for u_i to be a mean; it is then lowered for this client,
        so that ξ_ii is 0. λ = 0 is Local.
    attention : {"distance", "cosine"}
    self_weight : float
        Only of "cosine".

    Raises
    ------
    ValueError
        If a setting is out of range, or ``self_weight`` has no effect.

    Notes
    -----
    Attention is between the clients that are active in a round; others keep their cloud models. Running statistics are
    part of the cloud models, but not of the distances. ``measures/attention`` (client, other) holds ξ. The server's
    copy, with which new clients begin, is the mean of all models.
    """
    check.real("lam", lam, low=0)
    check.real("alpha", alpha, low=0, open_low=True)
    check.real("sigma", sigma, low=0, open_low=True)
    check.real("self_weight", self_weight, low=0, high=1)
    if check.choice("attention", attention, ("distance", "cosine")) == "distance" and self_weight != _SELF:
        raise check.NoEffectError("self_weight", f"with attention='distance', but got {self_weight:g}")
    weigh = _Attention(alpha, sigma, self_weight if attention == "cosine" else None)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[name]).mul_(lam / alpha) for name, p in params.items()}

    return Algorithm(
        "fedamp",
        phases=(Phase(penalty=penalty if lam else None, anchor=_cloud_or_download),),
        settings={"lam": lam, "alpha": alpha, "sigma": sigma, "attention": attention, "self_weight": self_weight},
        init_state=_no_clouds,
        update_state=lambda context: _clouds(context, context.once(weigh)),
        on_download=lambda context: context.client_params,
        measures={"attention": Measure(lambda context: context.once(weigh), ("client", "other"), {}, "attention ξ")},
        about=ABOUT,
    )


@dataclass(frozen=True)
class _Attention:
    """Weights ξ (active, active) of active clients' models in each other's cloud models; rows sum to 1."""

    alpha: float
    sigma: float
    self_weight: float | None

    def __call__(self, context: RoundContext) -> Tensor:
        models = shared_part(context, context.after)
        if self.self_weight is None:
            others = (squared_distances(models) / -self.sigma).exp() * (self.alpha / self.sigma)
            others.fill_diagonal_(0)
            others = others / others.sum(1, keepdim=True).clamp(min=1)
        else:
            scores = (self.sigma * cosines(models)).fill_diagonal_(-torch.inf)
            others = (1 - self.self_weight) * scores.softmax(1).nan_to_num()  # NaN of a client that is alone
        return (others + torch.diag(1 - others.sum(1))).float()


def _no_clouds(context: InitContext) -> AlgorithmState:
    n, device = len(context.sizes), context.device
    clouds = {name: torch.zeros(1, *s, device=device).expand(n, *s) for name, s in context.net.shapes.items()}
    return AlgorithmState(clouds | {_KNOWN: torch.zeros(n, dtype=torch.bool, device=device)})


def _clouds(context: RoundContext, attention: Tensor) -> AlgorithmState:
    """Cloud models of the active clients."""
    shared = {name: bool(mask.any()) for name, mask in context.mask.shared.items()}
    clouds = {name: torch.tensordot(attention, p, 1) if shared[name] else p for name, p in context.after.items()}
    return AlgorithmState(clouds | {_KNOWN: torch.ones_like(context.state.clients[_KNOWN])})


def _cloud_or_download(download: Params, state: AlgorithmState) -> Params:
    """The cloud model of a client that has one, else what it begins with."""
    known = state.clients[_KNOWN]
    return {n: torch.where(known.view(-1, *(1,) * (p.ndim - 1)), state.clients[n], p) for n, p in download.items()}
