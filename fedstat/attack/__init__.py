"""Gradient inversion of the uploads of clients; also ``python -m fedstat.attack``."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.attack.experiment import leakage, leakage_of
    from fedstat.attack.matching import Observed, observe

__all__ = ["Observed", "leakage", "leakage_of", "observe"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "Observed": "fedstat.attack.matching",
        "leakage": "fedstat.attack.experiment",
        "leakage_of": "fedstat.attack.experiment",
        "observe": "fedstat.attack.matching",
    },
)
