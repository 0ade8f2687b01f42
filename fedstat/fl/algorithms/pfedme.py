"""pFedMe: personal models with Moreau envelopes."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples, Variant
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.pair import counterpart, is_personal, pair, pair_loss, share_global

ABOUT = About(
    "pFedMe",
    ("dinh2020",),
    "a global model, which follows the personal models",
    "a personal model, held near the global model",
    ("local_train",),
)


def pfedme(
    *,
    lam: Annotated[float, "λ, strength of the penalty on distance of the personal from the global model"] = 15.0,
    eta: Annotated[float, "η, learning rate of the global model"] = 0.005,
    inner_steps: Annotated[int, "K, steps of the personal model on every batch"] = 5,
    variant: Variant = "paper",
) -> Algorithm:
    """Train personal models θ, penalized towards the global w.

    Dinh, Tran and Nguyen (2020), "Personalized federated learning with Moreau envelopes", NeurIPS, arXiv:2006.08848,
    Algorithm 1. On every batch a client takes K steps on f(θ) + λ/2 ‖θ − w‖², with the run's optimizer and learning
    rate. Then w ← w − η λ (w − θ). Shared (upload and download): w. Personal: θ, with which a client predicts. The
    paper's β is the run's ``server_lr``. The learning rate must be below 2/λ, or the steps of θ diverge.

    The text does not say where θ starts. As in the published code, it starts each round from the downloaded w and
    continues from batch to batch. In that code all clients train in every round, and the server uses some of their
    updates; here clients that are not selected do not train, and keep their θ.

    Parameters
    ----------
    lam : float > 0
        λ.
    eta : float > 0
        η, with η λ <= 1, so that a step of w does not pass θ.
    inner_steps : int >= 1
        K.
    variant : {"paper", "code"}, default "paper"
        The paper weighs all clients equally; the published code weighs them by numbers of samples.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check.real("lam", lam, low=0, open_low=True)
    check.real("eta", eta, low=0, open_low=True)
    check.integer("inner_steps", inner_steps)
    check.choice("variant", variant, ("paper", "code"))
    if eta * lam > 1:
        raise ValueError(
            f"eta * lam must be at most 1, or the global model steps past the personal models, but got eta={eta:g}, "
            f"lam={lam:g}. With this lam, use at most eta={1 / lam:g}."
        )

    def start_from_global(_: Net, params: Params, __: Samples, ___: AlgorithmState) -> None:
        for name, p in params.items():
            if is_personal(name):
                p.copy_(params[counterpart(name)])

    def penalty(params: Params, _: Params) -> Params:
        return {name: (p - params[counterpart(name)]).mul_(lam) for name, p in params.items() if is_personal(name)}

    def post_step(params: Params, _: Params, __: float, step: int) -> None:
        if (step + 1) % inner_steps == 0:
            for name, p in params.items():
                if is_personal(name):
                    params[counterpart(name)].lerp_(p, eta * lam)

    phase = Phase(
        is_trainable=is_personal,
        on_phase_start=start_from_global,
        penalty=penalty,
        post_step=post_step,
        repeats=inner_steps,
    )
    return Algorithm(
        "pfedme",
        share_global,
        phases=(phase,),
        settings={"lam": lam, "eta": eta, "inner_steps": inner_steps, "variant": variant},
        wrap=pair,
        loss=pair_loss,
        weights=uniform if variant == "paper" else None,
        common_params=lambda params: {name: params[counterpart(name)] for name in params if is_personal(name)},
        about=ABOUT,
    )
