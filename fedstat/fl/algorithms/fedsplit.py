"""FedSplit: a fixed split of units, or a random one."""

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
    """Average the shared units of a given split, and keep the others personal.

    Wang, Tang and Li, "Factor-assisted federated learning for personalized optimization with heterogeneous data", §3.1.
    Shared (upload and download): the shared units, and all layers without a split. Personal: the other units.

    Parameters
    ----------
    shared : mapping from layer (name, or number from 1) to bool array (unit,)
        True for shared units. Layers that are not named are shared.
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


@check.effective
def random_split(
    layers: Split = None,
    *,
    shared_fraction: Annotated[
        float | None,
        "proportion of units that are shared (default 0.5)",
        check.EffectIf("tau", lambda tau: tau is None),
    ] = None,
    tau: Annotated[splitting.Tau | None, "1 − shared_fraction, instead of it"] = None,
    redrawn: bool = False,
) -> Algorithm:
    """Split the units at random (FedFac, §4.3 and Table 8); upload and download are FedSplit's.

    Hidden units are exchangeable under random initial parameters. A fixed random split therefore has the distribution
    of any other split of its size, including the true one; only a split that is redrawn in every round can be worse.

    Parameters
    ----------
    layers : sequence of str or int, str, or int, optional
        Layers to split, by name or number from 1; by default the last hidden layer.
    shared_fraction : float, optional
        Proportion of each layer's units to share: round(shared_fraction · units); 0.5 by default.
    tau : float in (0, 1), inf or -inf, optional
        Quantile with which FedFac shares as many units: 1 − shared_fraction. It replaces ``shared_fraction``.
    redrawn : bool
        True: draw a new split after every round's local training.
    """
    requested = masks.given_layers(layers)
    fraction = _fraction(shared_fraction, tau)

    def draw(net: Net, seed: int, number: int, device: Any) -> Mask:
        flags = {}
        for layer in masks.resolve(net, requested):
            units = nets.layers(net)[layer]
            flags[layer] = np.zeros(units, dtype=bool)
            order = streams.generator(seed, "random split", layer, number).permutation(units)
            flags[layer][order[: round(fraction * units)]] = True
        return masks.units(net, flags, device)

    def init_mask(context: InitContext) -> SharedMask:
        return SharedMask(draw(context.net, context.seed, -1, context.device))

    def update_mask(context: RoundContext) -> SharedMask:
        return SharedMask(draw(context.net, context.seed, context.round, masks.device_of(context.mask.shared)))

    return Algorithm(
        "random-redrawn" if redrawn else "random",
        init_mask,
        update_mask if redrawn else None,
        settings={"layers": requested, "shared_fraction": fraction} | ({} if tau is None else {"tau": str(tau)}),
        personal_params=(lambda net: masks.of_layers(net, masks.resolve(net, requested))) if redrawn else None,
        about=REDRAWN if redrawn else RANDOM,
    )


def _fraction(shared_fraction: float | None, tau: splitting.Tau | None) -> float:
    """Return the proportion of units to share, from ``shared_fraction`` or the quantile ``tau``."""
    if tau is None:
        return check.real("shared_fraction", 0.5 if shared_fraction is None else shared_fraction, low=0, high=1)
    if isinstance(tau, str | splitting.Absolute):
        raise ValueError(f"tau must be a number to size a random split, but got {tau!r}")
    splitting.threshold(np.array([0.0, 1.0]), tau)  # raises if tau is out of range
    return min(1.0, max(0.0, 1 - tau))
