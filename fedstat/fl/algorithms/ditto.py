"""Ditto: a global model, and a personal model of every client near it."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl.algorithm import About, Algorithm, Phase
from fedstat.fl.nets import Params
from fedstat.fl.wrappers.pair import counterpart, is_personal, pair, pair_loss, share_global

ABOUT = About(
    "Ditto",
    ("li2021",),
    "a global model",
    "a personal model, held near the global model",
    ("local_train",),
)


def ditto(
    *,
    lam: Annotated[float, "λ, strength of the penalty on distance of the personal from the global model"] = 1.0,
    own_epochs: Annotated[int | None, "epochs of training the personal model"] = None,
) -> Algorithm:
    """Train FedAvg's global model w and a personal model v of every client, on F(v) + λ/2 ‖v − w(t)‖².

    Li, Hu, Beirami and Smith (2021), "Ditto: fair and robust federated learning through personalization", ICML,
    arXiv:2012.04221, Algorithm 1. Shared (upload and download): the global model w; w(t) is w as downloaded. Personal:
    v, with which a client predicts. The global model equals FedAvg's for any λ; with λ = 0 every v is trained alone.
    The paper uses λ = 1 without attacks if there are too few data to tune it.

    The text does not fix how w is trained. Here it is FedAvg, with weights n_k / Σ n_k; the published code draws
    clients in proportion to n_k and weighs them equally. In that code a client trains w and v in turn on the same
    batches. Here it trains w first, then v, on separate batches, so that v may have its own number of epochs (s of
    Algorithm 1). A client that is not selected keeps its v.

    Parameters
    ----------
    lam : float >= 0
        λ.
    own_epochs : int >= 1, optional
        Epochs of training v. None: the run's local epochs.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check.real("lam", lam, low=0)
    if own_epochs is not None:
        check.integer("own_epochs", own_epochs)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[counterpart(name)]).mul_(lam) for name, p in params.items() if is_personal(name)}

    personal_phase = Phase(
        own_epochs, is_trainable=is_personal, penalty=penalty if lam else None, anchor="download" if lam else "phase"
    )
    return Algorithm(
        "ditto",
        share_global,
        phases=(Phase(is_trainable=lambda name: not is_personal(name)), personal_phase),
        settings={"lam": lam, "own_epochs": own_epochs},
        wrap=pair,
        loss=pair_loss,
        about=ABOUT,
    )
