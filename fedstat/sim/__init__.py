"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from fedstat.sim.experiment import Settings, study
from fedstat.sim.model8 import OneClassWarning, generate
from fedstat.sim.recovery import recover, spectrum
from fedstat.sim.report import same_state, summary

__all__ = ["OneClassWarning", "Settings", "generate", "recover", "same_state", "spectrum", "study", "summary"]
