"""Per-FedAvg, first-order and Hessian-free."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl import optim
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, BatchGradient, Phase
from fedstat.fl.nets import Params


def per_fedavg(
    *,
    alpha: Annotated[float, "α, learning rate of the steps that personalise the model"] = 0.01,
    finetune_steps: Annotated[int, "steps with which a client personalises the model before it predicts"] = 1,
    difference: Annotated[float, "δ, length of the difference that stands for the second derivative"] = 1e-3,
    hessian_free: bool = False,
) -> Algorithm:
    """A model from which one step of gradient descent leads to good models of the clients' own.

    Fallah, Mokhtari and Ozdaglar (2020), "Personalized federated learning with theoretical guarantees: a
    model-agnostic meta-learning approach", NeurIPS, arXiv:2002.07948, Algorithm 1. Clients train
    F(w) = f(w − α ∇f(w)): each batch is cut into parts D, D' and D'', every second or third sample; with
    w̃ = w − α ∇f(w; D), the first-order version (FO) takes ∇f(w̃; D') =: v for the gradient of F. The Hessian-free one
    (HF) takes (I − α H) v, with H v = (∇f(w + δ v; D'') − ∇f(w − δ v; D'')) / 2δ.
    A batch of fewer samples than parts uses some in several of them. β is the run's learning rate. The theory asks for
    α below 1 / (largest eigenvalue of H): above it, HF may climb, the more so on small batches.

    Up and down: the model, averaged with equal weights. Private: nothing; before it predicts, a client takes
    ``finetune_steps`` steps of stochastic gradient descent with learning rate α, each on a batch of its training
    samples, and then forgets this model.

    The text draws D, D' and D'' independently and of equal size: take batches that are so many times as large. α = 0 is
    FedAvg with equal weights: nothing is looked ahead, and no batch is cut. α = 0.01 is the paper's on MNIST; it gives
    no δ. The code of pFedMe's authors has a first-order version, in which D and D' are two batches in a row.

    Parameters
    ----------
    alpha : float >= 0
        α.
    finetune_steps : int >= 1
    difference : float > 0
        δ; only for ``hessian_free``.
    hessian_free : bool
        HF in place of FO: "per-fedavg-hf".

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check.real("alpha", alpha, low=0)
    check.real("difference", difference, low=0, open_low=True)
    check.integer("finetune_steps", finetune_steps)

    def first_order(gradient: BatchGradient, params: Params, _: float) -> Params:
        return gradient(_moved(params, gradient(params, 0, 2), -alpha), 1, 2)

    def free_of_hessians(gradient: BatchGradient, params: Params, _: float) -> Params:
        v = gradient(_moved(params, gradient(params, 0, 3), -alpha), 1, 3)
        ahead, behind = (gradient(_moved(params, v, step), 2, 3) for step in (difference, -difference))
        return {name: p.sub_(ahead[name].sub_(behind[name]), alpha=alpha / (2 * difference)) for name, p in v.items()}

    kind = "Hessian-free" if hessian_free else "first-order"
    direction = None if alpha == 0 else free_of_hessians if hessian_free else first_order
    settings = {"alpha": alpha, "finetune_steps": finetune_steps} | ({"difference": difference} if hessian_free else {})
    return Algorithm(
        "per-fedavg-hf" if hessian_free else "per-fedavg",
        phases=(Phase(gradient=direction),),
        finetune=(Phase(steps=finetune_steps, optimizer=optim.sgd(alpha)),) if alpha else (),
        settings=settings,
        weights=uniform,
        about=About(
            "Per-FedAvg (HF)" if hessian_free else "Per-FedAvg",
            ("fallah2020",),
            f"everything; a model one step from good ones of the clients' own ({kind})",
            "a copy after a step of gradient descent, to predict with",
            ("finetuned",),
        ),
    )


def _moved(params: Params, direction: Params, step: float) -> Params:
    """Parameters a step along a direction."""
    return params | {name: params[name].add(p, alpha=step) for name, p in direction.items()}
