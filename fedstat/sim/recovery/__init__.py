"""Recovery of the true split over κ, by method."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.sim.recovery.accuracy import DEFAULT, KAPPA, correlation, recover, spectrum, tidy

__all__ = ["DEFAULT", "KAPPA", "correlation", "recover", "spectrum", "tidy"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "DEFAULT": "fedstat.sim.recovery.accuracy",
        "KAPPA": "fedstat.sim.recovery.accuracy",
        "correlation": "fedstat.sim.recovery.accuracy",
        "recover": "fedstat.sim.recovery.accuracy",
        "spectrum": "fedstat.sim.recovery.accuracy",
        "tidy": "fedstat.sim.recovery.accuracy",
    },
)
