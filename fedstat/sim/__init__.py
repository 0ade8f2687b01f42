"""Simulation studies on model (8) of the FedFac paper (§4.3)."""

from fedstat.sim.generate import OneClassWarning, generate
from fedstat.sim.recovery import recovery

__all__ = ["OneClassWarning", "generate", "recovery"]
