"""FedSplit: a given split that stays fixed, or a random one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from fedstat._utils import check, streams
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, InitContext, Mask, RoundContext, SharedMask
from fedstat.fl.nets import Net
from fedstat.stats import split as splitting

_PAPER = ("wang2023",)
FEDSPLIT = About("FedSplit", _PAPER, "units of a given split", "the other units")
RANDOM = About("random split", _PAPER, "units of the layers Λ, by chance", "the other units of Λ")
REDRAWN = RANDOM._replace(title="random, redrawn", shared="units of the layers Λ, by chance, drawn anew in every round")

Split = Annotated[masks.Layers | None, "Λ, layers to split, by name or number from 1 (default: the last hidden layer)"]


def fedsplit(shared: Annotated[Mapping[str | int, Any], "a mapping from layer to bool per unit"]) -> Algorithm:
    """FedSplit: shared units are averaged; personal units stay with their client.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §3.1.
    Up and down: the shared units, and every layer without a split.

    Parameters
    ----------
    shared : mapping from layer (name, or number from 1) to bool array (unit,)
        Other layers are shared.
    """
    if not isinstance(shared, Mapping):
        raise ValueError(f"shared must be a mapping from layer to one bool per unit, but got {shared!r}")
    named = {str(layer): np.flatnonzero(flags).tolist() for layer, flags in shared.items()}
    return Algorithm(
        "fedsplit",
        lambda context: SharedMask(masks.units(context.net, shared, context.device)),
        settings={"shared": named},
        about=FEDSPLIT,
    )


def random_split(
    layers: Split = None,
    *,
    share: Annotated[float | None, "proportion of units that are shared (default 0.5)"] = None,
    tau: Annotated[splitting.Tau | None, "1 − share, in place of share"] = None,
    redrawn: bool = False,
) -> Algorithm:
    """A random split (the same paper, §4.3 and Table 8). Up and down: what is shared, as in FedSplit.

    Hidden units are exchangeable at the start, so a random split that stays fixed is equal in distribution to any other
    split of its size, including the true one; only a split drawn anew in every round can do worse.

    Parameters
    ----------
    layers : sequence of str or int, str, or int, optional
        Layers to split, by name or number from 1; by default the last hidden layer.
    share : float, optional
        Proportion of each layer's units to share: round(share · units); 0.5 by default.
    tau : float in (0, 1), inf or -inf, optional
        The size as FedFac's quantile that shares as many units: 1 − share; in place of ``share``.
    redrawn : bool
        Draw the split anew after every round's local training.
    """
    given = masks.given_layers(layers)
    share = _share(share, tau)

    def draw(net: Net, seed: int, number: int, device: Any) -> Mask:
        flags = {}
        for layer in masks.resolve(net, given):
            units = nets.layers(net)[layer]
            flags[layer] = np.zeros(units, dtype=bool)
            chosen = streams.generator(seed, "random split", layer, number).permutation(units)
            flags[layer][chosen[: round(share * units)]] = True
        return masks.units(net, flags, device)

    def init_mask(context: InitContext) -> SharedMask:
        return SharedMask(draw(context.net, context.seed, -1, context.device))

    def update_mask(context: RoundContext) -> SharedMask:
        return SharedMask(draw(context.net, context.seed, context.round, masks.device_of(context.mask.shared)))

    return Algorithm(
        "random-redrawn" if redrawn else "random",
        init_mask,
        update_mask if redrawn else None,
        settings={"layers": given, "share": share} | ({} if tau is None else {"tau": str(tau)}),
        personal_params=(lambda net: masks.of_layers(net, masks.resolve(net, given))) if redrawn else None,
        about=REDRAWN if redrawn else RANDOM,
    )


def _share(share: float | None, tau: splitting.Tau | None) -> float:
    """Proportion of units to share, given as such or as a quantile."""
    if tau is None:
        return check.real("share", 0.5 if share is None else share, low=0, high=1)
    if share is not None:
        raise check.NoEffectError("share", f"beside tau, which means the same, but got {share!r} and tau={tau!r}")
    if isinstance(tau, str | splitting.Absolute):
        raise ValueError(f"tau must be a number to size a random split, but got {tau!r}")
    splitting.threshold(np.array([0.0, 1.0]), tau)  # raises if tau is out of range
    return min(1.0, max(0.0, 1 - tau))
