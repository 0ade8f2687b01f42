"""pFedMe."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, AlgorithmState, Phase, Samples, Variant
from fedstat.fl.nets import Net, Params
from fedstat.fl.wrappers.pair import counterpart, is_own, pair, pair_loss, share_global

ABOUT = About(
    "pFedMe",
    ("dinh2020",),
    "a global model, which follows the clients' own",
    "a second model, held near the global one",
    ("local_train",),
)


def pfedme(
    *,
    lam: Annotated[float, "λ, strength of the pull of a client's own model towards the global one"] = 15.0,
    eta: Annotated[float, "η, learning rate of the global model"] = 0.005,
    inner_steps: Annotated[int, "K, steps of a client's own model on every batch"] = 5,
    variant: Variant = "paper",
) -> Algorithm:
    """Models θ of the clients' own, each near the client's copy w of the global model, which follows them.

    Dinh, Tran and Nguyen (2020), "Personalized federated learning with Moreau envelopes", NeurIPS, arXiv:2006.08848,
    Algorithm 1. On every batch a client takes K steps of the run's optimiser and learning rate on
    f(θ) + λ/2 ‖θ − w‖², then w ← w − η λ (w − θ). Up and down: w. Private: θ, with which a client predicts. The
    paper's β is the run's ``server_lr``. The learning rate must be below 2/λ, or the steps of θ diverge.

    The text does not say where θ starts: as in the published code, it starts each round as the downloaded w and goes on
    from batch to batch. There all clients train in every round, and the server hears some of them; here the others are
    idle and keep their θ.

    Parameters
    ----------
    lam : float > 0
        λ.
    eta : float > 0
        η, with η λ <= 1: a step of w ends at θ at the latest.
    inner_steps : int >= 1
        K.
    variant : {"paper", "code"}, default "paper"
        The paper weighs all clients equally; the published code by their numbers of samples.

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
            f"eta * lam must be at most 1, or the global model steps past the clients' own, but got eta={eta:g}, "
            f"lam={lam:g}. With this lam, eta can be at most {1 / lam:g}."
        )

    def begin(_: Net, params: Params, __: Samples, ___: AlgorithmState) -> None:
        for name, p in params.items():
            if is_own(name):
                p.copy_(params[counterpart(name)])

    def penalty(params: Params, _: Params) -> Params:
        return {name: (p - params[counterpart(name)]).mul_(lam) for name, p in params.items() if is_own(name)}

    def after(params: Params, _: Params, __: float, step: int) -> None:
        if (step + 1) % inner_steps == 0:
            for name, p in params.items():
                if is_own(name):
                    params[counterpart(name)].lerp_(p, eta * lam)

    return Algorithm(
        "pfedme",
        share_global,
        phases=(
            Phase(is_trainable=is_own, sample_weights=begin, penalty=penalty, post_step=after, repeats=inner_steps),
        ),
        settings={"lam": lam, "eta": eta, "inner_steps": inner_steps, "variant": variant},
        wrap=pair,
        loss=pair_loss,
        weights=uniform if variant == "paper" else None,
        about=ABOUT,
    )
