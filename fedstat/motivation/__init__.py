"""The motivating study of the FedFac paper (§1, Figs. 1 and 2): hidden neurons' outputs over clients."""

from fedstat.motivation.experiment import Settings, study
from fedstat.motivation.findings import correlations, summary

__all__ = ["Settings", "correlations", "study", "summary"]
