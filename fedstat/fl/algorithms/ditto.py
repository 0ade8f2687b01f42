"""Ditto."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl.algorithm import About, Algorithm, Phase
from fedstat.fl.nets import Params
from fedstat.fl.wrappers.pair import counterpart, is_own, pair, pair_loss, share_global

ABOUT = About(
    "Ditto",
    ("li2021",),
    "a global model",
    "a second model, held near the global one",
    ("local_train",),
)


def ditto(
    *,
    lam: Annotated[float, "λ, strength of the pull of a client's own model towards the global one"] = 1.0,
    own_epochs: Annotated[int | None, "epochs of training a client's own model"] = None,
) -> Algorithm:
    """FedAvg, and beside it a model of every client's own, v, trained on F(v) + λ/2 ‖v − w(t)‖², w(t) as downloaded.

    Li, Hu, Beirami and Smith (2021), "Ditto: fair and robust federated learning through personalization", ICML,
    arXiv:2012.04221, Algorithm 1. Up and down: the global model w. Private: v, with which a client predicts. The global
    model is FedAvg's exactly, whatever λ; with λ = 0 every v is trained alone. λ = 1 is the paper's for clients that
    nobody attacks, where there is too little data to choose.

    The text leaves the way to w open: it is FedAvg here, with weights n_k / Σ n_k; the published code draws clients in
    proportion to n_k and weighs them equally. There a client trains w and v in turn on the same batches; here it trains
    w first, then v, each on batches of its own, so that v may have its own number of epochs (s of Algorithm 1). An idle
    client keeps its v.

    Parameters
    ----------
    lam : float >= 0
        λ.
    own_epochs : int >= 1, optional
        None: the run's local epochs.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check.real("lam", lam, low=0)
    if own_epochs is not None:
        check.integer("own_epochs", own_epochs)

    def penalty(params: Params, anchor: Params) -> Params:
        return {name: (p - anchor[counterpart(name)]).mul_(lam) for name, p in params.items() if is_own(name)}

    own = Phase(
        own_epochs, is_trainable=is_own, penalty=penalty if lam else None, anchor="download" if lam else "phase"
    )
    return Algorithm(
        "ditto",
        share_global,
        phases=(Phase(is_trainable=lambda name: not is_own(name)), own),
        settings={"lam": lam, "own_epochs": own_epochs},
        wrap=pair,
        loss=pair_loss,
        about=ABOUT,
    )
