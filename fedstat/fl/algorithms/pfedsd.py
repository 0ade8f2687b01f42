"""pFedSD: a client's last trained model teaches its next model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.losses import distilled, require_classes, softened
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers import pair

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "pFedSD",
    ("jin2022",),
    "everything",
    "its last trained model, which teaches and predicts",
    ("finetuned",),
)


def pfedsd(
    *,
    lam: Annotated[float, "λ, weight of the distance from the client's last model"] = 1.0,
    temperature: Annotated[float, "temperature at which class probabilities are compared"] = 1.0,
) -> Algorithm:
    """Run FedAvg with λ T² KL(q ‖ p) in each client's loss, q the predictions of its last trained model.

    Jin, Bai, Yao, Dai, Gu, Yu and Sun (2022), "Personalized edge intelligence via federated self-knowledge
    distillation", IEEE Transactions on Parallel and Distributed Systems 34(2), 567-580. The teacher is the model that
    the client trained in the last round that selected it; p and q are softmax(outputs / T) of the model and the
    teacher. In a client's first round it has no teacher, and the loss is FedAvg's. With λ = 0, training is FedAvg's.

    Shared (upload and download): all parameters, averaged with weights n_k / Σ n_k (equal weights in the published
    code). Personal: the last trained model, with which the client also predicts; a client that was never selected
    predicts with the global model.

    Parameters
    ----------
    lam : float >= 0
        λ; the default is the published code's.
    temperature : float > 0
        T; the default is the published code's.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Notes
    -----
    The group ``weights`` of a run has the global model's, which clients download; ``trained`` has the clients' weights
    after local training.
    """
    check.real("lam", lam, low=0)
    check.real("temperature", temperature, low=0, open_low=True)

    def teacher(net: Net, _: Params, samples: Samples, state: AlgorithmState) -> Tensor:
        """Return class probabilities (client, sample, class) of the last models; 0 for clients without one."""
        has_teacher = (state.clients[pair.TIMES] > 0).view(-1, 1, 1)
        return softened(nets.forward(net, pair.model(state), samples.x), temperature) * has_teacher

    return Algorithm(
        "pfedsd",
        phases=(Phase(sample_weights=teacher if lam else None),),
        settings={"lam": lam, "temperature": temperature},
        finetune=pair.TO_PREDICT,
        loss=lambda inner, _: distilled(
            require_classes(inner, "pfedsd", "for its soft labels"), lam * temperature**2, temperature=temperature
        ),
        init_state=pair.beginning,
        update_state=lambda context: pair.averaged(context, torch.zeros_like(context.weights)),
        about=ABOUT,
    )
