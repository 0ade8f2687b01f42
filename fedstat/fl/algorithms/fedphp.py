"""FedPHP: a client's inherited model, an average of the models that it trained, teaches its next model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from fedstat._utils import check
from fedstat.fl import nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, RoundContext, Samples
from fedstat.fl.algorithms.fedcp import Parts, cut, separated, separated_loss
from fedstat.fl.losses import distilled, require_classes, softened
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers import pair

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "FedPHP",
    ("li2021php",),
    "everything",
    "a moving average of its trained models, which teaches and predicts",
    ("finetuned",),
)

_TEACHER_TEMPERATURE = 4.0


def fedphp(
    *,
    mu: Annotated[float, "μ, final weight of the past in a client's moving average of models"] = 0.9,
    horizon: Annotated[int, "Z, rounds of a client after which the past has its final weight"] = 50,
    lam: Annotated[float, "λ, weight of the distance from the moving average's features or predictions"] = 0.1,
    transfer: Annotated[Literal["mmd", "kd"], "object of this distance: features (mmd) or predictions (kd)"] = "mmd",
) -> Algorithm:
    """Keep a moving average of each client's trained models; the client learns from it and predicts with it.

    Li, Zhan, Shao, Li and Song (2021), "FedPHP: Federated personalization with inherited private models", ECML PKDD,
    LNCS 12975, 587-602. Local training starts from the global model and minimizes (1 − λ) cross-entropy + λ R. R is
    MMD², the squared maximum mean discrepancy between the batch's features and the inherited model's features; or the
    cross-entropy of predictions to softmax(outputs / 4) of the inherited model. Then the inherited model becomes μ_z
    times itself + (1 − μ_z) times the trained model. Here μ_z = μ min(z / Z, 1), and z counts the earlier rounds that
    selected the client. In its first round a client learns from the common initial parameters; its trained model
    becomes the inherited model.

    Shared (upload and download): all parameters, averaged with weights n_k / Σ n_k. Personal: the inherited model, with
    which the client predicts; a client that was never selected predicts with the global model. A round costs one
    further pass through a client's samples, because the inherited model is fixed during local training.

    Parameters
    ----------
    mu : float in [0, 1)
        μ; 0.9 in the published code.
    horizon : int
        Z. In the published code, the expected number of rounds that select a client: participation × rounds of the run.
        Here it is a setting, so that a run can be extended.
    lam : float in [0, 1]
        λ; 0.05 and 0.1 in the published code. With 0, local training is FedAvg's.
    transfer : {"mmd", "kd"}
        R. "mmd" uses the kernel of :func:`fedstat.fl.algorithms.fedcp.mmd_gradient`, with fixed widths; the authors'
        code sets the widths by the mean distance in the batch.

    Raises
    ------
    ValueError
        If a setting is out of range; before the first round, with "mmd", if the network has no features.

    Notes
    -----
    The group ``weights`` of a run has the global model's, which clients download; ``trained`` has the clients' weights
    after local training.
    """
    check.real("mu", mu, low=0, high=1, open_high=True)
    check.integer("horizon", horizon)
    check.real("lam", lam, low=0, high=1)
    features = check.choice("transfer", transfer, ("mmd", "kd")) == "mmd"

    def teacher(net: Net, _: Params, samples: Samples, state: AlgorithmState) -> Tensor:
        """Return features (client, sample, feature), or class probabilities, of the inherited models."""
        outputs = nets.forward(net, pair.model(state), samples.x)
        return cut(net, outputs).features if features else softened(outputs, _TEACHER_TEMPERATURE)

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
            separated_loss(inner, net, lam, of_loss=1 - lam)
            if features
            else distilled(require_classes(inner, "fedphp transfer=kd", "for its soft labels"), lam, of_loss=1 - lam)
        ),
        init_state=pair.beginning,
        update_state=update_state,
        about=ABOUT,
    )
