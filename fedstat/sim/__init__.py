"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from fedstat.sim.generate import OneClassWarning, generate
from fedstat.sim.recovery import recovery, spectrum
from fedstat.sim.report import same_state, summary
from fedstat.sim.study import Settings, study

__all__ = ["OneClassWarning", "Settings", "generate", "recovery", "same_state", "spectrum", "study", "summary"]
