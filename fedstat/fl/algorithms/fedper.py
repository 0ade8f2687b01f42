"""FedPer: personal last layers."""

from __future__ import annotations

from typing import Annotated

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm

ABOUT = About("FedPer", ("arivazhagan2019",), "all but the last layers", "the last layers")

PersonalLayers = Annotated[int, "number of last layers that are personal"]


def fedper(*, personal_layers: PersonalLayers = 1) -> Algorithm:
    """Keep the last layers personal; share the others.

    Arivazhagan, Aggarwal, Singh and Choudhary (2019), "Federated learning with personalization layers",
    arXiv:1912.00818, Algorithms 1 and 2. Shared (upload and download): the base layers. Personal: the last
    ``personal_layers`` layers. One such layer, as in FedFac §5.1, equals FedFac with Λ = the output layer and τ = inf.
    """
    init_mask = masks.keep_layers(lambda net: masks.last_layers(net, "personal_layers", personal_layers))
    return Algorithm("fedper", init_mask, settings={"personal_layers": personal_layers}, about=ABOUT)
