"""FedPHP: a client learns from the average of the models that it trained before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fedstat._utils import check
from fedstat.fl import nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, RoundContext, Samples
from fedstat.fl.algorithms.fedcp import Parts, cut, separated, separated_loss
from fedstat.fl.losses import distilled, softened
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers import pair

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedPHP",
    ("li2021php",),
    "everything",
    "a moving average of the models that it trained: its teacher, and what it predicts with",
    ("finetuned",),
)

_TEACHER_TEMPERATURE = 4.0


def fedphp(
    *,
    mu: Annotated[float, "μ, weight of the past in a client's moving average, when it is full"] = 0.9,
    horizon: Annotated[int, "Z, rounds of a client's own after which this weight is full"] = 50,
    lam: Annotated[float, "λ, weight of the distance from the moving average's features or predictions"] = 0.1,
    transfer: Annotated[Literal["mmd", "kd"], "what is compared with it: features (mmd) or predictions (kd)"] = "mmd",
) -> Algorithm:
    """A client keeps a moving average of the models that it trained, learns from it, and predicts with it.

    Li, Zhan, Shao, Li and Song (2021), "FedPHP: Federated personalization with inherited private models", ECML PKDD,
    LNCS 12975, 587-602. Local training starts from the server's model, on (1 − λ) cross-entropy + λ R. R is MMD², the
    squared maximum mean discrepancy between the batch's features and those that the client's inherited model gives; or
    the cross-entropy of predictions to softmax(outputs / 4) of the inherited model. Then the inherited model becomes
    μ_z of itself + (1 − μ_z) of the model trained, where μ_z = μ min(z / Z, 1) and z counts the earlier rounds in which
    the client was active. In its first round a client learns from the common start, and keeps the model trained.

    Shared, up and down: everything, averaged with weights n_k / Σ n_k. Private: the inherited model, with which the
    client predicts; who has never been active predicts with the server's. A round costs its client one further pass
    through its samples, as the inherited model stays the same during local training.

    Parameters
    ----------
    mu : float in [0, 1)
        μ; 0.9 in the published code.
    horizon : int
        Z. In the published code the number of rounds in which a client is expected to be active, participation × rounds
        of the run; here a number of its own, so that a run can be made longer.
    lam : float in [0, 1]
        λ; 0.05 and 0.1 in the published code. With 0, local training is FedAvg's.
    transfer : {"mmd", "kd"}
        R. The kernel of "mmd" is that of :func:`fedstat.fl.similarity.mmd_gradient`, with fixed widths; the authors'
        code takes its widths from the mean distance in the batch.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, with "mmd", if the network has no features.

    Notes
    -----
    Stored weights are the server's, which the clients download; ``probe="uploads"`` stores what clients trained.
    """
    check.real("mu", mu, low=0, high=1, open_high=True)
    check.integer("horizon", horizon)
    check.real("lam", lam, low=0, high=1)
    features = check.choice("transfer", transfer, ("mmd", "kd")) == "mmd"

    def teacher(net: Net, _: Params, samples: Samples, state: AlgorithmState) -> Tensor:
        """Features (client, sample, feature), or class probabilities, of the inherited models."""
        found = nets.forward(net, pair.model(state), samples.x)
        return cut(net, found).features if features else softened(found, _TEACHER_TEMPERATURE)

    def update_state(context: RoundContext) -> AlgorithmState:
        past = mu * (context.state.clients[pair.TIMES] / horizon).clamp(max=1)
        return pair.averaged(context, past)

    return Algorithm(
        "fedphp",
        phases=(Phase(sample_weights=teacher if lam else None),),
        settings={"mu": mu, "horizon": horizon, "lam": lam, "transfer": transfer},
        wrap=(lambda net: separated(net, Parts(global_head=False, policy=None))) if features else None,
        finetune=pair.TO_PREDICT,
        loss=lambda inner, net: (
            separated_loss(inner, net, lam, of_loss=1 - lam) if features else distilled(inner, lam, of_loss=1 - lam)
        ),
        init_state=pair.beginning,
        update_state=update_state,
        about=ABOUT,
    )
