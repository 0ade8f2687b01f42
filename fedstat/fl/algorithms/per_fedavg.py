"""Per-FedAvg: a meta-learned global model, by first-order or Hessian-free steps."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl import optim
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, BatchGradient, Phase
from fedstat.fl.nets import Params


def per_fedavg(
    *,
    alpha: Annotated[float, "α, learning rate of the steps that personalize the model"] = 0.01,
    finetune_steps: Annotated[int, "steps with which a client personalizes the model before it predicts"] = 1,
    difference: Annotated[float, "δ, step of the finite difference for the second derivative"] = 1e-3,
    hessian_free: bool = False,
) -> Algorithm:
    """Meta-learn a global model that one local step adapts.

    Fallah, Mokhtari and Ozdaglar (2020), "Personalized federated learning with theoretical guarantees: a
    model-agnostic meta-learning approach", NeurIPS, arXiv:2002.07948, Algorithm 1. Clients train
    F(w) = f(w − α ∇f(w)). The gradient of F is estimated on parts D, D' and D'' of each batch, every second or third
    sample. With w̃ = w − α ∇f(w; D) and v = ∇f(w̃; D'), it is v in the first-order version (FO), which needs D and D'.
    In the Hessian-free version (HF) it is (I − α H) v with H v = (∇f(w + δ v; D'') − ∇f(w − δ v; D'')) / 2δ. A batch
    with fewer samples than parts uses samples in several parts. β is the run's learning rate. The theory requires α
    below 1 / (largest eigenvalue of H); above it, HF may increase the loss, above all on small batches.

    Shared (upload and download): the model, averaged with equal weights. Personal: nothing. Before it predicts, a
    client takes ``finetune_steps`` steps of stochastic gradient descent with learning rate α, each on a batch of its
    training samples; the adapted model is then discarded.

    The text draws D, D' and D'' independently and of equal size, so use batches that are two (FO) or three (HF) times
    as large. α = 0 is FedAvg with equal weights; batches are then not divided. α = 0.01 is the paper's value on MNIST;
    it gives no δ. The code of pFedMe's authors has a first-order version in which D and D' are consecutive batches.

    Parameters
    ----------
    alpha : float >= 0
        α.
    finetune_steps : int >= 1
        Number of local steps before a client predicts.
    difference : float > 0
        δ; only for ``hessian_free``.
    hessian_free : bool
        True: HF, "per-fedavg-hf"; False: FO.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check.real("alpha", alpha, low=0)
    check.real("difference", difference, low=0, open_low=True)
    check.integer("finetune_steps", finetune_steps)

    def first_order(gradient: BatchGradient, params: Params, _: float) -> Params:
        return gradient(_step(params, gradient(params, 0, 2), -alpha), 1, 2)

    def without_hessian(gradient: BatchGradient, params: Params, _: float) -> Params:
        v = gradient(_step(params, gradient(params, 0, 3), -alpha), 1, 3)
        forward, backward = (gradient(_step(params, v, step), 2, 3) for step in (difference, -difference))
        scale = alpha / (2 * difference)
        return {name: p.sub_(forward[name].sub_(backward[name]), alpha=scale) for name, p in v.items()}

    kind = "Hessian-free" if hessian_free else "first-order"
    gradient = None if alpha == 0 else without_hessian if hessian_free else first_order
    settings = {"alpha": alpha, "finetune_steps": finetune_steps} | ({"difference": difference} if hessian_free else {})
    return Algorithm(
        "per-fedavg-hf" if hessian_free else "per-fedavg",
        phases=(Phase(gradient=gradient),),
        finetune=(Phase(steps=finetune_steps, optimizer=optim.sgd(alpha)),) if alpha else (),
        settings=settings,
        weights=uniform,
        about=About(
            "Per-FedAvg (HF)" if hessian_free else "Per-FedAvg",
            ("fallah2020",),
            f"everything; a meta-learned global model ({kind})",
            "a copy after a step of gradient descent, to predict with",
            ("finetuned",),
        ),
    )


def _step(params: Params, direction: Params, size: float) -> Params:
    """Return the parameters after a step along a direction."""
    return params | {name: params[name].add(p, alpha=size) for name, p in direction.items()}
