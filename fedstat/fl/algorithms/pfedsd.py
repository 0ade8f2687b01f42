"""pFedSD: a client learns from the model with which it ended the last round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fedstat._utils import check
from fedstat._utils.lazy import torch
from fedstat.fl import nets
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples
from fedstat.fl.losses import distilled, softened
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers import pair

if TYPE_CHECKING:
    from torch import Tensor

ABOUT = About(
    "pFedSD",
    ("jin2022",),
    "everything",
    "the model that it trained last: its teacher, and what it predicts with",
    ("finetuned",),
)


def pfedsd(
    *,
    lam: Annotated[float, "λ, weight of the distance from the client's last model"] = 1.0,
    temperature: Annotated[float, "temperature at which class probabilities are compared"] = 1.0,
) -> Algorithm:
    """FedAvg with λ T² KL(q ‖ p) added to each client's loss, where q is what its own last model predicts.

    Jin, Bai, Yao, Dai, Gu, Yu and Sun (2022), "Personalized edge intelligence via federated self-knowledge
    distillation", IEEE Transactions on Parallel and Distributed Systems 34(2), 567-580. The teacher is the model with
    which the client ended the last round in which it was active; p and q are softmax(outputs / T) of the model and of
    the teacher. In the first round in which a client is active it has no teacher, and the loss is FedAvg's. λ = 0
    trains as FedAvg does.

    Shared, up and down: everything, averaged with weights n_k / Σ n_k (in the published code: equal weights). Private:
    the last model, with which the client also predicts; who has never been active predicts with the server's.
    λ and T are those that the published code has by default.

    Parameters
    ----------
    lam : float >= 0
        λ.
    temperature : float > 0
        T.

    Raises
    ------
    ValueError
        If a setting is out of range.

    Notes
    -----
    Stored weights are the server's, which the clients download; ``probe="uploads"`` stores the clients' own.
    """
    check.real("lam", lam, low=0)
    check.real("temperature", temperature, low=0, open_low=True)

    def teacher(net: Net, _: Params, samples: Samples, state: AlgorithmState) -> Tensor:
        """Class probabilities (client, sample, class) of the last models; 0 for clients that have none."""
        has = (state.clients[pair.TIMES] > 0).view(-1, 1, 1)
        return softened(nets.forward(net, pair.model(state), samples.x), temperature) * has

    return Algorithm(
        "pfedsd",
        phases=(Phase(sample_weights=teacher if lam else None),),
        settings={"lam": lam, "temperature": temperature},
        finetune=pair.TO_PREDICT,
        loss=lambda inner, _: distilled(inner, lam * temperature**2, temperature=temperature),
        init_state=pair.beginning,
        update_state=lambda context: pair.averaged(context, torch.zeros_like(context.weights)),
        about=ABOUT,
    )
