"""FedDecomp: every weight is the sum of a shared full part and a personal low-rank part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np

from fedstat._utils import check
from fedstat.fl import masks
from fedstat.fl.aggregate import uniform
from fedstat.fl.algorithm import About, Algorithm, Phase, Variant
from fedstat.fl.wrappers.composed import FACTORS, ConvRank, LinearRank, decomposed, require_ranks

ABOUT = About(
    "FedDecomp",
    ("wu2024",),
    "a full part of every weight, and all other parameters",
    "a low-rank part of every weight, which is trained first",
)
MEANS: dict[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray] | None] = {
    "samples": None,
    "uniform": uniform,
    "all": lambda _, client_ids, n_clients: np.full(len(client_ids), 1 / n_clients),
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
        Literal["samples", "uniform", "all"] | None, "weights of the mean: samples, uniform, or all (of all clients)"
    ] = None,
    variant: Variant = "paper",
) -> Algorithm:
    """Decompose weights as W = σ + BA; a client first trains the personal low-rank BA, then the shared σ.

    Wu, Liu, Niu, Wang, Tang, Zhu and Su (2024), "Decoupling general and personalized knowledge in federated learning
    via additive and low-rank decomposition", ACM MM, §3, Algorithm 1. :func:`fedstat.fl.wrappers.composed.decomposed`
    describes weights and ranks. Shared (upload and download): σ and all parameters that are not decomposed. Personal: B
    and A.

    Parameters
    ----------
    rank_linear, rank_conv : float, default 0.6
        R_l and R_c, in (0, 1]; the default is the best of Table 2 for CIFAR-10.
    lora_epochs, global_epochs : int, optional
        E_lora and E_global. If one is missing, it is the rest of the run's local epochs E = E_lora + E_global. If both
        are missing, E_lora is two fifths of E, rounded down, at least 1. This is 2 of 5, as in the published code; the
        text gives no number. If both are missing and E = 1, both parts are trained at once.
    alternating : bool, default True
        False: both parts are trained at once, for E_lora + E_global epochs (Table 3).
    reverse : bool, default False
        True: BA is shared, and σ and all parameters that are not decomposed are personal (Table 5). "Other training
        strategy is the same": the personal part, here σ, is trained first, for E_lora epochs; then BA for E_global.
    mean : {"samples", "uniform", "all"}, optional
        Weights of the mean over the selected clients. "samples": by numbers of samples; E_lora = 0 is then FedAvg.
        "uniform": equal, as in equation (7). "all": 1/N for each selected client, with N the number of all clients; the
        global model has the remaining weight, as if clients that were not selected had uploaded it. The default is
        "samples", and "all" with variant "code".
    variant : {"paper", "code"}, default "paper"
        "code": the factors of variant "code" of ``decomposed``, ``mean`` "all", and E_lora = 2 by default.

    Raises
    ------
    ValueError
        If a rank is not in (0, 1], or if a number of epochs is negative or both are 0; before the first round, if the
        run's local epochs are fewer than the phases need.

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

    def is_personal(name: str) -> bool:
        return (name.rpartition(".")[2] in FACTORS) != reverse

    phases = (
        Phase(lambda total: epochs(total)[0]),
        Phase(lambda total: epochs(total)[1], is_trainable=is_personal),
        Phase(lambda total: epochs(total)[2], is_trainable=lambda name: not is_personal(name)),
    )
    return Algorithm(
        "feddecomp",
        masks.keep_parameters(is_personal),
        phases=phases,
        settings=settings,
        wrap=lambda net: decomposed(net, *ranks, variant),
        weights=MEANS[weights],
        about=ABOUT,
    )


def _epochs(
    lora: int | None, shared: int | None, alternating: bool, code: bool
) -> Callable[[int], tuple[int, int, int]]:
    """Return a function from the run's local epochs to epochs of both parts at once, the personal, the shared part."""
    settings = {"lora_epochs": lora, "global_epochs": shared}
    for name, value in settings.items():
        if value is not None:
            check.integer(name, value, low=0)
    if lora == shared == 0:
        raise ValueError("lora_epochs and global_epochs are both 0, so that nothing is trained. Raise one of them.")
    is_default = lora is None and shared is None

    def divide(total: int) -> tuple[int, int, int]:
        if is_default and not code and total == 1:
            return 1, 0, 0
        if is_default:
            first = 2 if code else max(1, 2 * total // 5)
        else:
            first = total - (shared or 0) if lora is None else lora
        second = total - first if shared is None else shared
        if first < 0 or second < is_default:
            cause = "".join(f" for {name}={value}" for name, value in settings.items() if value is not None)
            raise ValueError(
                f"feddecomp divides local_epochs between its two parts, but {total} are too few{cause}. Raise "
                "local_epochs, or set both lora_epochs and global_epochs."
            )
        return (0, first, second) if alternating else (first + second, 0, 0)

    return divide
