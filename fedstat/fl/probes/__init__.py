"""Measurements beside training: each probe returns its own groups of the run's store."""

from fedstat.fl.probes.base import Probe, Values

__all__ = ["Probe", "Values"]
