"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from typing import TYPE_CHECKING

from fedstat._utils.lazy import attach

if TYPE_CHECKING:
    from fedstat.sim.experiment import Settings, prop_unchanged, study, summary
    from fedstat.sim.model8 import OneClassWarning, generate
    from fedstat.sim.recovery.accuracy import recover, spectrum

__all__ = ["OneClassWarning", "Settings", "generate", "prop_unchanged", "recover", "spectrum", "study", "summary"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "OneClassWarning": "fedstat.sim.model8",
        "Settings": "fedstat.sim.experiment",
        "generate": "fedstat.sim.model8",
        "recover": "fedstat.sim.recovery.accuracy",
        "prop_unchanged": "fedstat.sim.experiment",
        "spectrum": "fedstat.sim.recovery.accuracy",
        "study": "fedstat.sim.experiment",
        "summary": "fedstat.sim.experiment",
    },
)
