"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from fedstat.sim.generate import OneClassWarning, generate
from fedstat.sim.recovery import recovery
from fedstat.sim.study import Settings, study
from fedstat.sim.summary import same_state, summary

__all__ = ["OneClassWarning", "Settings", "generate", "recovery", "same_state", "study", "summary"]
