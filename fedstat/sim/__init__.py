"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from fedstat.sim.experiment import Settings, same_state, study, summary
from fedstat.sim.model8 import OneClassWarning, generate
from fedstat.sim.recovery import recover, spectrum

__all__ = ["OneClassWarning", "Settings", "generate", "recover", "same_state", "spectrum", "study", "summary"]
