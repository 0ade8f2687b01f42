"""FedAMP: every client is penalized towards a mean in which similar clients have larger weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl.aggregate import cosines, shared_part, squared_distances
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, InitContext, Measure, Phase, RoundContext
from fedstat.fl.nets import Params

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedAMP",
    ("huang2021",),
    "everything; clients stay near a mean of similar clients' models",
    "a model",
    ("finetuned", "ensemble"),
)

_HAS_CLOUD = "has cloud model"


_OF_COSINE = check.EffectIf("attention", lambda attention: attention == "cosine")


@check.effective
def fedamp(
    *,
    lam: Annotated[float, "λ, strength of the penalty on distance from the cloud model"] = 1.0,
    alpha: Annotated[float, "α, step towards other clients' models; the penalty is λ/2α"] = 1.0,
    sigma: Annotated[float, "σ, scale of attention: of squared distances, or times the cosine"] = 1.0,
    attention: Annotated[
        Literal["distance", "cosine"], "similarity of models: distance (FedAMP) or cosine (HeurFedAMP)"
    ] = "distance",
    self_weight: Annotated[float, "ξ_ii, a client's weight in its cloud model, with cosine", _OF_COSINE] = 0.1,
) -> Algorithm:
    """Add λ/2α ‖w − u_i‖² to each client's loss, u_i a mean in which similar clients have larger weights.

    Huang, Chu, Zhou, Wang, Liu, Pei and Zhang (2021), "Personalized cross-silo federated learning on non-IID data",
    AAAI, arXiv:2007.03797, Algorithm 1 (attentive message passing). After each round the server computes every
    client's cloud model u_i = Σ_j ξ_ij w_j, with ξ_ij = α exp(−‖w_i − w_j‖²/σ) / σ for j ≠ i and ξ_ii = 1 − Σ_j ξ_ij.
    HeurFedAMP (``attention="cosine"``), the paper's proposal for deep networks, fixes ξ_ii; the other ξ_ij are
    proportional to exp(σ cos(w_i, w_j)).

    Upload: the model. Download: the cloud model. Personal: the model w_i, with which a client predicts and from which
    it trains; the paper does not say from where training starts. The penalty pulls entries that are not shared towards
    their values after the client's last training.

    Parameters
    ----------
    lam, alpha, sigma : float
        In the paper α decreases with the rounds; it gives no value for all problems. Defaults are PFLlib's, whose
        penalty is not squared. Distances grow with the network: see ``measures/attention`` before choosing σ. If
        Σ_j ξ_ij over j ≠ i exceeds 1, α is too large for u_i to be a mean; α is then lowered for this client, so that
        ξ_ii = 0. λ = 0 is Local.
    attention : {"distance", "cosine"}
    self_weight : float
        Of "cosine" only.

    Raises
    ------
    ValueError
        If a setting is out of range, or ``self_weight`` has no effect.

    Notes
    -----
    Attention is between the clients selected in a round; the other clients keep their cloud models. Running statistics
    are part of the cloud models, but not of the distances. ``measures/attention`` (client, other) holds ξ. The global
    model, from which unseen clients start, is the mean of all models.
    """
    check.real("lam", lam, low=0)
    check.real("alpha", alpha, low=0, open_low=True)
    check.real("sigma", sigma, low=0, open_low=True)
    check.real("self_weight", self_weight, low=0, high=1)
    check.choice("attention", attention, ("distance", "cosine"))
    attention_weights = _Attention(alpha, sigma, self_weight if attention == "cosine" else None)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[name]).mul_(lam / alpha) for name, p in params.items()}

    return Algorithm(
        "fedamp",
        phases=(Phase(penalty=penalty if lam else None, anchor=_cloud_or_download),),
        settings={"lam": lam, "alpha": alpha, "sigma": sigma, "attention": attention, "self_weight": self_weight},
        init_state=_init_clouds,
        update_state=lambda context: _update_clouds(context, context.once(attention_weights)),
        on_download=lambda context: context.client_params,
        measures={
            "attention": Measure(
                lambda context: context.once(attention_weights), ("client", "other"), {}, "attention ξ"
            )
        },
        about=ABOUT,
    )


@dataclass(frozen=True)
class _Attention:
    """Weights ξ (client, client) of the selected clients' models in their cloud models; rows sum to 1."""

    alpha: float
    sigma: float
    self_weight: float | None

    def __call__(self, context: RoundContext) -> Tensor:
        models = shared_part(context, context.after)
        if self.self_weight is None:
            weights = (squared_distances(models) / -self.sigma).exp() * (self.alpha / self.sigma)
            weights.fill_diagonal_(0)
            weights = weights / weights.sum(1, keepdim=True).clamp(min=1)
        else:
            scores = (self.sigma * cosines(models)).fill_diagonal_(-torch.inf)
            weights = (1 - self.self_weight) * scores.softmax(1).nan_to_num()  # a single client has NaN
        return (weights + torch.diag(1 - weights.sum(1))).float()


def _init_clouds(context: InitContext) -> AlgorithmState:
    n, device = len(context.sizes), context.device
    clouds = {name: torch.zeros(1, *s, device=device).expand(n, *s) for name, s in context.net.shapes.items()}
    return AlgorithmState(clouds | {_HAS_CLOUD: torch.zeros(n, dtype=torch.bool, device=device)})


def _update_clouds(context: RoundContext, attention: Tensor) -> AlgorithmState:
    """Return the state of the selected clients: their cloud models."""
    is_shared = {name: bool(mask.any()) for name, mask in context.mask.shared.items()}
    clouds = {name: torch.tensordot(attention, p, 1) if is_shared[name] else p for name, p in context.after.items()}
    return AlgorithmState(clouds | {_HAS_CLOUD: torch.ones_like(context.state.clients[_HAS_CLOUD])})


def _cloud_or_download(download: Params, state: AlgorithmState) -> Params:
    """Return each client's cloud model, or its download if it has no cloud model."""
    has_cloud = state.clients[_HAS_CLOUD]
    return {n: torch.where(has_cloud.view(-1, *(1,) * (p.ndim - 1)), state.clients[n], p) for n, p in download.items()}
