"""FedDecomp: every weight is the sum of a shared full part and a personal low-rank part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np

from fedstat._utils import check
from fedstat.fl import masks
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, Phase, Variant
from fedstat.fl.wrappers.low_rank import FACTORS, ConvRank, LinearRank, decomposed, require_ranks

ABOUT = About(
    "FedDecomp",
    ("wu2024",),
    "a full part of every weight, and all other parameters",
    "a low-rank part of every weight, which is trained first",
)
MEANS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray] | None] = {
    "samples": None,
    "uniform": uniform,
    "all": lambda _, active, clients: np.full(len(active), 1 / clients),
}


def feddecomp(
    *,
    rank_linear: LinearRank = 0.6,
    rank_conv: ConvRank = 0.6,
    lora_epochs: Annotated[int | None, "epochs E_lora of training the personal part"] = None,
    global_epochs: Annotated[int | None, "epochs E_global of training the shared part, after the personal one"] = None,
    alternating: Annotated[bool, "train one part after the other, or both at once"] = True,
    reverse: Annotated[bool, "exchange the roles: share the low-rank part"] = False,
    mean: Annotated[
        Literal["samples", "uniform", "all"] | None, "weights of the mean: samples, uniform, or all (idle clients too)"
    ] = None,
    variant: Variant = "paper",
) -> Algorithm:
    """W = σ + τ with τ = BA of low rank: a client first trains its private B and A, then the shared σ.

    Wu, Liu, Niu, Wang, Tang, Zhu and Su (2024), "Decoupling general and personalized knowledge in federated learning
    via additive and low-rank decomposition", ACM MM, §3, Algorithm 1; weights and ranks as
    :func:`fedstat.fl.wrappers.low_rank.decomposed` says. Up and down: σ and all that is no weight. Private: B and A.

    Parameters
    ----------
    rank_linear, rank_conv : float, default 0.6
        R_l and R_c, in (0, 1]; the default is the best of Table 2 for CIFAR-10.
    lora_epochs, global_epochs : int, optional
        E_lora and E_global. Of the run's local epochs E, one that is not given gets what the other leaves
        (E_lora + E_global = E); if neither is, E_lora is two fifths of E, rounded down, at least 1 (2 of 5, as in the
        published code; the text names no number). A single epoch cannot be divided: unless either is given, it trains
        both parts at once.
    alternating : bool, default True
        False: both parts are trained at once, for E_lora + E_global epochs (Table 3).
    reverse : bool, default False
        BA is shared, σ and all that is no weight are private (Table 5). "Other training strategy is the same": the
        private part is trained first, here σ, for E_lora epochs, then the shared one, here BA, for E_global.
    mean : {"samples", "uniform", "all"}, optional
        Weights of the mean of the active clients: by numbers of samples, with which E_lora = 0 is FedAvg; equal, as
        in equation (7); or one of N for each active client of all N and the rest for the server's copy, as if idle
        clients sent it. By default "samples", in the code's variant "all".
    variant : {"paper", "code"}, default "paper"
        "code": other factors (see there), ``mean`` "all", and E_lora = 2 unless given.

    Raises
    ------
    ValueError
        If a rank is not in (0, 1], a number of epochs is negative or both are 0; before the first round, if the run's
        local epochs are too few for what is given.

    Examples
    --------
    >>> [phase.length(5) for phase in feddecomp().phases], [phase.length(1) for phase in feddecomp().phases]
    ([0, 2, 3], [1, 0, 0])
    """
    ranks = require_ranks(rank_linear, rank_conv)
    check.choice("variant", variant, ("paper", "code"))
    for name, flag in (("alternating", alternating), ("reverse", reverse)):
        check.choice(name, flag, (True, False))
    settings = dict(zip(("rank_linear", "rank_conv"), ranks, strict=True)) | {
        "lora_epochs": lora_epochs, "global_epochs": global_epochs, "alternating": alternating, "reverse": reverse,
        "mean": mean, "variant": variant,
    }  # fmt: skip
    epochs = _epochs(lora_epochs, global_epochs, alternating, variant == "code")
    weights = check.choice("mean", mean or ("all" if variant == "code" else "samples"), tuple(MEANS))

    def private(name: str) -> bool:
        return (name.rpartition(".")[2] in FACTORS) != reverse

    phases = (
        Phase(lambda total: epochs(total)[0]),
        Phase(lambda total: epochs(total)[1], is_trainable=private),
        Phase(lambda total: epochs(total)[2], is_trainable=lambda name: not private(name)),
    )
    return Algorithm(
        "feddecomp",
        masks.keep_parameters(private),
        phases=phases,
        settings=settings,
        wrap=lambda net: decomposed(net, *ranks, variant),
        weights=MEANS[weights],
        about=ABOUT,
    )


def _epochs(
    lora: int | None, shared: int | None, alternating: bool, code: bool
) -> Callable[[int], tuple[int, int, int]]:
    """Epochs of both parts at once, of the private and of the shared part, given the run's."""
    given = {"lora_epochs": lora, "global_epochs": shared}
    for name, value in given.items():
        if value is not None:
            check.integer(name, value, low=0)
    if lora == shared == 0:
        raise ValueError("lora_epochs and global_epochs must not both be 0: nothing would be trained")
    default = lora is None and shared is None

    def divided(total: int) -> tuple[int, int, int]:
        if default and not code and total == 1:
            return 1, 0, 0
        if default:
            first = 2 if code else max(1, 2 * total // 5)
        else:
            first = total - (shared or 0) if lora is None else lora
        second = total - first if shared is None else shared
        if first < 0 or second < default:
            said = "".join(f" for {name}={value}" for name, value in given.items() if value is not None)
            raise ValueError(
                f"feddecomp divides the run's local_epochs between its two parts, but {total} are too few{said}. "
                "Raise local_epochs, or give both lora_epochs and global_epochs."
            )
        return (0, first, second) if alternating else (first + second, 0, 0)

    return divided
