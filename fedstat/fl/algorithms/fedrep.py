"""FedRep: a personal head, trained before the shared body."""

from __future__ import annotations

from typing import Annotated

from fedstat._utils import check
from fedstat.fl import masks, nets
from fedstat.fl.algorithm import About, Algorithm, Phase
from fedstat.fl.algorithms.fedper import PersonalLayers, fedper
from fedstat.fl.nets import Net

ABOUT = About(
    "FedRep",
    ("collins2021",),
    "all but the last layers",
    "the last layers, which are trained first",
    ("local_train",),
)


def fedrep(
    *,
    personal_layers: PersonalLayers = 1,
    head_epochs: Annotated[int | None, "epochs of training the last layers"] = None,
    body_epochs: Annotated[int, "epochs of training the other layers"] = 1,
) -> Algorithm:
    """Run FedPer, but train the personal head first, then the shared body with the head fixed.

    Collins, Hassani, Mokhtari and Shakkottai (2021), "Exploiting shared representations for personalized federated
    learning", ICML, Algorithm 1. Shared (upload and download): the body. Personal: the head, the last
    ``personal_layers`` layers. With ``head_epochs`` None, the head is trained for the run's local epochs.
    """
    check.integer("body_epochs", body_epochs)
    epochs = head_epochs if head_epochs is None else check.integer("head_epochs", head_epochs)

    def head(net: Net) -> list[str]:
        return masks.last_layers(net, "personal_layers", personal_layers)

    def body(net: Net) -> list[str]:
        return [layer for layer in nets.layers(net) if layer not in head(net)]

    settings = {"personal_layers": personal_layers, "head_epochs": head_epochs, "body_epochs": body_epochs}
    init_mask = fedper(personal_layers=personal_layers).init_mask
    phases = (Phase(epochs, layers=head), Phase(body_epochs, layers=body))
    return Algorithm("fedrep", init_mask, phases=phases, settings=settings, about=ABOUT)
