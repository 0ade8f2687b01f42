"""FedPer."""

from __future__ import annotations

from typing import Annotated

from fedstat.fl import masks
from fedstat.fl.algorithm import About, Algorithm

ABOUT = About("FedPer", ("arivazhagan2019",), "all but the last layers", "the last layers")

PersonalLayers = Annotated[int, "last layers that are a client's own"]


def fedper(*, personal_layers: PersonalLayers = 1) -> Algorithm:
    """The last layers are private, the rest is shared.

    Arivazhagan, Aggarwal, Singh and Choudhary (2019), "Federated learning with personalization layers",
    arXiv:1912.00818, Algorithms 1 and 2. Up and down: the base layers. The last ``personal_layers`` layers never leave
    their client; one, as in FedFac §5.1, equals FedFac with Λ = the output layer and τ = inf.
    """
    init_mask = masks.keep_layers(lambda net: masks.last_layers(net, "personal_layers", personal_layers))
    return Algorithm("fedper", init_mask, settings={"personal_layers": personal_layers}, about=ABOUT)
